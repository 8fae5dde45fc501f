"""Store servers side by side: PyTorch's (libuv) and ours under the same load, alternating in one run.

The server has one CPU, the load generator (examples/store_load.rs) another; for a single connection both share one, so
that the software path is measured and not the wake-up of an idle core. Prints a table with medians and the ratio ours
to PyTorch's, and writes benches/results/store.json. Needs two CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOAD = ROOT / "target/release/examples/store_load"
SERVER_CPU, LOAD_CPU = 0, 1

SERVERS = {
    "libuv": "import torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True)",
    "ours": "from elastic_rs import _elastic_rs; s = _elastic_rs.StoreServer.listen(None, 0)",
}
# Ends when its standard input does.
TAIL = "; import sys; print(s.port, flush=True); sys.stdin.read()"


@dataclass(frozen=True)
class Case:
    """One load."""

    operation: str
    connections: int
    depth: int
    value_bytes: int

    @property
    def one_cpu(self) -> bool:
        return self.connections == 1

    def __str__(self) -> str:
        size = f"{self.value_bytes // 1024} KiB" if self.value_bytes >= 1024 else f"{self.value_bytes} B"
        return f"{self.operation} {size}, {self.connections} x {self.depth}"


CASES = [
    *(Case(operation, 1, 1, 64) for operation in ("ping", "get", "add", "compare_set", "multi_get")),
    Case("get", 1, 1, 65536),
    Case("compare_set", 1, 1, 65536),
    *(Case(operation, connections, 1, 64) for operation in ("get", "add") for connections in (64, 256)),
    *(Case(operation, c, 16, 64) for operation in ("get", "add", "check", "set") for c in (64, 256)),
    Case("multi_get", 8, 16, 64),
    Case("get", 8, 4, 65536),
    Case("compare_set", 8, 4, 65536),
]


@contextlib.contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """Let processes started meanwhile have this CPU only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def server(name: str) -> Iterator[int]:
    with pinned(SERVER_CPU):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVERS[name] + TAIL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libuv's server logs each connection that the load generator drops at its end
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def measure(case: Case, port: int, seconds: float) -> float:
    """Requests per second; for one connection the reciprocal of the median round trip, times a million."""
    words = [port, case.operation, case.connections, case.depth, case.value_bytes, seconds]
    with pinned(SERVER_CPU if case.one_cpu else LOAD_CPU):
        done = subprocess.run([LOAD, *map(str, words)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    return 1e6 / result["p50_us"] if case.one_cpu else result["per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeat", type=int, default=5, help="measurements of each case and server (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one measurement (default: %(default)s)")
    args = parser.parse_args()
    if not {SERVER_CPU, LOAD_CPU} <= os.sched_getaffinity(0):
        sys.exit("this benchmark needs two CPUs: one for the server, one for the load")
    build = ["cargo", "build", "--quiet", "--release", "--example", "store_load"]
    subprocess.run(build, cwd=ROOT, check=True)

    results = []
    print(f"{'load: connections x in flight':34} {'PyTorch':>14} {'ours':>14}   ratio")
    for case in CASES:
        samples: dict[str, list[float]] = {name: [] for name in SERVERS}
        with contextlib.ExitStack() as stack:
            ports = {name: stack.enter_context(server(name)) for name in SERVERS}
            for _ in range(args.repeat):
                for name, port in ports.items():
                    samples[name].append(measure(case, port, args.seconds))
        theirs, ours = (statistics.median(samples[name]) for name in ("libuv", "ours"))
        ratio = statistics.median(a / b for a, b in zip(samples["ours"], samples["libuv"], strict=True))
        if case.one_cpu:
            shown = [f"{1e6 / value:.1f} us" for value in (theirs, ours)]
        else:
            shown = [f"{value / 1000:,.0f} k/s" for value in (theirs, ours)]
        print(f"{case!s:34} {shown[0]:>14} {shown[1]:>14}   {ratio:.2f}", flush=True)
        results.append(
            {"case": str(case), "libuv_per_s": theirs, "ours_per_s": ours, "ratio": ratio, "samples": samples}
        )
    path = ROOT / "benches/results/store.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cpus": os.cpu_count(), "results": results}, indent=2) + "\n")
    print(f"ratio: ours to PyTorch's speed, median of {args.repeat} pairs; written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
