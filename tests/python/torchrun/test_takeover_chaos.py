"""Kills, stops and cuts of machines, at random, in a job with a list of endpoints.

    ELASTIC_RS_CHAOS_SECONDS=1200 ELASTIC_RS_CHAOS_SEED=7 pytest -m long tests/python/torchrun/test_takeover_chaos.py -s

Four machines on a switch, three of them listed, with workers that change in place. Never two leaders nor two worlds at
once, no committed step lost while a worker that has it lives, no restart number that goes back, and training goes on
soon after each fault. The plan keeps to what docs/takeover.md promises: before a listed process dies, another one
must be able to lead, by the word of ``elastic-rs status``.

A seed repeats the faults and their order. What the processes do meanwhile is theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.machines import Lan, Machine, lan
from helpers.procs import LIMIT_S, SETTLE_S, Job, Process
from helpers.worlds import FALSE_REASON, Trace, check_results, losses, overlaps, reasons_of_restarts

from .conftest import SCRIPTS

__all__ = ["lan"]  # a fixture

SECONDS = float(os.environ.get("ELASTIC_RS_CHAOS_SECONDS", "120"))
SEED = int(os.environ.get("ELASTIC_RS_CHAOS_SEED") or random.randrange(1 << 32))
MACHINES, LISTED = 4, 3
PORT = 29400
LEASE_S = 3.0
CONF = "last_call_timeout=0.5,settle_timeout=0.5,rejoin_limit=0,keep_alive_interval=0.5,keep_alive_max_attempt=6"
GOES_ON_S = 60.0
"""Training must go on within this time after a fault is over, or after a leader's death. Most of it is for torch's
import, where workers had to be started anew."""
VOTER_LEASE_S = 15.0
"""A voter's own lease, which no option changes."""
ENDS_S = 10.0
"""Nothing that a killed agent has started lives for longer."""
STEPS_AT_THE_END = 100
HANDED_OVER_S = 0.2
"""A leader that hands over tells the others first, and its log then."""
LISTENS = r"this process may lead the job|the coordinator at .* is in another process"
LEADS = r" (?P<at>\d\d:\d\d:\d\d\.\d+) .*this process (?P<how>leads|no longer leads) the run"
PLACED = r"round (?P<round>\d+), node rank .* runs as rank .*, restart (?P<restart>\d+) of"
DAY_S = 86_400

pytestmark = [pytest.mark.torchrun, pytest.mark.long, pytest.mark.timeout(SECONDS + 900)]

Mend = Callable[[], None]


@dataclass
class Agent:
    """An agent that was started, and what has become of it. Times are seconds since the epoch."""

    machine: Machine
    process: Process
    in_container: bool
    died: float | None = None
    """When it was killed, at the earliest."""

    @property
    def pid(self) -> int:
        """The agent's own process: a container's is the child of the one that was started."""
        if not self.in_container:
            return self.process.pid
        [child] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    @property
    def has_joined(self) -> bool:
        return any(line.startswith("WORLD ") for line in self.process.lines)

    @property
    def leads(self) -> bool:
        """Whether it leads, or did when it ended."""
        said = [match["how"] for line in self.process.lines if (match := re.search(LEADS, line))]
        return said[-1:] == ["leads"]

    def led(self) -> Iterator[tuple[float, float]]:
        """Yield from when until when this process has led, by its log."""
        began = None
        for line in self.process.lines:
            if match := re.search(LEADS, line):
                at = _since_epoch(match["at"])
                if match["how"] == "leads":
                    began = at
                elif began is not None:
                    yield began, at - HANDED_OVER_S
                    began = None
        if began is not None:
            yield began, self.died or time.time()


@dataclass
class Record:
    """What is reported at the end."""

    faults: Counter[str] = field(default_factory=Counter)
    killed_ns: list[int] = field(default_factory=list)
    """When leaders were killed."""
    found: list[str] = field(default_factory=list)
    """Violations that are seen at once."""


