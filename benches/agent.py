"""Measure how fast agents notice failures, stop workers and restart them: PyTorch's and ours, under stock `torchrun`.

    python benches/agent.py [--quick] [--repetitions 50] [--idle-seconds 60] [--lines 200000]

Three kinds of job take turns: `c10d` is unchanged PyTorch, `torch` is PyTorch's agent on our rendezvous, and `rust` is
our agent. Workers (`agent_worker.py`) import nothing. A restart is then the agents' work and the start of a bare
interpreter, which is measured separately. Workers report CLOCK_MONOTONIC when they start, fail and get their SIGTERM.
The SIGTERM to the failed worker's sibling shows that the agent knows of the failure. CPU time is that of all threads of
an agent, as the scheduler counts it, without children.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import RESULTS, cpu_s, keep, machine
from process import WORKERS

OUTPUT = RESULTS / "agent.json"
WORKER = Path(__file__).resolve().with_name("agent_worker.py")
LIMIT_S = 90.0
KINDS = {"c10d": ("c10d", ""), "torch": ("rust-c10d", ",agent=torch"), "rust": ("rust-c10d", "")}
MARKER = "ELASTIC_RS_BENCH_ID"


@dataclass
class Event:
    """A report of a worker."""

    what: str
    at: float
    rank: int
    restart: int
    pid: int


@dataclass
class Job:
    """The torchrun processes of one job, and the reports of their workers."""

    kind: str
    folder: Path
    nodes: int = 2
    workers: int = 2
    min_nodes: int = 2
    options: tuple[str, ...] = ()
    lines: int = 0
    stdout: int = subprocess.DEVNULL
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unread: bytes = b""

    def start(self) -> None:
        """Start all nodes, and wait until all workers run."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipe = self.folder / f"{self.kind}-{port}"
        os.mkfifo(pipe)
        self.reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self.id = pipe.name
        backend, conf = KINDS[self.kind]
        for node in range(self.nodes):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.min_nodes}:{self.nodes}"),
                *(f"--nproc-per-node={self.workers}", "--max-restarts=100000", f"--rdzv-backend={backend}"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={self.id}", f"--rdzv-conf=join_timeout=600{conf}"),
                *(f"--local-addr=127.0.0.{node + 1}", "--no-python", *self.options),
                *(sys.executable, "-I", "-S", str(WORKER), str(pipe), str(self.lines)),
            ]
            env = {**os.environ, MARKER: self.id, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            log = self.folder / f"{pipe.name}-{node}.log"
            with log.open("wb") as stderr:
                self.agents.append(subprocess.Popen(command, env=env, stdout=self.stdout, stderr=stderr))
            if node == 0:
                _until_listening(port)  # it hosts the store, whatever happens to others
        self.must(lambda: len(self.of("up")) == self.nodes * self.workers)

    def of(self, what: str) -> list[Event]:
        return [event for event in self.events if event.what == what]

    def wait(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Read reports of workers until a condition holds. Returns False if that takes too long."""
        deadline = time.monotonic() + limit_s
        while not done():
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            *lines, self.unread = (self.unread + os.read(self.reader, 1 << 16)).split(b"\n")
            for line in lines:
                what, at, rank, restart, pid = line.decode().split()
                self.events.append(Event(what, int(at) * 1e-9, int(rank), int(restart), int(pid)))
        return True

    def must(self, done: Callable[[], bool]) -> None:
        if not self.wait(done):
            logs = "\n".join(log.read_text()[-2000:] for log in self.folder.glob(f"{self.id}-*.log"))
            raise SystemExit(f"error: {self.kind} has not got there in {LIMIT_S:.0f} s: {self.events}\n{logs}")

    def node_of(self, event: Event) -> int:
        return event.rank // self.workers

    def end(self) -> None:
        """Kill every process with the job's marker."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        needle = f"{MARKER}={self.id}\0".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
        os.close(self.reader)


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise SystemExit(f"error: nobody listens on port {port} after {LIMIT_S:.0f} s")


@contextlib.contextmanager
def running(*jobs: Job) -> Iterator[None]:
    try:
        for job in jobs:
            job.start()
        yield
    finally:
        for job in jobs:
            if hasattr(job, "reader"):
                job.end()


# --- measurements ----------------------------------------------------------------------------------------------------


def failures(folder: Path, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Let workers fail, in all jobs in turn. Returns when others get their SIGTERM, and when all run again."""
    jobs = [Job(kind, folder) for kind in KINDS]
    found = {kind: {name: list[float]() for name in ("knows_s", "elsewhere_s", "again_s")} for kind in KINDS}
    with running(*jobs):
        for repetition in range(repetitions):
            for job in jobs if repetition % 2 == 0 else reversed(jobs):
                count = job.nodes * job.workers
                victim = job.of("up")[-count:][repetition % count]
                job.events.clear()
                os.kill(victim.pid, signal.SIGUSR1)
                job.must(lambda job=job, count=count: len(job.of("up")) == count)
                began = job.of("exit")[0].at
                here = [event for event in job.of("term") if job.node_of(event) == job.node_of(victim)]
                there = [event for event in job.of("term") if job.node_of(event) != job.node_of(victim)]
                times = found[job.kind]
                times["knows_s"] += [event.at - began for event in here]
                times["elsewhere_s"] += [event.at - began for event in there]
                times["again_s"].append(max(event.at for event in job.of("up")) - began)
    return found


def losses(folder: Path, repetitions: int, limit_s: float) -> dict[str, list[float | None]]:
    """Kill an agent and its workers, and return when the survivor's workers run again. None: not within the limit."""
    found: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
    for _ in range(repetitions):
        for kind in KINDS:
            if found[kind] == [None]:
                continue  # once is enough
            job = Job(kind, folder, min_nodes=1)
            with running(job):
                lost = [event.pid for event in job.of("up") if _child_of(event.pid, job.agents[1].pid)]
                job.events.clear()
                began = time.monotonic()
                for pid in [job.agents[1].pid, *lost]:
                    os.kill(pid, signal.SIGKILL)
                again = job.wait(lambda job=job: len(job.of("up")) >= job.workers, limit_s)
                found[kind].append(max(event.at for event in job.of("up")) - began if again else None)
    return found


def _child_of(pid: int, agent: int) -> bool:
    """Whether a process is a descendant of this agent. With our agent, a guard is between agent and worker."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
        return parent == agent or (parent > 1 and _child_of(parent, agent))
    except FileNotFoundError:
        return False


def idle(folder: Path, seconds: float) -> dict[str, float]:
    """Return the CPU seconds of agents with eight idle workers each, all at the same time."""
    jobs = [Job(kind, folder, nodes=1, min_nodes=1, workers=WORKERS) for kind in KINDS]
    with running(*jobs):
        time.sleep(2)  # what follows the start is no idling
        before = [cpu_s(job.agents[0].pid) for job in jobs]
        time.sleep(seconds)
        return {job.kind: cpu_s(job.agents[0].pid) - start for job, start in zip(jobs, before, strict=True)}


class Console:
    """Reads a job's console, counts lines, and measures the age of lines with a time."""

    def __init__(self, stream: int) -> None:
        self.count, self.ages = 0, list[float]()
        self._stream, self._rest = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while chunk := os.read(self._stream, 1 << 20):
            now = time.monotonic_ns()
            self.count += chunk.count(b"\n")
            if b"stamp" in chunk or b"stamp" in self._rest:
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                found = (re.search(rb"stamp (\d+)$", line) for line in lines)
                self.ages += [(now - int(match[1])) * 1e-9 for match in found if match]


def tee(folder: Path, repetitions: int, lines: int) -> dict[str, dict[str, list[float]]]:
    """Let eight workers print. Returns the lines shown per second of the agent's CPU time, and their age."""
    found = {kind: {"lines_per_cpu_s": list[float](), "lag_s": list[float]()} for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 == 0 else reversed(KINDS):
            out, into = os.pipe()
            logs = folder / f"logs-{kind}-{repetition}"
            options = ("--tee=3", f"--log-dir={logs}")
            job = Job(kind, folder, 1, WORKERS, 1, options, lines, stdout=into)
            with running(job):
                os.close(into)
                console = Console(out)
                agent, all_lines = job.agents[0].pid, WORKERS * lines
                before = cpu_s(agent)
                _print(job, WORKERS)
                deadline = time.monotonic() + LIMIT_S
                while console.count < all_lines and time.monotonic() < deadline:
                    time.sleep(0.01)
                if console.count < all_lines:
                    raise SystemExit(f"error: {kind} showed {console.count} of {all_lines} lines")
                found[kind]["lines_per_cpu_s"].append(all_lines / (cpu_s(agent) - before))
                _print(job, 2 * WORKERS)
                deadline = time.monotonic() + LIMIT_S
                while len(console.ages) < 100 * WORKERS and time.monotonic() < deadline:
                    time.sleep(0.01)
                found[kind]["lag_s"] += console.ages
            os.close(out)
    return found


def _print(job: Job, count: int) -> None:
    for event in job.of("up"):
        os.kill(event.pid, signal.SIGUSR2)
    job.must(lambda: len(job.of("printed")) == count)


def bare_start_s() -> float:
    """Return the time from fork to the first statement of a bare interpreter, which is part of every restart."""
    times = []
    for _ in range(10):
        began = time.monotonic_ns()
        command = [sys.executable, "-I", "-S", "-c", "import time; print(time.monotonic_ns())"]
        times.append((int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) - began) * 1e-9)
    return statistics.median(times)


# --- the table -------------------------------------------------------------------------------------------------------


def at(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * share))]


def row(name: str, target: str, values: dict[str, float | None], unit: str, *, more_is_better: bool = False) -> str:
    cells = [f"{'-' if values[kind] is None else f'{values[kind]:.2f}':>12}" for kind in KINDS]
    base, ours = values["c10d"], values["rust"]
    ratio = ""
    if base is not None and ours:
        ratio = f"{ours / base if more_is_better else base / ours:.1f}"
    return f"{name:<42}{target:>10}{''.join(cells)} {unit:<11}{ratio:>8}"


def table(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'':<42}{'target':>10}{''.join(f'{kind:>12}' for kind in KINDS)} {'unit':<11}{'times':>8}"
    for name, key, share, target in [
        ("worker exit, agent knows, p50", "knows_s", 0.5, "1"),
        ("worker exit, agent knows, p99", "knows_s", 0.99, "5"),
        ("worker exit, SIGTERM elsewhere, p99", "elsewhere_s", 0.99, "50"),
        ("worker exit, all started again, p50", "again_s", 0.5, "100"),
        ("worker exit, all started again, p99", "again_s", 0.99, ""),
    ]:
        yield row(name, target, {kind: at(result["failures"][kind][key], share) * 1e3 for kind in KINDS}, "ms")
    lost = {kind: [value for value in result["losses"][kind] if value is not None] for kind in KINDS}
    medians = {kind: statistics.median(lost[kind]) * 1e3 if lost[kind] else None for kind in KINDS}
    yield row("node lost, survivors started again", "2000", medians, "ms")
    yield row(
        "idle, per minute", "10", {k: v * 6e4 / result["idle_seconds"] for k, v in result["idle"].items()}, "ms of CPU"
    )
    rates = {kind: statistics.median(result["tee"][kind]["lines_per_cpu_s"]) * 1e-6 for kind in KINDS}
    yield row("tee, million lines per CPU second", "5 times", rates, "", more_is_better=True)
    yield row("tee, lag p99", "10", {kind: at(result["tee"][kind]["lag_s"], 0.99) * 1e3 for kind in KINDS}, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Noticing, stopping, starting again, idling and tee, beside PyTorch's."
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--repetitions", type=int, help="failures in each kind of job (50)")
    parser.add_argument("--losses", type=int, help="lost nodes (5)")
    parser.add_argument("--loss-limit-s", type=float, help="seconds to wait for survivors (60)")
    parser.add_argument("--idle-seconds", type=float, help="length of the idle measurement (60)")
    parser.add_argument("--lines", type=int, help="lines that each worker prints, a multiple of 100 (200000)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    full = {"repetitions": 50, "losses": 5, "loss_limit_s": 60.0, "idle_seconds": 60.0, "lines": 200_000}
    quick = {"repetitions": 5, "losses": 1, "loss_limit_s": 10.0, "idle_seconds": 10.0, "lines": 20_000}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {
            "command": "python benches/agent.py",
            "python": platform.python_version(),
            "machine": machine(),
            "bare_start_s": bare_start_s(),
            "failures": failures(folder, args.repetitions),
            "losses": losses(folder, args.losses, args.loss_limit_s),
            "loss_limit_s": args.loss_limit_s,
            "idle_seconds": args.idle_seconds,
            "idle": idle(folder, args.idle_seconds),
            "tee": tee(folder, 1 if args.quick else 3, args.lines),
        }
    print("\n" + "\n".join(table(result)))
    print(
        f"\n-: not within {args.loss_limit_s:.0f} s. "
        f"A bare interpreter takes {result['bare_start_s'] * 1e3:.1f} ms to start."
    )
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
