"""Compare the process layer with PyTorch's `start_processes`: CPU time of an agent that tees, and our own times.

    python benches/process.py [--lines 200000] [--repetitions 5]

Eight workers print as fast as they can. Each line goes to a file and, with its prefix, to a console, which is a pipe to
`wc`. PyTorch and ours are measured in turn, and all lines are counted. CPU time is that of the agent's threads, without
its workers. PyTorch is imported before the clock starts.

Only ours: the time from a kill to the exit event, the start of eight workers, the CPU time of an agent with idle
workers, and the time from a kill until the agent of another node knows of it, also while the first node's console and
error file hang.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, keep, machine

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = RESULTS / "process.json"
RELEASE = ROOT / "target" / "release"
LOAD, HELPER = RELEASE / "examples" / "process_load", RELEASE / "process_helper"
AGENT_LOAD = RELEASE / "examples" / "agent_load"
WORKERS = 8
LIMIT_S = 300.0

PYTORCH = """
import json, resource, sys, time
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
_, folder, program, *args = sys.argv
specs = DefaultLogsSpecs(log_dir=folder, tee=Std.OUT)
before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
workers = range(8)
context = start_processes("default", program, {i: tuple(args) for i in workers}, {i: {} for i in workers}, specs)
assert not context.wait(period=0.1).is_failed()
sys.stdout.flush()
after = resource.getrusage(resource.RUSAGE_SELF)
cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"wall_s": time.monotonic() - began, "cpu_s": cpu_s}), file=sys.stderr)
"""


def tee(agent: list[str], lines: int) -> dict[str, float]:
    """Run one agent with its workers, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        count = subprocess.Popen(["wc", "-l"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [*agent, folder, str(HELPER), "flood", str(lines)]
        done = subprocess.run(
            command, check=False, stdout=count.stdin, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
        seen, _ = count.communicate(timeout=LIMIT_S)
    if done.returncode or int(seen) != WORKERS * lines:
        raise SystemExit(f"error: {agent[0]} showed {seen.strip()} of {WORKERS * lines} lines: {done.stderr}")
    return dict(json.loads(done.stderr.splitlines()[-1]))


def ours(*args: str) -> dict[str, float]:
    done = subprocess.run([str(LOAD), *args], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return dict(json.loads(done.stderr.splitlines()[-1]))


def notified(*args: str) -> dict[str, float]:
    done = subprocess.run([str(AGENT_LOAD), *args], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description="Tee, exits, starts and idling, beside PyTorch's.")
    parser.add_argument("--lines", type=int, default=200_000, help="lines that each worker prints")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--idle-seconds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    targets = ["--example", "process_load", "--example", "agent_load", "--bin", "process_helper"]
    subprocess.run(["cargo", "build", "--quiet", "--release", *targets], cwd=ROOT, check=True)

    agents = {"PyTorch": [sys.executable, "-c", PYTORCH], "ours": [str(LOAD), "tee"]}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in agents}
    for repetition in range(args.repetitions):
        for name in list(agents) if repetition % 2 == 0 else reversed(agents):
            samples[name].append(tee(agents[name], args.lines))
    rates = {
        name: WORKERS * args.lines / statistics.median(sample["cpu_s"] for sample in runs)
        for name, runs in samples.items()
    }
    print(
        f"\ntee of {WORKERS} workers, {args.lines} lines each, medians of {args.repetitions}, {os.cpu_count()} cores\n"
    )
    for name, rate in rates.items():
        print(f"{name:<8}  {rate / 1e6:6.2f} million lines per CPU second  {rate / rates['PyTorch']:5.1f} times")
    result: dict[str, Any] = {
        "command": "python benches/process.py",
        "machine": machine(),
        "tee": samples,
        "exits": ours("exits", "500"),
        "starts": ours("starts", "50"),
        "idle": ours("idle", str(args.idle_seconds)),
        "notified": notified("notify", "200"),
        "notified_hanging": notified("notify-hanging", "200"),
    }
    p50_ms, p99_ms = (result["exits"][name] * 1e3 for name in ("p50_s", "p99_s"))
    print(f"kill to exit event    p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms")
    print(f"start of {WORKERS} workers    p50 {result['starts']['p50_s'] * 1e3:.2f} ms")
    print(f"idle for {args.idle_seconds} s         {result['idle']['cpu_s'] * 1e3:.2f} ms of CPU")
    for name, what in (("notified", "all is well"), ("notified_hanging", "console and error file hang")):
        times = (f"{share} {result[name][f'{share}_s'] * 1e3:.2f} ms" for share in ("p50", "p99", "max"))
        print(f"kill to other node    {', '.join(times)}: {what}")
    print()
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