class Chaos:
    """A job on machines, of which the first are listed."""

    def __init__(self, job: Job, lan: Lan, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.random = random.Random(SEED)
        self.until = folder / "until"
        self.trace = Trace(folder)
        self.machines = [lan.machine(f"n{number}") for number in range(MACHINES)]
        self.endpoints = [f"{machine.address}:{PORT}" for machine in self.machines[:LISTED]]
        self.began, self.began_ns = time.monotonic(), time.monotonic_ns()
        self.record = Record()
        self.started: list[Agent] = []
        self.agents = [self.start(machine) for machine in self.machines]
        self.numbers = (0, 0)
        self.over = math.inf
        """When the job was told to end. The agents end one by one then, and how long each leads is not known."""

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def violation(self, text: str) -> None:
        self.record.found.append(f"{time.monotonic() - self.began:.1f} s: {text}")
        self.say(f"VIOLATION: {text}")

    def start(self, machine: Machine) -> Agent:
        command = [
            *(sys.executable, "-m", "elastic_rs.run"),
            f"--nnodes=1:{MACHINES}",
            "--nproc-per-node=1",
            "--max-restarts=1000000",
            "--rdzv-backend=rust-c10d",
            f"--rdzv-endpoint={','.join(self.endpoints)}",
            "--rdzv-id=job",
            f"--rdzv-conf={CONF}",
            f"--local-addr={machine.address}",
            *(str(SCRIPTS / "chaos_worker.py"), str(self.folder), str(self.until), "100"),
        ]
        in_container = self.random.random() < 0.5
        command = machine.container(*command) if in_container else [*machine.inside(), *command]
        name = f"{machine.name}-{len(self.started)}"
        env = {"ELASTIC_RS_LOG": "info", "GLOO_SOCKET_IFNAME": "eth0", "MACHINE": machine.name, "TZ": "UTC"}
        agent = Agent(machine, self.job.start(command, name=name, env=env), in_container)
        self.started.append(agent)
        return agent

    # What there is.

    def state(self) -> dict[str, Any]:
        """Wait until a leader says how the job is. Checks that its numbers do not go back."""
        deadline = time.monotonic() + LIMIT_S
        machines = itertools.cycle(self.machines)
        while True:
            machine = next(machines)  # only one with a node of the job is answered
            command = [sys.executable, "-m", "elastic_rs", "status", ",".join(self.endpoints), "--run-id=job", "--json"]
            shown = subprocess.run([*machine.inside(), *command], capture_output=True, text=True, check=False)
            state = json.loads(shown.stdout)["state"] if shown.stdout else None
            if state and state.get("list"):
                numbers = (state["restart"], state["round"])
                if any(new < old for new, old in zip(numbers, self.numbers, strict=True)):
                    self.violation(f"restart and round were {self.numbers}, and are {numbers}")
                self.numbers = numbers
                return dict(state)
            assert time.monotonic() < deadline, f"no leader within {LIMIT_S} s: {shown.stderr}\n{self.tails()}"
            time.sleep(0.1)

    def leader(self) -> int:
        return self.endpoints.index(self.state()["list"]["leader"])

    def leader_that_may_die(self) -> int:
        """Wait until another process can lead. Returns the leader's number."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            led = self.state()["list"]
            if led["successors"]:
                return self.endpoints.index(led["leader"])
            assert time.monotonic() < deadline, f"nobody could take over for {LIMIT_S} s: {led}\n{self.tails()}"
            time.sleep(0.2)

    def tails(self) -> str:
        return "\n".join(agent.process.tail() for agent in self.agents)

    def running(self) -> list[int]:
        return [number for number, agent in enumerate(self.agents) if agent.process.running]

    def until_training_goes_on(self, since_ns: int, *, size: int | None = None) -> int:
        """Wait for a step that began later than then, in a world of so many workers. Returns the world."""
        began, is_late = time.monotonic(), False
        while (world := self.trace.world_that_steps(since_ns, size=size)) is None:
            waited_s = time.monotonic() - began
            assert waited_s < LIMIT_S, f"no step of {size or 'any'} workers within {LIMIT_S} s\n{self.tails()}"
            if waited_s > GOES_ON_S and not is_late:
                is_late = True
                self.violation(f"no step of {size or 'any'} workers within {GOES_ON_S} s")
            time.sleep(0.1)
        return world

    def until_one_world(self) -> int:
        return self.until_training_goes_on(time.monotonic_ns(), size=MACHINES)

    def until_steps(self, world: int, count: int) -> None:
        """Wait until one of this world's workers has made so many more steps."""
        deadline, made = time.monotonic() + LIMIT_S, Counter[str]()
        while max(made.values(), default=0) < count:
            assert time.monotonic() < deadline, f"not {count} steps within {LIMIT_S} s\n{self.tails()}"
            time.sleep(0.1)
            new = self.trace.update()
            made.update(it["worker"] for it in new if it["kind"] == "step" and it["world"] == world)

    # Faults. Each returns what mends it.

    def worker_dies(self) -> Mend:
        # A new node whose worker fails before it has joined ends alone.
        have_joined = [number for number in self.running() if self.agents[number].has_joined]
        number = self.random.choice(have_joined)
        for pid in self.job.workers(self.agents[number].process).values():
            self.say(f"  the worker of {self.agents[number].process.name}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return lambda: None

    def leader_dies(self) -> Mend:
        return self.dies(self.leader_that_may_die())

    def leader_and_unlisted_die(self) -> Mend:
        return both(self.dies(self.leader_that_may_die()), self.dies(LISTED))

    def leaders_die_in_turn(self) -> Mend:
        """The listed ones die one after another, but for the last."""
        first = self.dies(self.leader_that_may_die(), at_once=False)
        self.until_training_goes_on(time.monotonic_ns())
        return both(first, self.dies(self.leader_that_may_die(), at_once=False))

    def listed_one_dies(self) -> Mend:
        return self.dies(self.another())

    def unlisted_one_dies(self) -> Mend:
        return self.dies(LISTED)

    def leader_hands_over(self) -> Mend:
        return self.dies(self.leader_that_may_die(), signal.SIGTERM)

    def one_leaves(self) -> Mend:
        return self.dies(self.random.choice([self.another(), LISTED]), signal.SIGTERM)

    def leader_is_cut_off(self) -> Mend:
        return self.is_cut_off(self.leader())

    def one_is_cut_off(self) -> Mend:
        return self.is_cut_off(self.random.choice([self.another(), LISTED]))

    def leader_goes_on_alone(self) -> Mend:
        """The leader is cut off for longer than the leases of the others, and trains on."""
        began_ns = time.monotonic_ns()
        mend = self.is_cut_off(self.leader())
        self.until_training_goes_on(began_ns + int((VOTER_LEASE_S + LEASE_S) * 1e9))
        return mend

    def leader_is_cut_off_and_dies(self) -> Mend:
        """A machine that starts anew: it falls silent, and is back without its processes before a lease is over."""
        number = self.leader_that_may_die()
        mend = self.is_cut_off(number)
        restart = self.dies(number, at_once=False)
        self.shortly()
        mend()
        self.record.killed_ns[-1] = time.monotonic_ns()  # nobody can know it before
        return restart

    def leader_stands_still_and_dies(self) -> Mend:
        number = self.leader_that_may_die()
        self.stands_still(number)
        self.shortly()
        return self.dies(number)

    def leader_dies_while_another_is_silent(self) -> Mend:
        """The only one left cannot know what the two others have decided, until one of them is back."""
        number = self.leader_that_may_die()
        silence = self.random.choice([self.is_cut_off, self.stands_still])
        mend = silence(self.random.choice([other for other in range(LISTED) if other != number]))
        restart = self.dies(number, at_once=False)
        self.shortly()
        mend()
        self.record.killed_ns[-1] = time.monotonic_ns()
        return restart

    def leader_dies_long_after_another_fell_silent(self) -> Mend:
        """A machine without power votes no more, or the job would end with its leader."""
        silence = self.random.choice([self.is_cut_off, self.stands_still])
        mend = silence(self.another())
        time.sleep(VOTER_LEASE_S + LEASE_S)  # the silence itself
        return both(mend, self.dies(self.leader_that_may_die(), at_once=False))

    def shortly(self) -> None:
        """Let a silence last, for less than any lease."""
        time.sleep(self.random.uniform(0.1, LEASE_S))

    def leader_stands_still(self) -> Mend:
        return self.stands_still(self.leader())

    def one_stands_still(self) -> Mend:
        return self.stands_still(self.random.choice([self.another(), LISTED]))

    def another(self) -> int:
        """A listed one that does not lead."""
        leader = self.leader()
        return self.random.choice([number for number in range(LISTED) if number != leader])

    def is_cut_off(self, number: int) -> Mend:
        machine = self.agents[number].machine
        self.say(f"  the cable of {machine.name}")
        machine.cut()
        return machine.mend

    def stands_still(self, number: int) -> Mend:
        agent = self.agents[number]
        pid = agent.pid
        self.say(f"  {agent.process.name}")
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def dies(self, number: int, how: signal.Signals = signal.SIGKILL, *, at_once: bool | None = None) -> Mend:
        """End an agent, alone or with all of its container, and start it again ``at_once`` (``None``: perhaps)."""
        agent = self.agents[number]
        with_container = agent.in_container and how == signal.SIGKILL and self.random.random() < 0.5
        self.kill(number, how, agent.process.pid if with_container else agent.pid)
        return self.started_again(number, at_once=at_once)

    def kill(self, number: int, how: signal.Signals, pid: int) -> None:
        agent = self.agents[number]
        self.say(f"  {agent.process.name}{', a container' if agent.in_container else ''}")
        workers = self.job.workers(agent.process).values()
        if how == signal.SIGKILL:
            agent.died = time.time()
            if agent.leads:
                self.record.killed_ns.append(time.monotonic_ns())
        os.kill(pid, how)
        agent.process.wait()
        agent.died = agent.died or time.time()
        deadline = time.monotonic() + ENDS_S
        while left := {*workers} & {*self.job.pids()}:
            if time.monotonic() > deadline:
                self.violation(f"workers of {agent.process.name} live {ENDS_S} s after its end: {left}")
                break
            time.sleep(0.02)

    def started_again(self, number: int, *, at_once: bool | None) -> Mend:
        def mend() -> None:
            self.agents[number] = self.start(self.machines[number])
            self.agents[number].process.line(LISTENS)

        if self.random.random() < 0.5 if at_once is None else at_once:
            mend()
            return lambda: None
        return mend

    def step(self) -> None:
        """Let one fault happen, mend it, and perhaps wait until all nodes are in one world."""
        kinds = [
            *[self.leader_dies] * 4,
            *[self.leader_hands_over, self.leader_is_cut_off, self.leader_stands_still] * 2,
            *[self.leader_and_unlisted_die, self.leaders_die_in_turn, self.leader_is_cut_off_and_dies],
            *[self.leader_stands_still_and_dies, self.leader_dies_while_another_is_silent],
            self.leader_dies_long_after_another_fell_silent,
            *[self.leader_goes_on_alone, self.listed_one_dies, self.unlisted_one_dies, self.one_leaves],
            *[self.one_is_cut_off, self.one_stands_still, self.worker_dies],
        ]
        fault = self.random.choice(kinds)
        lasts_s = self.random.choice([0.2, 0.5, 0.9, 1.1, 1.5, 2.5]) * LEASE_S
        with_worker = self.random.random() < 0.2
        self.say(f"{fault.__name__}, for {lasts_s:.1f} s")
        self.record.faults[fault.__name__] += 1
        kills = len(self.record.killed_ns)
        mend = fault()
        if with_worker:
            self.record.faults["worker_dies"] += 1
            self.worker_dies()
        if kills < len(self.record.killed_ns):
            self.until_training_goes_on(self.record.killed_ns[-1])
        time.sleep(lasts_s)  # a fault lasts a while
        mend()
        for agent in self.agents:
            assert agent.process.running, f"{agent.process.name} has ended\n{agent.process.tail()}"
        self.until_training_goes_on(time.monotonic_ns())
        if self.random.random() < 0.8:
            self.until_one_world()
        time.sleep(self.random.uniform(0, 1.5))  # the next fault comes at any time

    # What must hold.

    def left(self) -> list[int]:
        """Return the processes, on any machine, that outlive all agents."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self.job.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def takeovers(self) -> int:
        return sum(1 for agent in self.started for _ in agent.led()) - 1

    def two_leaders(self) -> Iterator[str]:
        """Yield who began to lead while another one led."""
        led = sorted((*times, agent.process.name) for agent in self.started for times in agent.led())
        for (_, until, one), (began, _, other) in itertools.pairwise(led):
            if began < min(until, self.over):
                yield f"{other} led {until - began:.3f} s before {one} was over"

    def numbers_that_went_back(self) -> Iterator[str]:
        """Yield rounds with a lower restart number than a round before."""
        lines = [(agent.process.name, line) for agent in self.started for line in agent.process.lines]
        found = [(name, match) for name, line in lines if (match := re.search(PLACED, line))]
        placed = sorted((int(match["round"]), int(match["restart"]), name) for name, match in found)
        for (earlier, before, one), (later, after, other) in itertools.pairwise(placed):
            if after < before:
                yield f"round {earlier} ({one}) is of restart {before}, and round {later} ({other}) of {after}"

    def recoveries_s(self) -> list[float]:
        """How long it was from each leader's death until a world that began later had completed a step."""
        worlds = [(it.began_ns, it.first_step_done_ns) for it in self.trace.worlds()]
        nexts = [[done for began, done in worlds if began > at and done is not None] for at in self.record.killed_ns]
        return [(min(done) - at) / 1e9 for at, done in zip(self.record.killed_ns, nexts, strict=True) if done]

    def violations(self) -> list[str]:
        self.trace.update()
        of_logs = [*self.two_leaders(), *self.numbers_that_went_back()]
        return [*self.record.found, *of_logs, *overlaps(self.trace), *losses(self.trace)]


def both(one: Mend, other: Mend) -> Mend:
    def mend() -> None:
        one()
        other()

    return mend


def _since_epoch(time_of_day: str) -> float:
    """Return the moment nearest to now with this time of day, in UTC."""
    hours, minutes, seconds = time_of_day.split(":")
    of_day = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    now = time.time()
    return of_day + round((now - of_day) / DAY_S) * DAY_S


def test_leaders_and_others_die_and_are_cut_off(job: Job, lan: Lan, tmp_path: Path) -> None:
    print(f"ELASTIC_RS_CHAOS_SEED={SEED}")
    chaos = Chaos(job, lan, tmp_path)
    chaos.until_one_world()
    while time.monotonic() - chaos.began < SECONDS:
        chaos.step()
    world = chaos.until_one_world()
    chaos.say("peace")
    chaos.until_steps(world, STEPS_AT_THE_END)
    chaos.over = time.time()
    chaos.until.touch()
    codes = [agent.process.wait() for agent in chaos.agents]
    left = chaos.left()
    violations = chaos.violations()
    faults, times = chaos.record.faults, sorted(chaos.recoveries_s())
    chaos.say(f"{faults.total()} faults with seed {SEED}: {dict(faults.most_common())}")
    chaos.say(f"{chaos.takeovers()} take-overs; {len(chaos.record.killed_ns)} leaders were killed")
    if times:
        chaos.say(f"until the next world's first step: median {statistics.median(times):.2f} s, most {times[-1]:.2f} s")
    restarts = reasons_of_restarts(job.processes)
    for reason, count in restarts.most_common():
        chaos.say(f"{count} times: restarting all workers: {reason}")
    for violation in violations:
        chaos.say(f"VIOLATION: {violation}")
    chaos.say(f"{len(chaos.trace.worlds())} worlds, restart and round {chaos.numbers}; {len(violations)} violations")
    assert violations == []
    assert left == []
    assert codes == [0] * MACHINES
    assert [reason for reason in restarts if re.search(FALSE_REASON, reason)] == []
    check_results(tmp_path, MACHINES)
