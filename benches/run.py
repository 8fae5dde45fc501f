"""Measure the cost of a launcher: the installed `torchrun` and `elastic-run`, in turn.

    python benches/run.py [--quick] [--repetitions 15] [--idle-seconds 60]

Start-up is the time from the launcher's start to its end with two workers that do nothing (`true`), or with `--help`.
CPU time and peak memory are the kernel's figures for the launcher's process and its children, which are small. At rest
eight workers sleep: the figures are the CPU time of all threads of the agent and of our guards, and their memory (PSS,
which divides shared pages among processes).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import RESULTS, cpu_s, keep, machine, pss_bytes

OUTPUT = RESULTS / "run.json"
KINDS = {"torchrun": "torch.distributed.run", "elastic-run": "elastic_rs.run"}
LIMIT_S = 90.0
WORKERS = 8
START = ("--standalone", "--nproc-per-node=2", "--no-python", "true")


def command(kind: str, *args: str) -> list[str]:
    return [sys.executable, "-m", KINDS[kind], *args]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # else both print a warning


def once(kind: str, *args: str) -> dict[str, float]:
    """Run a command to its end. Returns seconds, CPU seconds, and the peak of memory in bytes."""
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        process = subprocess.Popen(command(kind, *args), env=environment(), stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        took = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"error: {kind} {args} ended with {process.returncode}: {output.read().decode()[-2000:]}")
    return {"wall_s": took, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}


def repeated(count: int, *args: str) -> dict[str, list[dict[str, float]]]:
    """Run all commands in turn. The first run of each fills the file system's cache, and does not count."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(count + 1):
        for kind in KINDS:
            measured = once(kind, *args)
            if number > 0:
                found[kind].append(measured)
    return found


def children(pid: int) -> list[int]:
    lists = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for one in lists for child in one.read_text().split()]


def supervisors(agent: int) -> list[int]:
    """Return the process ids of an agent and of the guards of its workers."""
    with_children = [child for child in children(agent) if children(child)]
    return [agent, *with_children]


@contextlib.contextmanager
def at_rest(kind: str) -> Iterator[int]:
    """Start a job with sleeping workers, and yield its agent's process id."""
    args = ("--standalone", f"--nproc-per-node={WORKERS}", "--no-python", "sleep", "100000")
    process = subprocess.Popen(command(kind, *args), env=environment(), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_S
        while sum(_sleeps(pid) for child in children(process.pid) for pid in (child, *children(child))) < WORKERS:
            if time.monotonic() > deadline:
                raise SystemExit(f"error: {kind} has not started its workers in {LIMIT_S:.0f} s")
            time.sleep(0.05)  # `sleep` prints nothing when it starts
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _sleeps(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    return False


def idle(seconds: float) -> dict[str, dict[str, float]]:
    """Measure all kinds at the same time, so that other load on the machine is the same for them."""
    with contextlib.ExitStack() as stack:
        agents = {kind: stack.enter_context(at_rest(kind)) for kind in KINDS}
        time.sleep(2)  # what follows the start is no idling
        watched = {kind: supervisors(pid) for kind, pid in agents.items()}
        before = {kind: sum(map(cpu_s, pids)) for kind, pids in watched.items()}
        time.sleep(seconds)
        return {
            kind: {"cpu_s": sum(map(cpu_s, pids)) - before[kind], "pss_bytes": float(sum(map(pss_bytes, pids)))}
            for kind, pids in watched.items()
        }


def row(name: str, values: dict[str, float], unit: str) -> str:
    theirs, ours = values["torchrun"], values["elastic-run"]
    cells = "".join(f"{value:>14,.1f}" for value in (theirs, ours))
    times = f"{theirs / ours:,.0f} times" if ours else "-"
    return f"{name:<38}{cells} {unit:<10}{times:>12}"


def table(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'':<38}{''.join(f'{kind:>14}' for kind in KINDS)}"
    for name, part, key, factor, unit in [
        ("start and end of two workers", "start", "wall_s", 1e3, "ms"),
        ("  CPU time of it", "start", "cpu_s", 1e3, "ms"),
        ("  memory of the agent, at most", "start", "peak_bytes", 1e-6, "MB"),
        ("--help", "help", "wall_s", 1e3, "ms"),
    ]:
        values = {kind: statistics.median(one[key] for one in result[part][kind]) * factor for kind in KINDS}
        yield row(name, values, unit)
    rest = result["idle"]
    per_minute = 6e4 / result["idle_seconds"]
    yield row("at rest, CPU time per minute", {kind: rest[kind]["cpu_s"] * per_minute for kind in KINDS}, "ms")
    yield row("at rest, memory with guards", {kind: rest[kind]["pss_bytes"] * 1e-6 for kind in KINDS}, "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description="What a launcher costs: torchrun and elastic-run by turns.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.quick:
        args.repetitions, args.idle_seconds = 3, 5.0
    result: dict[str, Any] = {
        "command": "python benches/run.py",
        "python": platform.python_version(),
        "machine": machine(),
        "start": repeated(args.repetitions, *START),
        "help": repeated(args.repetitions, "--help"),
        "idle_seconds": args.idle_seconds,
        "idle": idle(args.idle_seconds),
    }
    print("\n" + "\n".join(table(result)))
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
