"""Store servers side by side: PyTorch's (libuv) and ours under the same load, alternating in one run.

The server has one CPU, the load generator (examples/store_load.rs) another; for a single connection both share one, so
that the software path is measured and not the wake-up of an idle core. Prints a table with medians and the ratio ours
to PyTorch's, and writes benches/results/store.json. Needs two CPUs. Where DNS does not answer, PyTorch's server takes
seconds for every group of new connections, since it looks up their names: then the whole takes long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
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
def server(name: str) -> Iterator[tuple[int, int]]:
    """Run a server: its port, and the id of its process."""
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
        yield int(process.stdout.readline()), process.pid
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


def run_load(port: int, *words: object) -> float:
    """Run a one-off of the load generator: milliseconds."""
    with pinned(LOAD_CPU):
        done = subprocess.run([LOAD, str(port), *map(str, words)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["ms"])


# PyTorch's own client, on the server's CPU; prints the median round trip in microseconds.
CLIENT = """
import statistics, sys, time
import torch.distributed as d
port, operation = int(sys.argv[1]), sys.argv[2]
s = d.TCPStore("127.0.0.1", port)
s.set("k", b"v" * 64)
keys = [f"m{i}" for i in range(100)]
s.multi_set(keys, [b"v" * 64] * 100)
call = {"get": lambda: s.get("k"), "add": lambda: s.add("n", 1), "multi_get": lambda: s.multi_get(keys)}[operation]
took = []
for _ in range(6000):
    began = time.perf_counter()
    call()
    took.append(time.perf_counter() - began)
print(statistics.median(took[1000:]) * 1e6)
"""


def pytorch_client(port: int, operation: str) -> float:
    with pinned(SERVER_CPU):
        words = [sys.executable, "-c", CLIENT, str(port), operation]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout)


def resident_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def bytes_per_key(port: int, pid: int, count: int = 1_000_000) -> float:
    before = resident_kib(pid)
    run_load(port, "fill", count)
    return (resident_kib(pid) - before) * 1024 / count


def bytes_per_connection(port: int, pid: int, count: int = 2000) -> float:
    before = resident_kib(pid)
    with pinned(LOAD_CPU):
        process = subprocess.Popen(
            [LOAD, str(port), "idle", str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert process.stdout is not None
    process.stdout.readline()
    after = resident_kib(pid)
    process.communicate()
    return (after - before) * 1024 / count


def others() -> Iterator[tuple[str, str, int, Callable[[int, int], float]]]:
    """Yield what is measured once per server: name, unit, repetitions, and how. Less is better in all of them."""
    yield "memory per key, 8 + 64 B", "B", 1, bytes_per_key
    yield "memory per idle connection", "B", 1, bytes_per_connection
    for operation in ("get", "add", "multi_get"):
        yield f"PyTorch's client, {operation}", "us", 3, lambda port, _pid, op=operation: pytorch_client(port, op)
    for count in (64, 512, 2048):
        yield f"one set, {count} waiters released", "ms", 5, lambda port, _pid, n=count: run_load(port, "release", n)
    for count in (128, 512):
        # PyTorch's server looks up each peer's name in its event loop: minutes at 4,000 where DNS does not answer.
        yield f"{count} connections to first reply", "ms", 1, lambda port, _pid, n=count: run_load(port, "burst", n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeat", type=int, default=5, help="measurements of each load and server (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one measurement (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="measure only what matches (default: everything)")
    args = parser.parse_args()
    if not {SERVER_CPU, LOAD_CPU} <= os.sched_getaffinity(0):
        sys.exit("this benchmark needs two CPUs: one for the server, one for the load")
    build = ["cargo", "build", "--quiet", "--release", "--example", "store_load"]
    subprocess.run(build, cwd=ROOT, check=True)

    results = []

    def report(name: str, theirs: float, ours: float, unit: str, speed: float) -> None:
        print(f"{name:36} {theirs:>12,.1f} {ours:>12,.1f} {unit:4}  {speed:6.2f}", flush=True)
        results.append({"what": name, "unit": unit, "pytorch": theirs, "ours": ours, "better_by": speed})

    print(f"{'load (connections x in flight)':36} {'PyTorch':>12} {'ours':>12}       better by")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(name)) for name in SERVERS}
        for case in (case for case in CASES if re.search(args.only, str(case))):
            samples: dict[str, list[float]] = {name: [] for name in SERVERS}
            for _ in range(args.repeat):
                for name, (port, _pid) in servers.items():
                    samples[name].append(measure(case, port, args.seconds))
            ratio = statistics.median(a / b for a, b in zip(samples["ours"], samples["libuv"], strict=True))
            theirs, ours = (statistics.median(samples[name]) for name in ("libuv", "ours"))
            if case.one_cpu:
                report(str(case), 1e6 / theirs, 1e6 / ours, "us", ratio)
            else:
                report(str(case), theirs / 1000, ours / 1000, "k/s", ratio)
    # Afresh, since memory is measured too.
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(name)) for name in SERVERS}
        for what, unit, repeat, how in (other for other in others() if re.search(args.only, other[0])):
            samples = {name: [] for name in SERVERS}
            for _ in range(repeat):
                for name, (port, pid) in servers.items():
                    samples[name].append(how(port, pid))
            theirs, ours = (statistics.median(samples[name]) for name in ("libuv", "ours"))
            report(what, theirs, ours, unit, theirs / ours if ours else float("inf"))
    path = ROOT / "benches/results/store.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cpus": os.cpu_count(), "results": results}, indent=2) + "\n")
    print(f"medians; better by: their time or size to ours, our rate to theirs. Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
