"""Stock torchrun with our agent and with PyTorch's own: nodes join, die, leave and fail while the job runs."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.procs import Job
from helpers.workers import place

from .conftest import Start

pytestmark = pytest.mark.torchrun


@pytest.mark.cold
@pytest.mark.parametrize("agent", ["rust", "run", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
def test_two_nodes_form_one_world_and_end_with_0(start: Start) -> None:
    nodes = [start(number, "--torch", nnodes="2", nproc=2) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    sums = [line for node in nodes for line in node.lines if line.startswith("SUM")]
    assert len(sums) == 4
    assert {line.split()[2] for line in sums} == {"world=4"}
    assert len({line.split()[3] for line in sums}) == 1, "one master for all"
    # pytorch #69520: a clean run prints no errors from clients whose server has gone.
    text = "\n".join(line for node in nodes for line in node.lines)
    assert "recv" not in text
    assert "Broken pipe" not in text


def test_every_generation_finds_an_empty_store(start: Start) -> None:
    # pytorch #135712: its agent store keeps the addresses of the earlier generation. With a single worker, no other
    # process can have written a key yet.
    node = start(2, "--fail=0:7", nnodes="1", restarts=2)
    assert node.wait() == 1
    assert [line for line in node.lines if line.startswith("KEYS")] == ["KEYS rank=0 at start: 0"] * 3
    masters = [line for line in node.lines if line.startswith("SUM")]
    assert len(set(masters)) == 3, "each generation has another port"


# pytorch #147064: with PyTorch's own backend the job dies or splits in each of the three cases.
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        pytest.param(3, 4, 2, id="sorts first"),
        pytest.param(2, 4, 3, id="sorts between", marks=pytest.mark.long),
        pytest.param(2, 3, 4, id="sorts last", marks=pytest.mark.long),
    ],
)
def test_a_third_node_joins_the_running_job(start: Start, tmp_path: Path, first: int, second: int, third: int) -> None:
    done = tmp_path / "done"
    running = [start(number, "--until", done, nnodes="1:3", nproc=2) for number in (first, second)]
    before = [node.line(r"SUM rank=\d+ world=4 master=(\S+)") for node in running]
    marks = [node.mark() for node in running]
    newcomer = start(third, "--until", done, nnodes="1:3", nproc=2)
    after = [
        node.line(r"SUM rank=\d+ world=6 master=(\S+)", since=mark) for node, mark in zip(running, marks, strict=True)
    ]
    joined = newcomer.line(r"SUM rank=\d+ world=6 master=(\S+)")
    assert len({match[1] for match in [*after, joined]}) == 1, "one master for all"
    assert after[0][1] != before[0][1], "each generation has another store"
    # pytorch #191190: survivors keep their ranks, wherever the newcomer's address sorts.
    assert place(newcomer, 6)["group_rank"] == "2"
    done.touch()
    assert [node.wait() for node in [*running, newcomer]] == [0, 0, 0]


def test_survivors_of_a_killed_agent_form_the_next_world(start: Start, job: Job, agent: str) -> None:
    # pytorch #111646: with its backend the survivors never notice. The workers run no collectives, which would fail.
    # The killed agent does not host the coordinator; `test_host.py` tests that.
    host = start(2, "--quiet", nnodes="1:3")
    host.line(r"this process hosts the coordinator")
    others = [start(number, "--quiet", nnodes="1:3") for number in (3, 4)]
    for node in [host, *others]:
        place(node, 3)
    marks = {node.name: node.mark() for node in (host, others[0])}
    orphans = job.workers(others[1])
    others[1].signal(signal.SIGKILL)
    ranks = [place(node, 2, since=marks[node.name])["group_rank"] for node in (host, others[0])]
    assert sorted(ranks) == ["0", "1"]
    assert host.line(r"round \d+ is interrupted: 127\.0\.0\.4 .* is lost: its process has ended")
    assert len(orphans) == 1
    if agent != "torch":
        # pytorch #150916: PyTorch's agent leaves its workers behind when it is killed.
        job.until_gone(*orphans.values())
    job.kill_leftovers()


def test_a_node_that_is_terminated_leaves_at_once(start: Start, agent: str) -> None:
    # PyTorch waits 11 s for the lost heartbeats, then 30 s for a last call.
    host = start(2, "--quiet", nnodes="1:3")
    host.line(r"this process hosts the coordinator")
    leaver = start(3, "--quiet", nnodes="1:3")
    place(host, 2)
    mark = host.mark()
    leaver.signal(signal.SIGTERM)
    place(host, 1, since=mark)
    assert host.line(r"127\.0\.0\.3 .* left: its agent got SIGTERM")
    code = 1 if agent == "torch" else 128 + signal.SIGTERM
    assert leaver.wait() == code
    host.signal(signal.SIGTERM)
    assert host.wait() == code


def test_a_killed_worker_restarts_the_world(start: Start, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = [start(number, "--torch", "--until", done, nnodes="2") for number in (2, 3)]
    before = [node.line(r"SUM rank=\d+ world=2 master=(\S+)") for node in nodes]
    assert len({match[1] for match in before}) == 1
    workers = job.workers()
    os.kill(workers[max(workers)], signal.SIGKILL)
    # The new generation has another store, on another port.
    another = rf"SUM rank=\d+ world=2 master=(?!{re.escape(before[0][1])}$)(\S+)"
    assert len({node.line(another)[1] for node in nodes}) == 1
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_failure_for_good_ends_all_nodes_and_names_its_cause(start: Start, agent: str) -> None:
    # pytorch #76287: with its backend the other nodes run on for ever. The workers run no collectives, which would
    # fail.
    host = start(2, "--quiet", nnodes="2", restarts=0)
    host.line(r"this process hosts the coordinator")
    failing = start(3, "--quiet", nnodes="2", restarts=0)
    pids = {node.name: int(place(node, 2)["pid"]) for node in (host, failing)}
    os.kill(pids["node3"], signal.SIGKILL)
    assert failing.wait() == 1
    assert host.wait() == 1
    text = "\n".join(host.lines)
    assert f"pid {pids['node3']}" in text
    assert "SIGKILL" in text
    # With our agent every node reports the failure. PyTorch's agent reports its own error.
    assert ("RendezvousClosedError" if agent == "torch" else "ChildFailedError") in text


def test_a_spare_steps_in_when_a_node_is_lost(start: Start, job: Job) -> None:
    # pytorch #114097.
    host = start(2, "--quiet", nnodes="2:2")
    host.line(r"this process hosts the coordinator")
    lost = start(3, "--quiet", nnodes="2:2")
    place(host, 2)
    mark = host.mark()
    spare = start(4, "--quiet", nnodes="2:2")
    host.line(r"127\.0\.0\.4 .* joined \(3 of 2 nodes\)", since=mark)
    lost.signal(signal.SIGKILL)
    assert place(host, 2, since=mark)["group_rank"] == "0"
    assert place(spare, 2)["group_rank"] == "1"
    started = [line for line in host.lines[mark:] if line.startswith("WORKER")]
    assert len(started) == 1, "a spare does not disturb a full job until it is needed"
    job.kill_leftovers()
