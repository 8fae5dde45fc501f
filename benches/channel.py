"""Measure what a check costs, which a worker makes in each step: one call of `WorkerChannel.check` without news.

    python benches/channel.py [--checks 1000000] [--repetitions 5]

Nothing of PyTorch's does the same. `benches/channel.rs` measures the check without Python.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import timeit
from pathlib import Path

from elastic_rs import _elastic_rs
from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "channel.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    with socket.socket(socket.AF_UNIX) as agent:
        name = f"elastic_rs-bench-{os.getpid()}"
        agent.bind(f"\0{name}")
        agent.listen()
        channel = _elastic_rs.WorkerChannel.connect(f"@{name}", 5.0)
        seconds = timeit.repeat(channel.check, number=args.checks, repeat=args.repetitions)
    check_ns = [second / args.checks * 1e9 for second in seconds]
    print(f"check without news    {statistics.median(check_ns):.0f} ns, median of {args.repetitions}\n")
    keep({"command": "python benches/channel.py", "machine": machine(), "check_ns": check_ns}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
