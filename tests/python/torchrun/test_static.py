"""`elastic-run` with ranks by `--node-rank`: the workers of all rounds use the store of one endpoint."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, SCRIPTS, WORKER
from .test_in_place import assert_nothing_was_restarted, ended_well, pids, until_step, worlds_of

pytestmark = pytest.mark.torchrun

ATTEMPTS = SCRIPTS / "attempts.py"
STEPS = SCRIPTS / "steps.py"
WARM = "--warm-modules=torch,torch.distributed,torch.nn.parallel"


@pytest.fixture
def by_hand(job: Job, port: int) -> Any:
    def start(
        rank: int,
        *worker: str | Path,
        nnodes: int = 2,
        script: Path = FAMILY,
        options: Sequence[str] = (),
        name: str = "node",
    ) -> Process:
        flags = [f"--nnodes={nnodes}", f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "elastic_rs.run", *flags, *options, str(script), *map(str, worker)]
        return job.start(command, name=f"{name}{rank}", env={"ELASTIC_RS_LOG": "info"})

    return start


def test_ranks_by_hand_are_those_of_torchrun(by_hand: Any, port: int) -> None:
    # The node of rank 1 starts first, and waits for the other node's store.
    nodes = [by_hand(rank, "--torch", script=WORKER, options=["--nproc-per-node=2"]) for rank in (1, 0)]
    for node, group in zip(nodes, ("1", "0"), strict=True):
        found = place(node, 4)
        assert (found["group_rank"], found["master"]) == (group, f"127.0.0.1:{port}")
        assert int(found["rank"]) // 2 == int(group)
        node.line("SUM rank=. world=4")
    assert [node.wait() for node in nodes] == [0, 0]


def test_two_nodes_without_a_node_rank_get_an_error_that_names_it(by_hand: Any) -> None:
    first = by_hand(0)
    first.line("hosts the coordinator")
    second = by_hand(0, name="second")
    assert second.wait() == 1
    second.line(r"cannot host the coordinator at .*give each other node a --node-rank of its own")
    first.signal(signal.SIGTERM)
    first.wait()


def test_ranks_by_hand_outlive_the_loss_of_a_node(by_hand: Any, tmp_path: Path) -> None:
    # torchrun's static rendezvous does not notice the loss. Here the node of rank 0 gets rank 0 again when it comes
    # back, and no key of the earlier attempt is read.
    done = tmp_path / "done"
    zero, one = (by_hand(rank, "--until", done) for rank in (0, 1))
    for node in (zero, one):
        assert place(node, 2)["restarts"] == "0"
    mark = one.mark()
    zero.signal(signal.SIGKILL)
    zero.wait()
    zero = by_hand(0, "--until", done, name="again")
    assert place(zero, 2)["group_rank"] == "0"
    assert place(one, 2, since=mark)["group_rank"] == "1"
    assert place(one, 2, since=mark)["restarts"] == place(zero, 2)["restarts"]
    done.touch()
    assert [node.wait() for node in (zero, one)] == [0, 0]


def test_a_rank_that_is_given_twice_is_an_error(by_hand: Any, job: Job) -> None:
    for rank, number in ((0, 2), (1, 3)):
        by_hand(rank, nnodes=3, name=f"{number}-", options=[f"--local-addr=127.0.0.{number}"])
    wrong = by_hand(1, nnodes=3, name="4-", options=["--local-addr=127.0.0.4"])
    assert wrong.wait() == 1
    assert any("--node-rank is `1`, but this is number 2 of 3 nodes by rank" in line for line in wrong.lines)
    job.kill_leftovers()


def test_every_attempt_finds_an_empty_store(by_hand: Any) -> None:
    # With a single worker, no other process can have written a key yet.
    node = by_hand(0, "--fail=0:7", nnodes=1, script=WORKER, options=["--max-restarts=2"])
    assert node.wait() == 1
    assert [line for line in node.lines if line.startswith("KEYS")] == ["KEYS rank=0 at start: 0"] * 3


@pytest.mark.parametrize(
    ("nnodes", "dying", "count"),
    [
        (1, "one", 6),
        (2, "all", 6),
        *(pytest.param(nnodes, dying, 49, marks=pytest.mark.long) for nnodes in (1, 2) for dying in ("one", "all")),
    ],
)
def test_no_attempt_meets_the_keys_of_the_dead(by_hand: Any, nnodes: int, dying: str, count: int) -> None:
    # PyTorch's workers look for one another under the same keys in each attempt.
    flags = [WARM, f"--nproc-per-node={3 - nnodes}", f"--max-restarts={count}"]
    nodes = [by_hand(rank, count, dying, nnodes=nnodes, script=ATTEMPTS, options=flags) for rank in range(nnodes)]
    codes = [node.wait(limit_s=60 + 10 * count) for node in nodes]
    assert codes == [0] * nnodes, "\n".join(node.tail() for node in nodes)
    attempts = {int(line.split()[1]) for node in nodes for line in node.lines if line.startswith("ATTEMPT")}
    assert attempts == set(range(count + 1)), "an attempt ended before its process group was made"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_workers_with_fixed_ranks_survive_in_place(by_hand: Any, tmp_path: Path, nnodes: int) -> None:
    done, world = tmp_path / "done", 2 * nnodes
    options = ["--nproc-per-node=2", "--max-restarts=9"]
    nodes = [by_hand(rank, "--until", done, nnodes=nnodes, script=STEPS, options=options) for rank in range(nnodes)]
    marks = [0] * nnodes
    before: dict[int, int] = {}
    last_victims: list[int] = []
    for victims in ([1], [0], [world - 1, 0], []):
        found = [worlds_of(node, world, workers=2, since=mark) for node, mark in zip(nodes, marks, strict=True)]
        after = {rank: pid for worlds in found for rank, pid in pids(worlds).items()}
        assert sorted(after) == list(range(world))
        assert {rank for rank in before if after[rank] != before[rank]} <= set(last_victims)
        until_step(nodes[0], 3, since=marks[0])
        before, last_victims = after, victims
        marks = [node.mark() for node in nodes]
        for victim in victims:
            os.kill(before[victim], signal.SIGKILL)
    assert_nothing_was_restarted(*nodes)
    ended_well(done, *nodes)


def test_a_port_that_nobody_knows_is_any_port(by_hand: Any) -> None:
    node = by_hand(0, nnodes=1, script=WORKER, options=["--master-port=0"])
    node.line("SUM rank=0 world=1")
    assert node.wait() == 0


def test_a_flag_that_needs_torch_changes_nothing_for_fixed_ranks(by_hand: Any) -> None:
    # PyTorch's launcher runs one node, and the other one is started as usual.
    flags = ["--max-restarts=2"]
    nodes = [
        by_hand(0, 2, "all", script=ATTEMPTS, options=[*flags, "--event-log-handler=console"]),
        by_hand(1, 2, "all", script=ATTEMPTS, options=[*flags, WARM]),
    ]
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    attempts = {int(line.split()[1]) for node in nodes for line in node.lines if line.startswith("ATTEMPT")}
    assert attempts == {0, 1, 2}
