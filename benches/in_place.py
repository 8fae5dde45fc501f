"""Measure what a change of the world costs: 2 nodes with 2 workers each, gloo, a model of 100 MB.

    python benches/in_place.py [--quick] [--repetitions 5] [--goodput-seconds 300] [--only changes|workers|nodes]
                               [--workers 1] [--held-mib 4096]

One job of each kind after the other in each repetition: `torchrun` with c10d, `elastic-run`, `elastic-run
--warm-start`, and workers that change in place, without a template, with one, with one that has made the model, with a
standby, and with a list of endpoints. Measured is the time until the last worker has done its first step that counts,
what of it was neither the broadcast of the state nor that step, and when the last worker had got to each phase:

- from SIGKILL of a worker;
- a node joins: from the moment when the last worker that was started has made its model;
- from SIGTERM of the node that joined, or with a list, of the one that leads.

Goodput is the part of the time that was spent in steps that count, while a fault happens every 15 s: their number times
the time that a step of the same job takes before the first fault. A step of fewer workers counts as the part of a step
that their number is: it has seen so much less data. In the first measurement a worker is killed. In the second, the
agent of a node, or the agent and its workers, by turns; they are started again after 1 s, and the whole job when it has
ended or stood still for 60 s. What is left of a node is killed before it is started again, as if it were a container.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plot
from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "in_place.json"
PLOT = Path(__file__).resolve().parents[1] / "docs" / "goodput.svg"
WORKER = Path(__file__).with_name("in_place_worker.py")
MEASURED = ("changes", "workers", "nodes")
LIMIT_S = 60.0
WORKERS = 2
EVERY = 5
"""Steps between two commits, or two checkpoints."""
FAULT_EVERY_S = 15.0
STILL_LIMIT_S = 60.0
START_AGAIN_S = 1.0
PHASES = ("stopped", "began", "imported", "made", "grouped", "world", "wrapped")
"""What workers tell before the first step of a world, in this order."""
MARKER, NODE = "ELASTIC_RS_BENCH_ID", "ELASTIC_RS_BENCH_NODE"
RUN = ["elastic_rs.run", "--rdzv-backend=c10d"]
KINDS = {
    "torchrun": (["torch.distributed.run", "--rdzv-backend=c10d"], "plain"),
    "elastic-run": (RUN, "plain"),
    "warm": ([*RUN, "--warm-start"], "plain"),
    "in place": (RUN, "in-place"),
    "in place, template": ([*RUN, "--warm-start"], "in-place"),
    "in place, template with the model": ([*RUN, "--warm-modules=torch,in_place_model"], "in-place"),
    "in place, standby": ([*RUN, "--standby=1"], "in-place"),
    "in place, list of two": ([*RUN, "--warm-start"], "in-place"),
    "in place, list of three": ([*RUN, "--warm-start"], "in-place"),
}

LASTING = (
    "torchrun", "elastic-run", "warm", "in place, template", "in place, standby", "in place, list of two",
    "in place, list of three",
)  # fmt: skip
"""The jobs whose goodput is measured."""


def nodes_of(kind: str) -> int:
    """Return the number of nodes. With a list each is one of its endpoints."""
    return 3 if kind.endswith("of three") else 2


@dataclass(frozen=True)
class Told:
    """What a worker has told."""

    what: str
    at: float
    rank: int
    world: int
    step: int
    pid: int


class TooLateError(Exception):
    """A job has not got there in LIMIT_S: PyTorch's does not always."""


