"""Stock torchrun with a store and coordinator in a separate process (`elastic-rs store serve`)."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.procs import Job, Process

from .conftest import SCRIPTS, Start

pytestmark = pytest.mark.torchrun
STEPS = SCRIPTS / "steps.py"


def serve(job: Job, port: int, name: str) -> Process:
    command = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"]
    host = job.start(command, name=name)
    host.line(rf"^listening on 127\.0\.0\.1:{port}$")
    return host


def test_nodes_use_a_separate_host(start: Start, job: Job, port: int) -> None:
    host = serve(job, port, "host")
    nodes = [start(number, "--torch", nnodes="2", conf="is_host=0,last_call_timeout=1") for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    text = "\n".join(line for node in nodes for line in node.lines)
    assert "and this one connects to it: is_host=0 was given" in text
    assert "recv" not in text
    assert "Broken pipe" not in text
    host.signal(signal.SIGTERM)
    assert host.wait() == 0
    assert "elastic-rs: SIGTERM: waiting for 0 nodes and 0 clients to go" in host.lines


def test_a_host_that_is_killed_and_started_again_disturbs_no_worker(
    start: Start, job: Job, agent: str, port: int, tmp_path: Path
) -> None:
    # pytorch #67742: with PyTorch's backend all agents fail on their next look at the store.
    done = tmp_path / "done"
    host = serve(job, port, "host")
    work = ["--torch"] if agent == "rust" else []
    conf = "is_host=0,last_call_timeout=1"
    nodes = [start(number, *work, "--until", done, nnodes="2", conf=conf) for number in (2, 3)]
    for node in nodes:
        node.line("SUM rank=. world=2")
    workers = job.workers()
    host.signal(signal.SIGKILL)
    host.wait()
    again = serve(job, port, "host again")
    again.line("all 2 members of round 1 have reported")
    assert job.workers() == workers
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    started = [line for node in nodes for line in node.lines if line.startswith("WORKER")]
    assert len(started) == 2, "no worker was restarted"
    again.signal(signal.SIGTERM)
    assert again.wait() == 0


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_a_node_that_was_cut_off_while_the_coordinator_was_away_does_not_fail_the_job(
    start: Start, job: Job, port: int, tmp_path: Path
) -> None:
    """Its agent stands still for longer than its lease, so its workers end. Those of the other node change in place.

    That costs no restart: there is none.
    """
    lease_s = 6.0
    conf = "is_host=0,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
    done = tmp_path / "done"
    host = serve(job, port, "host")
    nodes = [start(number, "--until", done, nnodes="2", restarts=0, conf=conf, script=STEPS) for number in (2, 3)]
    for node in nodes:
        node.line(r"WORLD .*world=2 ")
    nodes[0].line(r"STEP 2\d ")
    healthy, cut_off = nodes
    workers = job.workers(healthy)
    os.kill(cut_off.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    host.signal(signal.SIGKILL)
    host.wait()
    mark = healthy.mark()
    time.sleep(lease_s - 1.5)  # the coordinator is away
    again = serve(job, port, "host again")
    again.line(r"\) was placed in round 1 of 2 nodes")
    time.sleep(max(0.0, stopped + lease_s + 0.5 - time.monotonic()))  # the rest of the lease
    os.kill(cut_off.pid, signal.SIGCONT)
    healthy.line(r"WORLD .*world=2 ", since=mark)
    assert job.workers(healthy) == workers, f"the healthy worker was restarted\n{healthy.tail()}"
    assert any("restarts its workers" in line for line in healthy.lines[mark:])
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    again.signal(signal.SIGTERM)
    assert again.wait() == 0


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_a_host_that_stands_still_for_a_while_goes_on_afterwards(
    start: Start, job: Job, port: int, tmp_path: Path
) -> None:
    """Longer than it waits for signals at a time. That was taken for a signal."""
    done = tmp_path / "done"
    host = serve(job, port, "host")
    node = start(2, "--until", done, nnodes="1", conf="is_host=0,last_call_timeout=1")
    node.line("WORKER ")
    workers = job.workers()
    host.signal(signal.SIGSTOP)
    time.sleep(5.5)  # this is the fault
    host.signal(signal.SIGCONT)
    assert job.workers() == workers
    done.touch()
    assert node.wait() == 0
    assert not [line for line in host.lines if "nodes and" in line], "it has not begun to end"
    host.signal(signal.SIGTERM)
    assert host.wait() == 0
    assert any(line.startswith("elastic-rs: SIGTERM: waiting for 0 nodes") for line in host.lines)
