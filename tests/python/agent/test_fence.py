"""Workers of a node that is cut off, or whose agent is stopped, are dead before another world runs.

``ELASTIC_RS_FENCES`` says how often each of them is tried.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.procs import LIMIT_S, Job, Process
from helpers.relays import Relay, Relays
from helpers.warm import WARM
from helpers.workers import place

SCRIPTS = Path(__file__).parents[1] / "scripts"
CLOCKED, STEPS = SCRIPTS / "clocked.py", SCRIPTS / "steps.py"
TIMES = range(int(os.environ.get("ELASTIC_RS_FENCES", "2")))


class Ran(NamedTuple):
    """When a worker made its first and its last step, on the machine's monotonic clock."""

    first: float
    last: float


class Nodes:
    """Nodes on this machine. Number 0 hosts the coordinator, number 1 reaches it through a relay."""

    def __init__(self, job: Job, port: int, relay: Relay, folder: Path) -> None:
        self._job, self._port, self.relay, self._folder = job, port, relay, folder

    def start(
        self, number: int, nnodes: str, *options: str, attempts: int = 3, script: tuple[str, ...] = ()
    ) -> Process:
        script = script or (str(CLOCKED), str(self._folder), *(["--stubborn"] if number else []))
        conf = (
            f"last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt={attempts},is_host={int(number == 0)}"
        )
        command = [
            *(sys.executable, "-m", "elastic_rs.run"),
            *(f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=rust-c10d"),
            f"--rdzv-endpoint=127.0.0.1:{self.relay.port if number == 1 else self._port}",
            *("--rdzv-id=job", f"--rdzv-conf={conf}", *options, *script),
        ]
        return self._job.start(command, name=f"node{number}", env={"ELASTIC_RS_LOG": "info"})

    def pair(self, *options: str, attempts: int = 3) -> tuple[Process, Process, int]:
        """Start two nodes in one world. Returns them, and the process id of the second one's worker."""
        host, other = (self.start(number, "1:2", *options, attempts=attempts) for number in range(2))
        place(host, 2)
        return host, other, int(place(other, 2)["pid"])

    def ran(self, pid: int) -> Ran:
        return Ran(*struct.unpack("dd", (self._folder / str(pid)).read_bytes()))


@pytest.fixture
def nodes(job: Job, port: int, tmp_path: Path) -> Iterator[Nodes]:
    relays = Relays()
    yield Nodes(job, port, relays.before(port), tmp_path)
    relays.close()


def end(job: Job, *agents: Process) -> None:
    for agent in agents:
        agent.signal(signal.SIGKILL)
        agent.wait()
    job.kill_leftovers()


@pytest.mark.parametrize("_time", TIMES)
def test_a_worker_that_ignores_sigterm_is_dead_before_the_others_go_on(job: Job, nodes: Nodes, _time: int) -> None:
    host, other, old = nodes.pair()
    mark = host.mark()
    began = time.monotonic()
    nodes.relay.silence()
    new = int(place(host, 1, since=mark)["pid"])
    job.until_gone(old)
    last, first = nodes.ran(old).last, nodes.ran(new).first
    print(f"FENCED {last - began:.3f} s after the cut; OVERLAP {last - first:.3f} s")
    end(job, host, other)
    # The last answer came before the cut, so the lease was over 1.5 s after it at the latest.
    assert last - began <= 1.5 + 0.1
    assert last < first


@pytest.mark.parametrize("template", [False, True], ids=["executed", "forked"])
@pytest.mark.parametrize("_time", TIMES)
def test_the_workers_of_a_stopped_agent_end_with_the_lease(job: Job, nodes: Nodes, _time: int, template: bool) -> None:
    options = [f"--warm-modules={WARM}"] if template else []
    host, other, old = nodes.pair(*options, attempts=6)
    mark = host.mark()
    began = time.monotonic()
    os.kill(other.pid, signal.SIGSTOP)
    new = int(place(host, 1, since=mark)["pid"])
    job.until_gone(old)
    last, first = nodes.ran(old).last, nodes.ran(new).first
    print(f"FENCED {last - began:.3f} s after the stop; OVERLAP {last - first:.3f} s")
    mark = other.mark()
    os.kill(other.pid, signal.SIGCONT)
    # It has no failure to report, and takes part again.
    place(other, 2, since=mark)
    assert not [line for line in [*host.lines, *other.lines] if "SIGKILL" in line]
    end(job, host, other)
    assert last - began <= 3.0 + 0.3
    assert last < first


def test_the_workers_of_a_stopped_host_run_on(job: Job, nodes: Nodes) -> None:
    host = nodes.start(0, "1")
    pid = int(place(host, 1)["pid"])
    os.kill(host.pid, signal.SIGSTOP)
    began = time.monotonic()
    while nodes.ran(pid).last < began + 2 * 1.5:
        assert time.monotonic() < began + LIMIT_S, "its worker has ended"
        time.sleep(0.05)
    mark = host.mark()
    os.kill(host.pid, signal.SIGCONT)
    resumed = time.monotonic()
    while nodes.ran(pid).last < resumed + 1:
        assert time.monotonic() < resumed + LIMIT_S, "its worker has ended"
        time.sleep(0.05)
    assert not [line for line in host.lines[mark:] if "restarting" in line]
    end(job, host)


@pytest.mark.torchrun
def test_workers_that_wait_for_their_next_world_end_with_the_lease(job: Job, nodes: Nodes, tmp_path: Path) -> None:
    # They hold the state of a world that may have gone on without them.
    script = (str(STEPS), "--until", str(tmp_path / "done"))

    def start(number: int) -> Process:
        return nodes.start(number, "3", script=script)

    def worker(node: Process, since: int = 0) -> int:
        return int(node.line(r"WORLD rank=\d+ world=3 .*\bpid=(\d+)", since=since)[1])

    host, other, third = map(start, range(3))
    survives, ends = worker(host), worker(other)
    worker(third)
    other.line("STEP 20 ")
    third.signal(signal.SIGKILL)
    other.line("the workers leave their world, and wait for the next")
    nodes.relay.silence()
    job.until_gone(ends)
    assert other.running
    marks = host.mark(), other.mark()
    nodes.relay.heal()
    third = start(2)
    assert worker(host, marks[0]) == survives
    assert worker(other, marks[1]) != ends
    end(job, host, other, third)
