"""Measure what a change of the world costs: 2 nodes with 2 workers each, gloo, a model of 100 MB.

    python benches/in_place.py [--quick] [--repetitions 10] [--goodput-seconds 300]

Four jobs, one after the other in each repetition: `torchrun` with c10d, `elastic-run --warm-start`, and workers that
change in place, without and with a template. Measured is, from just before the cause until the last worker has done its
first step that counts:

- a worker is killed;
- a node joins: from the moment when its first worker is in the new world;
- a node leaves by SIGTERM.

Goodput is the part of the time that was spent in steps that count. A worker is killed every 15 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "in_place.json"
WORKER = Path(__file__).with_name("in_place_worker.py")
LIMIT_S = 120.0
WORKERS = 2
EVERY = 10
"""Steps between two commits, or two checkpoints."""
KILL_EVERY_S = 15.0
MARKER = "ELASTIC_RS_BENCH_ID"
RUN = ["elastic_rs.run", "--rdzv-backend=c10d"]
KINDS = {
    "torchrun": (["torch.distributed.run", "--rdzv-backend=c10d"], "plain"),
    "warm": ([*RUN, "--warm-start"], "plain"),
    "in place": (RUN, "in-place"),
    "in place, template": ([*RUN, "--warm-start"], "in-place"),
}


@dataclass(frozen=True)
class Told:
    """What a worker has told."""

    what: str
    at: float
    rank: int
    world: int
    step: int
    pid: int


class Job:
    """A job, whose workers report through a pipe."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.id, self._unread, self.folder = kind, uuid.uuid4().hex, b"", folder
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        self._reader = os.open(self.pipe, os.O_RDWR)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.history: list[Told] = []

    def start_node(self) -> subprocess.Popen[bytes]:
        launcher, mode = KINDS[self.kind]
        flags = ["--nnodes=1:3", f"--nproc-per-node={WORKERS}", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=x"]
        conf = "--rdzv-conf=last_call_timeout=1"
        script = [str(WORKER), str(self.pipe), mode, str(self.folder), str(EVERY)]
        command = [sys.executable, "-m", *launcher, *flags, conf, "--max-restarts=100000", *script]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARKER: self.id}
        with (self.folder / f"{len(self.nodes)}.log").open("wb") as log:
            self.nodes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return self.nodes[-1]

    def read(self, timeout_s: float) -> list[Told]:
        """Return what is told within this time, as soon as there is something."""
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
        raise SystemExit(f"error: {self.kind} has not got there in {LIMIT_S:.0f} s\n{logs}")

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

    def end(self) -> None:
        for node in self.nodes:
            node.kill()
            node.wait()
        needle = f"{MARKER}={self.id}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
        os.close(self._reader)


@contextlib.contextmanager
def job_of(kind: str, nodes: int = 2) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(kind, Path(folder))
        try:
            for _ in range(nodes):
                job.start_node()
            yield job
        finally:
            job.end()


def kill_worker(job: Job, rank: int) -> dict[str, float]:
    pids = job.settle(4)
    victim = pids[rank % 4]
    reached = max(told.step for told in job.history if told.what == "step")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    # Steps that are told after the kill may still be of the old world.
    world = job.wait(lambda told: told.what == "world" and told.at > began)
    took = job.stepped(4, world.at) - began
    now = job.settle(4)
    survivors = len({*pids.values()} & {*now.values()})
    return {"s": took, "lost": reached - world.step, "survivors": survivors}


def join_and_leave(job: Job) -> tuple[dict[str, float], dict[str, float]]:
    job.settle(4)
    node = job.start_node()
    # The newcomer is ready when its first worker is in the new world.
    newcomer = job.wait(lambda told: told.what == "world" and told.world == 6)
    still_since = max(told.at for told in job.history if told.what == "step" and told.world == 4)
    first = job.stepped(6, newcomer.at)
    joined = {"s": first - newcomer.at, "still_s": first - still_since}
    job.settle(6)
    before = max(told.step for told in job.history if told.what == "step")
    began = time.monotonic()
    node.send_signal(signal.SIGTERM)
    world = job.wait(lambda told: told.what == "world" and told.world == 4 and told.at > began)
    last = max(told.step for told in job.history if told.what == "step" and told.world == 6)
    left = {"s": job.stepped(4, world.at) - began, "lost": max(before, last) - world.step}
    node.wait()
    return joined, left


def goodput(kind: str, seconds: float) -> float:
    """Return the part of the time that was spent in steps that count, while a worker is killed now and then."""
    with job_of(kind) as job:
        pids = job.settle(4)
        steps = [told for told in job.history if told.what == "step" and told.world == 4 and told.rank == 0]
        pace = statistics.median(b.at - a.at for a, b in itertools.pairwise(steps))
        began, first = time.monotonic(), max(told.step for told in job.history)
        kill_at, number = began + KILL_EVERY_S, 0
        while time.monotonic() < began + seconds:
            for told in job.read(min(kill_at, began + seconds) - time.monotonic()):
                pids[told.rank] = told.pid
            if time.monotonic() >= kill_at:
                kill_at += KILL_EVERY_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[number % 4], signal.SIGKILL)
                number += 1
        last = [told.step for told in job.history if told.what == "step"][-1]
        return (last - first) * pace / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a change of the world costs: restarts, and workers in place.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--repetitions", type=int, help="changes of each kind in each job (10)")
    parser.add_argument("--goodput-seconds", type=float, help="length of the goodput measurement of each job (300)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    repetitions = args.repetitions or (2 if args.quick else 10)
    seconds = args.goodput_seconds or (35.0 if args.quick else 300.0)
    changes: dict[str, dict[str, list[dict[str, float]]]] = {
        kind: {"killed": [], "joined": [], "left": []} for kind in KINDS
    }
    for number in range(repetitions):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            with job_of(kind) as job:
                changes[kind]["killed"].append(kill_worker(job, number))
                joined, left = join_and_leave(job)
                changes[kind]["joined"].append(joined)
                changes[kind]["left"].append(left)
    result: dict[str, Any] = {
        "command": "python benches/in_place.py",
        "python": platform.python_version(),
        "machine": machine(),
        "repetitions": repetitions,
        "changes": changes,
        "goodput_seconds": seconds,
        "goodput": {kind: goodput(kind, seconds) for kind in KINDS},
    }
    for change in ("killed", "joined", "left"):
        print(f"{change}: from the cause (joined: from the newcomer's arrival) to the last worker's first step")
        base = statistics.median(entry["s"] for entry in changes["torchrun"][change])
        for kind in KINDS:
            entries = changes[kind][change]
            median, worst = statistics.median(entry["s"] for entry in entries), max(entry["s"] for entry in entries)
            more = ", ".join(
                f"{name} {statistics.median(entry[name] for entry in entries):.2f}"
                for name in entries[0]
                if name != "s"
            )
            print(
                f"  {kind:<20} {median * 1e3:>8,.0f} ms (at most {worst * 1e3:,.0f}), {base / median:.1f} times; {more}"
            )
    for kind, part in result["goodput"].items():
        print(f"goodput of {kind:<20} {part:.1%}")
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
