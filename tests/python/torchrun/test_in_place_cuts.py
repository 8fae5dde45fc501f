"""Stops, kills and cuts of nodes and coordinator, at random, on workers that change in place.

    ELASTIC_RS_CHAOS_SECONDS=1200 ELASTIC_RS_CHAOS_SEED=7 pytest -m long tests/python/torchrun/test_in_place_cuts.py

Never two worlds at once, no committed step lost while a worker that has it lives, and no restart of all workers without
its true reason. A seed repeats the faults and their order. What the processes do meanwhile is theirs.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.procs import LIMIT_S, Job, Process
from helpers.relays import Relay, Relays

from .conftest import SCRIPTS

SECONDS = float(os.environ.get("ELASTIC_RS_CHAOS_SECONDS", "120"))
SEED = int(os.environ.get("ELASTIC_RS_CHAOS_SEED") or random.randrange(1 << 32))
NUMBERS = (2, 3, 4)
WORKERS = 2
LEASE_S = 3.0
CONF = "last_call_timeout=0.5,settle_timeout=0.5,rejoin_limit=0,keep_alive_interval=0.5,keep_alive_max_attempt=6"
RESTART = r"restarting all workers: (?P<reason>.*)"
FALSE_REASON = "cannot change in place|does not report what became|agent that does not change"
"""Each worker uses ``elastic_rs.elastic``, so none of these is ever the reason."""

pytestmark = [pytest.mark.torchrun, pytest.mark.long, pytest.mark.timeout(SECONDS + 900)]


@dataclass
class World:
    """What the workers of one world have recorded."""

    begins: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By process id: with what it has begun."""
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    commits: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def began_ns(self) -> int:
        return min(int(begin["at_ns"]) for begin in self.begins.values())

    @property
    def first_step_done_ns(self) -> int | None:
        return min((int(steps[0]["at_ns"]) for steps in self.steps.values()), default=None)

    @property
    def last_step_began_ns(self) -> int | None:
        return max((int(steps[-1]["began_ns"]) for steps in self.steps.values()), default=None)


class Trace:
    """The records of all workers, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.records: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Read and return what is new."""
        new = []
        for path in self._folder.glob("trace.*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        self.records += new
        return new

    def worlds(self) -> list[World]:
        worlds: dict[int, World] = {}
        for record in self.records:
            if record["kind"] == "world":
                worlds.setdefault(record["world"], World()).begins[record["pid"]] = record
        for record in self.records:
            if record["kind"] in {"step", "commit"}:
                world = worlds[record["world"]]
                of = world.steps if record["kind"] == "step" else world.commits
                of.setdefault(record["pid"], []).append(record)
        return sorted(worlds.values(), key=lambda world: world.began_ns)


def overlaps(worlds: list[World]) -> Iterator[str]:
    """Yield the pairs of worlds of which the older one began a step after the newer one had completed one."""
    for index, newer in enumerate(worlds):
        if newer.first_step_done_ns is None:
            continue
        for older in worlds[:index]:
            if older.last_step_began_ns is not None and older.last_step_began_ns > newer.first_step_done_ns:
                late_s = (older.last_step_began_ns - newer.first_step_done_ns) / 1e9
                yield f"world {worlds.index(older)} began a step {late_s:.3f} s after world {index} had completed one"


def losses(worlds: list[World], loaded: dict[int, int]) -> Iterator[str]:
    """Yield what was lost between consecutive worlds. ``loaded``: with which checkpoint each process has begun."""
    for index, (last, world) in enumerate(pairwise(worlds), start=1):
        starts = {(begin["length"], begin["digest"]) for begin in world.begins.values()}
        if len(starts) != 1:
            yield f"world {index} begins with several states: {starts}"
            continue
        ((length, _),) = starts
        survivors = last.begins.keys() & world.begins.keys()
        if not survivors:
            if length not in {loaded[pid] for pid in world.begins}:
                yield f"world {index} begins at {length}, and its workers have loaded {loaded}"
            continue
        for pid in survivors:
            if not (commits := last.commits.get(pid)):
                if length < last.begins[pid]["length"]:
                    yield f"world {index} begins at {length}, and {pid} had begun at {last.begins[pid]['length']}"
                continue
            kept = world.begins[pid]["kept"]
            if (kept["length"], kept["digest"]) != (commits[-1]["length"], commits[-1]["digest"]):
                yield f"world {index} begins at {length}, and {pid} had committed {commits[-1]['length']}"


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
        while True:
            new = self.trace.update()
            sizes = {record["world"]: record["size"] for record in self.trace.records if record["kind"] == "world"}
            full = len(NUMBERS) * WORKERS
            if any(it["kind"] == "step" and it["began_ns"] > now and sizes[it["world"]] == full for it in new):
                return
            tails = "\n".join(node.tail() for node in self.nodes.values())
            assert time.monotonic() < deadline, f"no step of all nodes within {LIMIT_S} s\n{tails}"
            time.sleep(0.1)

    def restarts(self) -> Counter[str]:
        """Why all workers of a node were restarted, by reason; numbers and names of nodes are left out."""
        lines = [line for process in self.job.processes for line in process.lines]
        found = (re.search(RESTART, line) for line in lines)
        return Counter(re.sub(r"\d+(\.\d+)?", "N", match["reason"]) for match in found if match)

    def violations(self) -> list[str]:
        self.trace.update()
        worlds = self.trace.worlds()
        loaded = {it["pid"]: it["loaded"] for it in self.trace.records if it["kind"] == "process"}
        return [*overlaps(worlds), *losses(worlds, loaded)]


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
    for reason, count in chaos.restarts().most_common():
        chaos.say(f"{count} times: restarting all workers: {reason}")
    assert chaos.violations() == []
    assert [reason for reason in chaos.restarts() if re.search(FALSE_REASON, reason)] == []
    assert codes == [0] * len(NUMBERS)
    results = [json.loads(path.read_text()) for path in chaos.folder.glob("result.*")]
    assert len(results) == len(NUMBERS) * WORKERS
    assert all(one == other for one, other in pairwise(results))
    weight = 1
    for value in results[0]["history"]:
        weight = (weight * 3 + value) % 65_521
    assert results[0]["weight"] == weight
