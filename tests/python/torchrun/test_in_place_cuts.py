"""Stops, kills and cuts of nodes and coordinator, at random, on workers that change in place.

    ELASTIC_RS_CHAOS_SECONDS=1200 ELASTIC_RS_CHAOS_SEED=7 pytest -m long tests/python/torchrun/test_in_place_cuts.py

Never two worlds at once, no committed step lost while a worker that has it lives, and no restart of all workers without
its true reason. A seed repeats the faults and their order. What the processes do meanwhile is theirs.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.procs import LIMIT_S, Job, Process
from helpers.relays import Relay, Relays
from helpers.worlds import FALSE_REASON, Trace, check_results, losses, overlaps, reasons_of_restarts

from .conftest import SCRIPTS

SECONDS = float(os.environ.get("ELASTIC_RS_CHAOS_SECONDS", "120"))
SEED = int(os.environ.get("ELASTIC_RS_CHAOS_SEED") or random.randrange(1 << 32))
NUMBERS = (2, 3, 4)
WORKERS = 2
LEASE_S = 3.0
CONF = "last_call_timeout=0.5,settle_timeout=0.5,rejoin_limit=0,keep_alive_interval=0.5,keep_alive_max_attempt=6"

pytestmark = [pytest.mark.torchrun, pytest.mark.long, pytest.mark.timeout(SECONDS + 900)]


class Chaos:
    """A job whose coordinator and nodes are separate processes, with a relay between each node and the coordinator."""

    def __init__(self, job: Job, port: int, folder: Path, *, hosted: bool) -> None:
        self.job, self.port, self.folder, self.hosted = job, port, folder, hosted
        self.random = random.Random(SEED)
        self.until = folder / "until"
        self.trace = Trace(folder)
        self.relays = Relays()
        self.relay: dict[int, Relay] = {number: self.relays.before(port) for number in NUMBERS}
        self.began = time.monotonic()
        self.started = 0
        self.server = None if hosted else self.serve()
        self.nodes = {number: self.start(number) for number in NUMBERS}
        self.faults: Counter[str] = Counter()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def serve(self) -> Process:
        command = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={self.port}"]
        self.started += 1
        server = self.job.start(command, name=f"coordinator-{self.started}", env={"ELASTIC_RS_LOG": "info"})
        server.line(r"^listening on ")
        return server

    def start(self, number: int) -> Process:
        self.started += 1
        hosts = self.hosted and number == NUMBERS[0]
        command = [
            *(sys.executable, "-m", "elastic_rs.run"),
            f"--nnodes=1:{len(NUMBERS)}",
            f"--nproc-per-node={WORKERS}",
            "--max-restarts=1000000",
            "--rdzv-backend=rust-c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port if hosts else self.relay[number].port}",
            "--rdzv-id=job",
            f"--rdzv-conf={CONF},is_host={int(hosts)}",
            f"--local-addr=127.0.0.{number}",
            *(str(SCRIPTS / "chaos_worker.py"), str(self.folder), str(self.until), "100"),
        ]
        return self.job.start(command, name=f"node{number}-{self.started}", env={"ELASTIC_RS_LOG": "info"})

    # Faults. Each returns what mends it.

    def worker_dies(self) -> Callable[[], None]:
        workers = list(self.job.workers(self._any()).values())
        for pid in self.random.sample(workers, min(len(workers), self.random.choice([1, 1, 2]))):
            os.kill(pid, signal.SIGKILL)
        return lambda: None

    def node_dies(self) -> Callable[[], None]:
        return self._replace(signal.SIGKILL)

    def node_leaves(self) -> Callable[[], None]:
        return self._replace(signal.SIGTERM)

    def node_stands_still(self) -> Callable[[], None]:
        node = self._any()
        node.signal(signal.SIGSTOP)
        return lambda: node.signal(signal.SIGCONT)

    def node_is_cut_off(self) -> Callable[[], None]:
        relay = self._relay()
        relay.silence()
        return relay.heal

    def node_is_refused(self) -> Callable[[], None]:
        relay = self._relay()
        relay.refuse()
        return relay.heal

    def connection_breaks(self) -> Callable[[], None]:
        self._relay().end()
        return lambda: None

    def two_nodes_are_cut_off(self) -> Callable[[], None]:
        relays = [self.relay[number] for number in self.random.sample(self._relayed(), 2)]
        for relay in relays:
            relay.silence()

        def mend() -> None:
            for relay in relays:
                relay.heal()

        return mend

    def coordinator_is_killed(self) -> Callable[[], None]:
        if self.server is None:
            return self._replace(signal.SIGKILL, NUMBERS[0])
        self.server.signal(signal.SIGKILL)
        self.server.wait()

        def mend() -> None:
            self.server = self.serve()

        return mend

    def coordinator_stands_still(self) -> Callable[[], None]:
        process = self.server or self.nodes[NUMBERS[0]]
        process.signal(signal.SIGSTOP)
        return lambda: process.signal(signal.SIGCONT)

    def _relayed(self) -> list[int]:
        """The nodes that do not host the coordinator."""
        return [number for number in NUMBERS if not (self.hosted and number == NUMBERS[0])]

    def _running(self) -> list[int]:
        return [number for number in self._relayed() if self.nodes[number].running]

    def _any(self) -> Process:
        return self.nodes[self.random.choice(self._running())]

    def _relay(self) -> Relay:
        return self.relay[self.random.choice(self._relayed())]

    def _replace(self, how: signal.Signals, number: int | None = None) -> Callable[[], None]:
        number = self.random.choice(self._running()) if number is None else number
        self.nodes[number].signal(how)
        self.nodes[number].wait()
        if self.random.random() < 0.5:
            self.nodes[number] = self.start(number)
            return lambda: None

        def mend() -> None:
            self.nodes[number] = self.start(number)

        return mend

    def step(self) -> None:
        """Let one fault happen, or two at once, mend them, and perhaps wait until all nodes are in one world."""
        kinds = [
            *[self.worker_dies] * 2,
            *[self.node_dies, self.node_leaves],
            *[self.node_stands_still] * 2,
            *[self.node_is_cut_off] * 2,
            *[self.node_is_refused, self.connection_breaks, self.two_nodes_are_cut_off],
            *[self.coordinator_is_killed, self.coordinator_stands_still],
        ]
        lasts_s = self.random.choice([0.2, 0.5, 0.9, 1.1, 1.5, 2.5]) * LEASE_S
        mends = []
        stopped = False
        for fault in self.random.sample(kinds, 2 if self.random.random() < 0.2 else 1):
            # A process that stands still cannot be waited for.
            if stopped and fault not in {self.worker_dies, self.node_is_cut_off, self.connection_breaks}:
                continue
            stopped |= fault in {self.node_stands_still, self.coordinator_stands_still, self.coordinator_is_killed}
            self.say(f"{fault.__name__}, for {lasts_s:.1f} s")
            self.faults[fault.__name__] += 1
            mends.append(fault())
        time.sleep(lasts_s)  # a fault lasts a while
        for mend in mends:
            mend()
        for node in self.nodes.values():
            assert node.running, f"{node.name} has ended\n{node.tail()}"
        if self.random.random() < 0.8:
            self.until_one_world()
        time.sleep(self.random.uniform(0, 1.5))  # the next fault comes at any time

    def until_one_world(self) -> None:
        """Wait until all nodes have made a step in one world, that began after now."""
        now, deadline = time.monotonic_ns(), time.monotonic() + LIMIT_S
        while not self.trace.world_that_steps(now, size=len(NUMBERS) * WORKERS):
            tails = "\n".join(node.tail() for node in self.nodes.values())
            assert time.monotonic() < deadline, f"no step of all nodes within {LIMIT_S} s\n{tails}"
            time.sleep(0.1)

    def violations(self) -> list[str]:
        self.trace.update()
        return [*overlaps(self.trace), *losses(self.trace)]


@pytest.fixture
def chaos(request: pytest.FixtureRequest, job: Job, port: int, tmp_path: Path) -> Iterator[Chaos]:
    chaos = Chaos(job, port, tmp_path, hosted=request.param)
    yield chaos
    chaos.relays.close()


@pytest.mark.parametrize("chaos", [False, True], indirect=True, ids=["apart", "hosted"])
def test_stops_kills_and_cuts(chaos: Chaos) -> None:
    print(f"ELASTIC_RS_CHAOS_SEED={SEED}")
    chaos.until_one_world()
    while time.monotonic() - chaos.began < SECONDS:
        chaos.step()
    chaos.until_one_world()
    chaos.until.touch()
    codes = [node.wait() for node in chaos.nodes.values()]
    if chaos.server is not None:
        chaos.server.signal(signal.SIGTERM)
        chaos.server.wait()
    chaos.say(f"{chaos.faults.total()} faults with seed {SEED}: {dict(chaos.faults)}")
    restarts = reasons_of_restarts(chaos.job.processes)
    for reason, count in restarts.most_common():
        chaos.say(f"{count} times: restarting all workers: {reason}")
    assert chaos.violations() == []
    assert [reason for reason in restarts if re.search(FALSE_REASON, reason)] == []
    assert codes == [0] * len(NUMBERS)
    check_results(chaos.folder, len(NUMBERS) * WORKERS)
