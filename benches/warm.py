"""Measure a restart after a crash: 2 nodes with 2 workers each, whose script imports torch.

    python benches/warm.py [--quick] [--repetitions 20]

Three jobs run side by side: `torchrun` with c10d, `elastic-run`, and `elastic-run --warm-start`. They crash in turn, so
that only one restarts at a time. The time is from just before the worker's end to the last of the four lines after
`import torch`. Templates are measured as well: memory (PSS, which divides shared pages among processes), and CPU time
at rest.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

from elastic_rs._warm._plan import CODE
from measuring import RESULTS, cpu_s, free_port, keep, machine, pss_bytes

OUTPUT = RESULTS / "warm.json"
LIMIT_S = 120.0
NODES, WORKERS = 2, 2
KINDS = {
    "torchrun": ["torch.distributed.run", "--rdzv-backend=c10d"],
    "cold": ["elastic_rs.run", "--rdzv-backend=c10d"],
    "warm": ["elastic_rs.run", "--rdzv-backend=c10d", "--warm-start"],
}
MARKER = "ELASTIC_RS_BENCH_ID"
SCRIPT = """
import os, signal, sys, time
import torch
pipe = os.open(sys.argv[1], os.O_WRONLY)
def tell(what):
    os.write(pipe, f"{what} {time.monotonic_ns()} {os.environ['RANK']} {os.getpid()}\\n".encode())
def crash(*_):
    tell("crash")
    os._exit(3)
signal.signal(signal.SIGUSR1, crash)
tell("up")
while True:
    signal.pause()
"""


class Job:
    """A job of two agents. Its workers report through a pipe."""

    def __init__(self, kind: str, folder: Path, restarts: int) -> None:
        self.kind, self.id, self._unread = kind, uuid.uuid4().hex, b""
        pipe, script = folder / f"{kind}.pipe", folder / "script.py"
        os.mkfifo(pipe)
        self._reader = os.open(pipe, os.O_RDWR)
        script.write_text(SCRIPT)
        port = free_port()
        flags = [f"--nnodes={NODES}", f"--nproc-per-node={WORKERS}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
        command = [sys.executable, "-m", *KINDS[kind], *flags, f"--max-restarts={restarts}", str(script), str(pipe)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", MARKER: self.id}
        self.agents = []
        for node in range(NODES):
            with (folder / f"{kind}-{node}.log").open("wb") as log:
                self.agents.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        self.pids = {rank: pid for _, _, rank, pid in self.told("up")}

    def told(self, what: str) -> list[tuple[str, float, int, int]]:
        """Wait until all workers have reported this."""
        found: list[tuple[str, float, int, int]] = []
        deadline = time.monotonic() + LIMIT_S
        while sum(event[0] == what for event in found) < NODES * WORKERS:
            if not select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemExit(f"error: {self.kind} has not got there in {LIMIT_S:.0f} s: {found}")
            *lines, self._unread = (self._unread + os.read(self._reader, 1 << 16)).split(b"\n")
            for line in lines:
                name, at, rank, pid = line.decode().split()
                found.append((name, int(at) * 1e-9, int(rank), int(pid)))
        return found

    def crash(self, rank: int) -> float:
        """Let a worker crash, and return the seconds until all run again."""
        os.kill(self.pids[rank], signal.SIGUSR1)
        events = self.told("up")
        self.pids = {rank: pid for what, _, rank, pid in events if what == "up"}
        began = next(at for what, at, _, _ in events if what == "crash")
        return max(at for what, at, _, _ in events if what == "up") - began

    def marked(self) -> list[int]:
        needle = f"{MARKER}={self.id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def templates(self) -> list[int]:
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in self.marked()}
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in commands}
        found = [pid for pid, words in commands.items() if CODE.encode() in words and "guard" not in names[pid]]
        assert len(found) == NODES, f"{len(found)} templates"
        return found

    def end(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._reader)


def measure(folder: Path, repetitions: int, idle_s: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        jobs = []
        for kind in KINDS:
            jobs.append(Job(kind, folder, repetitions + 1))
            stack.callback(jobs[-1].end)
        again: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(repetitions + 1):
            for job in jobs if number % 2 == 0 else reversed(jobs):
                took = job.crash(number % (NODES * WORKERS))
                if number > 0:  # the first fills caches
                    again[job.kind].append(took)
        templates = jobs[-1].templates()
        before = sum(map(cpu_s, templates))
        time.sleep(idle_s)
        return {
            "again_s": again,
            "idle_cpu_s": sum(map(cpu_s, templates)) - before,
            "pss_bytes": {job.kind: sum(map(pss_bytes, job.marked())) for job in jobs},
            "template_pss_bytes": sum(map(pss_bytes, templates)),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="A crash of a worker, until all run again: torchrun, cold and warm.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--repetitions", type=int, help="crashes in each job (20)")
    parser.add_argument("--idle-seconds", type=float, help="length of the idle measurement (10)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    repetitions = args.repetitions or (3 if args.quick else 20)
    idle_s = args.idle_seconds or (1.0 if args.quick else 10.0)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "command": "python benches/warm.py",
            "python": platform.python_version(),
            "machine": machine(),
            "repetitions": repetitions,
            "idle_seconds": idle_s,
            **measure(Path(folder), repetitions, idle_s),
        }
    medians = {kind: statistics.median(result["again_s"][kind]) * 1e3 for kind in KINDS}
    for kind, value in medians.items():
        worst = max(result["again_s"][kind]) * 1e3
        print(
            f"{kind:<10} crash, all in user code again: {value:>8,.0f} ms (at most {worst:,.0f}),"
            f" {medians['torchrun'] / value:>6.1f} times; memory of the job {result['pss_bytes'][kind] * 1e-6:,.0f} MB"
        )
    memory, cpu = result["template_pss_bytes"] * 1e-6, result["idle_cpu_s"] * 1e3
    print(f"the two templates: {memory:,.0f} MB, {cpu:.1f} ms of CPU in {idle_s:.0f} s at rest")
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
