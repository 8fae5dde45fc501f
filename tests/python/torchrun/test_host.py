"""The node that hosts the coordinator: it is stopped, killed and started again, or ended by a signal."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start

pytestmark = [pytest.mark.torchrun]
OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
SHORT_LEASE = "last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=4"
LEASE_S = 2.0
LONG_LEASE = "last_call_timeout=1,keep_alive_interval=60,keep_alive_max_attempt=10"


def start_with_host(start: Start, others: int, *worker: str | Path, **how: str) -> list[Process]:
    """Start nodes, the first as the host, and wait until all are in one world."""
    host = start(2, *worker, script=FAMILY, **how)
    host.line("this process hosts the coordinator")
    nodes = [host, *(start(number, *worker, script=FAMILY, **how) for number in range(3, 3 + others))]
    for node in nodes:
        place(node, 1 + others)
    return nodes


@pytest.mark.parametrize(
    ("agent", "whole_job"),
    [
        ("run", True),
        ("run", False),
        ("rust", True),
        ("rust", False),
    ],
    indirect=["agent"],
)
def test_a_job_of_one_node_runs_on_after_a_pause_of_more_than_a_lease(
    start: Start, job: Job, tmp_path: Path, whole_job: bool
) -> None:
    done = tmp_path / "done"
    node = start(2, "--until", done, nnodes="1", conf=SHORT_LEASE, script=FAMILY)
    place(node, 1)
    paused = job.pids() if whole_job else [node.pid]
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3 * LEASE_S)  # the pause
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    node.line("this coordinator was stalled")
    done.touch()
    assert node.wait() == 0
    assert len([line for line in node.lines if "WORKER " in line]) == 1
    assert not any("cut off" in line for line in node.lines)


@OURS
def test_a_host_that_is_killed_and_started_again_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    # The lease is ten minutes. A wait for it exceeds the test's limit.
    done = tmp_path / "done"
    nodes = start_with_host(start, 2, "--until", done, nnodes="3", conf=LONG_LEASE)
    marks = [node.mark() for node in nodes]
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    began = time.monotonic()
    nodes[0], marks[0] = start(2, "--until", done, nnodes="3", conf=LONG_LEASE, script=FAMILY), 0
    for node, mark in zip(nodes, marks, strict=True):
        place(node, 3, since=mark)
    print(f"a world of three again after {time.monotonic() - began:.1f} s")
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def untrue(line: str) -> bool:
    """Whether a line is wrong after the host has gone."""
    return any(text in line for text in ("restarting all workers", "carries on", "already in use"))


@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_ctrl_c_on_the_host_ends_all_nodes_and_says_why(start: Start, agent: str, nnodes: str) -> None:
    host, other = start_with_host(start, 1, nnodes=nnodes)
    host_mark, mark = host.mark(), other.mark()
    host.signal(signal.SIGINT)
    assert host.wait() == (1 if agent == "torch" else 130)
    assert other.wait() == 1
    said = other.lines[mark:]
    print("\n".join(["host:", *host.lines[host_mark:], "other:", *said]))
    assert any("ended by 127.0.0.2" in line and "SIGINT" in line for line in said)
    assert not any(untrue(line) for line in said)


@OURS
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_sigterm_of_the_host_lets_the_others_wait_until_it_is_back(start: Start, tmp_path: Path, nnodes: str) -> None:
    done = tmp_path / "done"
    host, other = start_with_host(start, 1, "--until", done, nnodes=nnodes)
    mark = other.mark()
    host.signal(signal.SIGTERM)
    assert host.wait() == 143
    other.line(
        r"stopping all workers: the coordinator at .* was stopped: its host 127\.0\.0\.2 .* got SIGTERM; no world"
    )
    other.line(r"this node waits for it for up to 300s \(coordinator_timeout\)")
    said = other.lines[mark:]
    print("\n".join(said))
    assert not any(untrue(line) or "WORKER " in line for line in said)
    again = start(2, "--until", done, nnodes=nnodes, script=FAMILY)
    place(again, 2)
    place(other, 2, since=mark)
    done.touch()
    assert (again.wait(), other.wait()) == (0, 0)


@OURS
def test_a_node_that_waits_for_its_host_in_vain_names_the_cause_of_its_end(start: Start) -> None:
    host, other = start_with_host(start, 1, nnodes="2", conf="last_call_timeout=1,coordinator_timeout=3")
    mark = other.mark()
    host.signal(signal.SIGTERM)
    assert host.wait() == 143
    assert other.wait() == 1
    text = "\n".join(other.lines[mark:])
    assert "out of reach for 3.0s (coordinator_timeout): it was stopped (its host 127.0.0.2 " in text
    assert "in use" not in text
    print(text)