class Job:
    """A job, whose workers report through a pipe."""

    def __init__(self, kind: str, folder: Path, workers: int = WORKERS, held_mib: int = 0) -> None:
        self.held = {"HELD_MIB": str(held_mib)} if held_mib else {}
        self.kind, self.id, self._unread, self.folder, self.workers = kind, uuid.uuid4().hex, b"", folder, workers
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        self._reader = os.open(self.pipe, os.O_RDWR)
        ports = [free_port() for _ in range(nodes_of(kind) if "list" in kind else 1)]
        self.endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.history: list[Told] = []

    def start_node(self, number: int | None = None) -> subprocess.Popen[bytes]:
        """Start a node: another one, or the one of this number again."""
        number = len(self.nodes) if number is None else number
        launcher, mode = KINDS[self.kind]
        flags = [
            f"--nnodes=1:{nodes_of(self.kind) + 1}",
            f"--nproc-per-node={self.workers}",
            f"--rdzv-endpoint={self.endpoint}",
            "--rdzv-id=x",
        ]
        conf = "--rdzv-conf=last_call_timeout=1"
        script = [str(WORKER), str(self.pipe), mode, str(self.folder), str(EVERY)]
        command = [sys.executable, "-m", *launcher, *flags, conf, "--max-restarts=100000", *script]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARKER: self.id}
        env |= {NODE: self.id_of(number), **self.held}
        with (self.folder / f"{number}.log").open("ab") as log:
            self.nodes[number:] = [
                subprocess.Popen(command, env=env, stdout=log, stderr=log),
                *self.nodes[number + 1 :],
            ]
        return self.nodes[number]

    def id_of(self, node: int) -> str:
        return f"{self.id}-{node}"

    def read(self, timeout_s: float) -> list[Told]:
        """Wait at most this long for messages of workers, and return those that have arrived."""
        if not select.select([self._reader], [], [], max(0.0, timeout_s))[0]:
            return []
        *lines, self._unread = (self._unread + os.read(self._reader, 1 << 16)).split(b"\n")
        found = []
        for line in lines:
            what, at, *numbers = line.decode().split()
            found.append(Told(what, int(at) * 1e-9, *map(int, numbers)))
        self.history += found
        return found

    def wait(self, done: Callable[[Told], bool]) -> Told:
        """Wait for something that is told from now on."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for told in self.read(deadline - time.monotonic()):
                if done(told):
                    return told
        logs = "\n".join((self.folder / f"{i}.log").read_text()[-2000:] for i in range(len(self.nodes)))
        raise TooLateError(f"{self.kind} has not got there in {LIMIT_S:.0f} s\n{logs}")

    def stepped(self, world: int, after: float) -> float:
        """Wait until all workers of a world of this size have made a step after this time. Return when the last has."""
        done: dict[int, float] = {}
        while len(done) < world:
            told = self.wait(lambda told: told.what == "step" and told.world == world and told.at > after)
            done.setdefault(told.rank, told.at)
        return max(done.values())

    def settle(self, world: int) -> dict[int, int]:
        """Wait until all have made some steps, and a commit. Return the workers' process ids by rank."""
        since = self.wait(lambda told: told.world == world and told.what == "step").step
        last = self.wait(lambda told: told.world == world and told.step >= since + 2 * EVERY)
        members = [told for told in self.history if told.world == world and told.step >= last.step - EVERY]
        return {told.rank: told.pid for told in members}

    def await_standbys(self, world: int) -> None:
        """Wait until each node's standby has made its model: it has the place of one more worker than the world has."""
        made = {told.pid for told in self.history if told.what == "made" and told.world == world + 1}
        while len(made) < 2:
            made.add(self.wait(lambda told: told.what == "made" and told.world == world + 1).pid)

    def kill_all(self) -> None:
        for node in self.nodes:
            node.kill()
            node.wait()
        for pid in processes_with(f"{MARKER}={self.id}"):
            kill(pid)

    def end(self) -> None:
        self.kill_all()
        os.close(self._reader)


def processes_with(variable: str) -> list[int]:
    """Return the processes that have this variable, as `NAME=value`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def below(pid: int) -> list[int]:
    """Return the descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def job_of(kind: str, workers: int = WORKERS, held_mib: int = 0) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(kind, Path(folder), workers, held_mib)
        try:
            for _ in range(nodes_of(kind)):
                job.start_node()
            yield job
        finally:
            job.end()


def phases(job: Job, began: float) -> dict[str, float]:
    """Return when the last worker has told each phase, in seconds."""
    last = {told.what: told.at - began for told in job.history if told.at > began}
    return {phase: last[phase] for phase in PHASES if phase in last}


def beside_work(apart: dict[str, float], since: float, until: float) -> float:
    """Return how long it took beside the broadcast of the state and the first step, which take time in any world."""
    broadcast = apart["world"] - apart["grouped"] if "grouped" in apart else 0.0
    return until - since - broadcast - (until - apart["wrapped"])


