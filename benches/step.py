"""Measure what ``elastic_rs.step`` costs, which a worker calls in each step: in a worker, and without an agent.

    python benches/step.py [--calls 1000000] [--repetitions 5]

Beside it: an empty Python function, and the look at the clock that the call contains. PyTorch has no such call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import elastic_rs
from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "step.json"


def nothing(n: int) -> None:
    pass


def measure(calls: int, repetitions: int) -> dict[str, list[float]]:
    """Return the nanoseconds of each call, once per repetition."""
    names = {"elastic_rs": elastic_rs, "nothing": nothing, "time": time}
    timed = {
        "step(n)": "elastic_rs.step(7)",
        "step()": "elastic_rs.step()",
        "an empty Python function": "nothing(7)",
        "time.monotonic_ns()": "time.monotonic_ns()",
    }
    return {
        name: [
            seconds / calls * 1e9
            for seconds in timeit.repeat(statement, number=calls, repeat=repetitions, globals=names)
        ]
        for name, statement in timed.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        args.worker.write_text(json.dumps(measure(args.calls, args.repetitions)))
        return 0
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        told = Path(folder, "told")
        options = [f"--calls={args.calls}", f"--repetitions={args.repetitions}", f"--worker={told}"]
        command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1", __file__, *options]
        subprocess.run(command, check=True)
        worker = json.loads(told.read_text())
    alone = measure(args.calls, args.repetitions)
    for where, found in [("in a worker", worker), ("without an agent", alone)]:
        for name, values in found.items():
            print(f"{where:<17} {name:<25} {statistics.median(values):6.0f} ns, median of {args.repetitions}")
    keep(
        {"command": "python benches/step.py", "machine": machine(), "worker_ns": worker, "alone_ns": alone}, args.output
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
