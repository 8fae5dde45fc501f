"""Random faults of members, network and nodes: never two worlds, no needless restart, and each world forms again.

    ELASTIC_RS_FAULT_SECONDS=3600 ELASTIC_RS_FAULT_SEED=7 pytest -m long tests/python/rust_etcd/test_random_faults.py

A seed repeats the faults and their order. What the processes do meanwhile is theirs.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_cluster import Member
from helpers.etcd import CONF, FRESH_READS, LEASE_S, Nodes, Relayed, undisturbed, version_of
from helpers.procs import Job, Process
from helpers.workers import place

SECONDS = float(os.environ.get("ELASTIC_RS_FAULT_SECONDS", "120"))
SEED = int(os.environ.get("ELASTIC_RS_FAULT_SEED") or random.randrange(1 << 32))
NUMBERS = (2, 3, 4)

pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 600)]


class Chaos:
    """A job, its cluster, and what may happen to them."""

    def __init__(self, relayed: Relayed, nodes: Nodes, job: Job, folder: Path, *, may_pause: bool) -> None:
        self.relayed, self.cluster, self.job, self.nodes = relayed, relayed.cluster, job, nodes
        self.random = random.Random(SEED)
        self.done = folder / "done"
        self.worker = ["--until", str(self.done), "--lock", str(folder / "lock")]
        self.began = time.monotonic()
        self.started = 0
        self.running = [self.start(number) for number in NUMBERS]
        self.member_faults: list[Callable[[Member], Callable[[], None]]] = [
            self.kill,
            self.kill,
            self.refuse,
            self.silence,
            self.isolate,
            self.delay,
            self.break_connections,
        ]
        if may_pause:
            self.member_faults += [self.pause, self.pause]
        self.node_faults = [self.worker_dies, self.node_dies, self.node_is_ended, self.node_stands_still]

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def start(self, number: int) -> Process:
        self.started += 1
        return self.nodes.start(
            number,
            self.cluster.endpoint,
            *self.worker,
            nnodes=f"1:{len(NUMBERS)}",
            restarts=1_000_000,
            conf=f"{CONF},rejoin_limit=0",  # hosts leave all the time
            name=f"node{number}-{self.started}",
        )

    # Faults of a member. Each returns what mends it.

    def kill(self, member: Member) -> Callable[[], None]:
        relay = self.relayed.relays.at(member.client_seen)
        member.kill()
        relay.refuse()

        def mend() -> None:
            member.start()
            relay.heal()
            self.cluster.until_healthy()

        return mend

    def pause(self, member: Member) -> Callable[[], None]:
        member.pause()
        return member.resume

    def refuse(self, member: Member) -> Callable[[], None]:
        relay = self.relayed.relays.at(member.client_seen)
        relay.refuse()
        return relay.heal

    def silence(self, member: Member) -> Callable[[], None]:
        relay = self.relayed.relays.at(member.client_seen)
        relay.silence()
        return relay.heal

    def delay(self, member: Member) -> Callable[[], None]:
        relay = self.relayed.relays.at(member.client_seen)
        relay.delay(self.random.uniform(0.1, 3))
        return relay.heal

    def break_connections(self, member: Member) -> Callable[[], None]:
        self.relayed.relays.at(member.client_seen).end()
        return lambda: None

    def isolate(self, member: Member) -> Callable[[], None]:
        self.relayed.isolate(member)
        return self.relayed.heal

    # Faults of a node or its workers. Each changes the world.

    def worker_dies(self) -> None:
        node = self.random.choice(self.running)
        os.kill(self.job.workers(node).popitem()[1], signal.SIGKILL)

    def node_dies(self) -> None:
        self._replace(signal.SIGKILL)

    def node_is_ended(self) -> None:
        self._replace(signal.SIGTERM)

    def node_stands_still(self) -> None:
        node = self.random.choice(self.running)
        node.signal(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_S)  # the others are to go on without it
        node.signal(signal.SIGCONT)

    def _replace(self, how: signal.Signals) -> None:
        index = self.random.randrange(len(self.running))
        self.running[index].signal(how)
        self.running[index].wait()
        self.running[index] = self.start(NUMBERS[index])

    def step(self) -> None:
        """Let something happen to a member or to two, and perhaps to a node meanwhile."""
        # Two that are killed leave no quorum; the job runs on all the same, and nothing else may happen meanwhile.
        two = self.random.random() < 0.1
        if two:
            # A node takes a member for dead only if it has met it before. An earlier fault may have hindered that.
            time.sleep(LEASE_S)
        victims = self.random.sample(self.cluster.members, 2 if two else 1)
        fault = self.kill if two else self.random.choice(self.member_faults)
        alone = two or self.random.random() < 0.5
        lasts_s = self.random.uniform(0.1, 2 * LEASE_S)
        self.say(f"{fault.__name__} {' '.join(member.name for member in victims)} for {lasts_s:.1f} s")
        if alone:
            with undisturbed(self.job, *self.running):
                mends = [fault(victim) for victim in victims]
                time.sleep(lasts_s)
                for mend in mends:
                    mend()
                self.cluster.until_healthy()
                time.sleep(self.random.uniform(0, LEASE_S))
            return
        mends = [fault(victim) for victim in victims]
        time.sleep(self.random.uniform(0, 1))
        what = self.random.choice(self.node_faults)
        self.say(what.__name__)
        marks = {node.pid: node.mark() for node in self.running}
        what()
        for node in self.running:
            place(node, len(NUMBERS), since=marks.get(node.pid, 0))
        for mend in mends:
            mend()
        self.cluster.until_healthy()
        self.say("one world again")


def test_random_faults(relayed: Relayed, program: str, nodes: Nodes, job: Job, tmp_path: Path) -> None:
    print(f"ELASTIC_RS_FAULT_SEED={SEED}")
    version = version_of(program)
    stale = any(version[:2] == first[:2] and version < first for first in FRESH_READS)
    chaos = Chaos(relayed, nodes, job, tmp_path, may_pause=not stale)
    for node in chaos.running:
        place(node, len(NUMBERS))
    steps = 0
    while time.monotonic() - chaos.began < SECONDS:
        chaos.step()
        steps += 1
        output = "\n".join(line for process in job.processes for line in process.lines)
        assert "TWO WORLDS" not in output
        assert "panicked" not in output
    chaos.done.touch()
    assert [node.wait() for node in chaos.running] == [0] * len(NUMBERS)
    chaos.say(f"{steps} steps with seed {SEED}")