def kill_worker(job: Job, rank: int) -> dict[str, Any]:
    world_size = nodes_of(job.kind) * job.workers
    if "standby" in job.kind:
        job.await_standbys(world_size)
    pids = job.settle(world_size)
    steps = [told.at for told in job.history if told.what == "step" and told.rank == 0]
    pace = statistics.median(b - a for a, b in itertools.pairwise(steps))
    victim = pids[rank % world_size]
    reached = max(told.step for told in job.history if told.what == "step")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    # Steps that are told after the kill may still be of the old world.
    world = job.wait(lambda told: told.what == "world" and told.at > began)
    took = job.stepped(world_size, world.at) - began
    apart = phases(job, began)
    now = job.settle(world_size)
    survivors = len({*pids.values()} & {*now.values()})
    beside = beside_work(apart, 0.0, took)
    return {
        "s": took,
        "beside": beside,
        "lost": reached - world.step,
        "survivors": survivors,
        "step": pace,
        "phases": apart,
    }


def join_and_leave(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    nodes = nodes_of(job.kind)
    small, large = nodes * job.workers, (nodes + 1) * job.workers
    job.settle(small)
    began = time.monotonic()
    node = job.start_node()
    job.wait(lambda told: told.what == "world" and told.world == large)
    still_since = max(told.at for told in job.history if told.what == "step" and told.world == small)
    first = job.stepped(large, still_since)
    apart = phases(job, began)
    ready = began + apart["made"]
    beside = beside_work(apart, still_since - began, first - began)
    ready_s = first - max(ready, still_since)
    joined = {"s": ready_s, "still_s": first - still_since, "beside": beside, "phases": apart}
    job.settle(large)
    before = max(told.step for told in job.history if told.what == "step")
    began = time.monotonic()
    leaves = job.nodes[0] if "list" in job.kind else node
    leaves.send_signal(signal.SIGTERM)
    world = job.wait(lambda told: told.what == "world" and told.world == small and told.at > began)
    last = max(told.step for told in job.history if told.what == "step" and told.world == large)
    took = job.stepped(small, world.at) - began
    still_since = max(told.at for told in job.history if told.what == "step" and told.world == large) - began
    apart = phases(job, began)
    beside = beside_work(apart, still_since, took)
    lost = max(before, last) - world.step
    left = {"s": took, "still_s": took - still_since, "beside": beside, "lost": lost, "phases": apart}
    leaves.wait()
    return joined, left


class Faults:
    """What happens to a job: each time a worker is killed, or by turns an agent alone and an agent with its workers."""

    def __init__(self, job: Job, pids: dict[int, int], of_nodes: bool) -> None:
        self.job, self.pids, self.of_nodes, self.number = job, pids, of_nodes, 0
        self.down: tuple[float, int] | None = None
        """When which node is to be started again."""

    def happen(self) -> None:
        if not self.of_nodes:
            kill(self.pids[self.number % len(self.pids)])
        elif self.down is None:
            # The agent of the last node, that node, the agent of the one before, and so on.
            count = len(self.job.nodes)
            node = count - 1 - self.number // 2 % count
            self._kill_node(node, workers=self.number % 2 == 1)
            self.down = time.monotonic() + START_AGAIN_S, node
        self.number += 1

    def mend(self) -> None:
        if self.down is not None and time.monotonic() >= self.down[0]:
            node, self.down = self.down[1], None
            for pid in processes_with(f"{NODE}={self.job.id_of(node)}"):
                kill(pid)
            self.job.start_node(node)

    def _kill_node(self, number: int, *, workers: bool) -> None:
        agent = self.job.nodes[number]
        for pid in [agent.pid, *(below(agent.pid) if workers else [])]:
            kill(pid)
        agent.wait()


def goodput(kind: str, seconds: float, *, of_nodes: bool) -> float:
    """Return the part of the time that was spent in steps that count."""
    with job_of(kind) as job:
        workers = nodes_of(kind) * WORKERS
        pids = job.settle(workers)
        if "standby" in kind:
            job.await_standbys(4)
        since = time.monotonic()
        job.wait(lambda told: told.what == "step" and told.at >= since + FAULT_EVERY_S)
        steps = [told for told in job.history if told.what == "step" and told.rank == 0 and told.at >= since]
        pace = statistics.median(b.at - a.at for a, b in itertools.pairwise(steps))
        print(f"goodput: {kind}: {1000 * pace:.0f} ms for a step of {workers} workers without faults", flush=True)
        faults = Faults(job, pids, of_nodes)
        began, first = time.monotonic(), max(told.step for told in job.history)
        fault_at, stepped_at, reached = began + FAULT_EVERY_S, began, first
        sizes: dict[int, int] = {}  # of the world in which each step was made last
        while (now := time.monotonic()) < began + seconds:
            for told in job.read(min(0.2, began + seconds - now)):
                pids[told.rank] = told.pid
                if told.what == "step":
                    stepped_at, reached = time.monotonic(), told.step
                    sizes[told.step] = told.world
            faults.mend()
            if time.monotonic() >= fault_at:
                fault_at += FAULT_EVERY_S
                faults.happen()
            ended = all(node.poll() is not None for node in job.nodes) and faults.down is None
            if ended or time.monotonic() >= stepped_at + STILL_LIMIT_S:
                job.kill_all()
                stepped_at = time.monotonic()
                for number in range(nodes_of(kind)):
                    job.start_node(number)
        steps_of_all = sum(size for step, size in sizes.items() if first < step <= reached) / workers
        return steps_of_all * pace / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a change of the world costs: restarts, and workers in place.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--repetitions", type=int, help="changes of each kind in each job (5)")
    parser.add_argument("--goodput-seconds", type=float, help="length of each measurement of goodput (300)")
    parser.add_argument("--only", choices=MEASURED, help="measure only this")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of each node, while a change is measured (2)")
    parser.add_argument(
        "--held-mib",
        type=int,
        default=0,
        help="more memory that the first workers in place hold, while a change is measured (0)",
    )
    parser.add_argument("--kinds", help=f"measure only these jobs, separated by semicolons: {'; '.join(KINDS)}")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    repetitions = args.repetitions or (1 if args.quick else 5)
    seconds = args.goodput_seconds or (35.0 if args.quick else 300.0)
    kinds = [kind.strip() for kind in args.kinds.split(";")] if args.kinds else list(KINDS)
    result: dict[str, Any] = json.loads(args.output.read_text()) if args.only and args.output.exists() else {}
    result |= {"python": platform.python_version(), "machine": machine()}
    if args.only in (None, "changes"):
        result["changes"] = changes(kinds, repetitions, args.workers, args.held_mib)
        result["workers"] = args.workers
        show(result["changes"])
    for name in ("workers", "nodes"):
        if args.only in (None, name):
            result[f"goodput, {name}"] = parts = {}
            for kind in [kind for kind in LASTING if kind in kinds]:
                parts[kind] = goodput(kind, seconds, of_nodes=name == "nodes")
                print(f"goodput, {name} killed: {kind:<34} {parts[kind]:.1%}", flush=True)
            result[f"goodput seconds, {name}"] = seconds
    keep(result, args.output)
    if args.output == OUTPUT and {f"goodput, {name}" for name in MEASURED[1:]} <= {*result}:
        draw(result)
    return 0


def changes(
    kinds: Sequence[str], repetitions: int, workers: int, held_mib: int
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        kind: {"killed": [], "joined": [], "left": []} for kind in kinds
    }
    for number in range(repetitions):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            with job_of(kind, workers, held_mib) as job:
                try:
                    found[kind]["killed"].append(kill_worker(job, number))
                    joined, left = join_and_leave(job)
                    found[kind]["joined"].append(joined)
                    found[kind]["left"].append(left)
                except TooLateError as error:
                    print(error, file=sys.stderr)
    return found


def show(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    for change in ("killed", "joined", "left"):
        print(f"{change}:")
        for kind, by_change in found.items():
            entries = by_change[change]
            if not entries:
                print(f"  {kind:<34} not within {LIMIT_S:.0f} s")
                continue
            times = [entry["s"] for entry in entries]
            numbers = [name for name in entries[0] if name not in ("s", "phases")]
            more = ", ".join(f"{name} {statistics.median(entry[name] for entry in entries):.2f}" for name in numbers)
            print(f"  {kind:<34} {statistics.median(times):6.2f} s (at most {max(times):.2f})  {more}")
            told = [phase for phase in PHASES if all(phase in entry["phases"] for entry in entries)]
            apart = {phase: statistics.median(entry["phases"][phase] for entry in entries) for phase in told}
            print("    last worker: " + ", ".join(f"{phase} {at:.2f}" for phase, at in apart.items()))


def draw(result: dict[str, Any]) -> None:
    """Draw the goodput of all jobs."""
    groups = [
        plot.Group(f"{what} every {FAULT_EVERY_S:.0f} s", result[f"goodput, {name}"])
        for what, name in (("a worker is killed", "workers"), ("an agent or a node is killed", "nodes"))
    ]
    plot.write_shares(PLOT, "Goodput", "time spent in steps that count, 2 nodes with 2 workers, 2 cores", groups)


if __name__ == "__main__":
    sys.exit(main())
