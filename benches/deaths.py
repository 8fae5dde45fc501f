"""Measure how soon another node's worker is told of a worker's death, which held so much memory.

    python benches/deaths.py [--kills 50] [--mib 100 1024 4096]

A job of two nodes, each with one worker without torch. One worker touches its memory and gets SIGKILL; the time goes
from that to SIGTERM in the other node's worker. By turns with workers that report steps, whose deaths are known by
their mutex, with workers that do not use this package, whose deaths are known by their parent, and with torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "deaths.json"
LIMIT_S = 120.0
WORKER = """
import mmap, os, signal, sys, time
from pathlib import Path
folder, mib, reports = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "steps"
if reports:
    import elastic_rs
    elastic_rs.step()
held = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if os.environ["RANK"] == "0" else b""
for at in range(0, len(held), 4096):
    held[at] = 1
def ended(*_):
    now = time.monotonic()
    (folder / "told").write_text(str(now))
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
ready = folder / f"ready-{os.environ['RANK']}"
ready.with_suffix(".new").write_text(f"{os.getpid()}")
ready.with_suffix(".new").rename(ready)
while True:
    time.sleep(1)
"""
WAYS = {
    "elastic-run, steps": ("elastic_rs.run", "rust-c10d", "steps"),
    "elastic-run": ("elastic_rs.run", "rust-c10d", "none"),
    "torchrun": ("torch.distributed.run", "c10d", "none"),
}


def awaited(path: Path) -> str:
    """Return what a worker has written into this file."""
    until = time.monotonic() + LIMIT_S
    while not (path.exists() and (text := path.read_text())):
        if time.monotonic() > until:
            sys.exit(f"error: no {path.name} after {LIMIT_S:g} s")
        time.sleep(0.002)
    path.unlink()
    return text


@contextmanager
def job(folder: Path, way: str, mib: int) -> Iterator[None]:
    """Run a job of two nodes."""
    module, backend, kind = WAYS[way]
    script = folder / "worker.py"
    script.write_text(WORKER)
    port = free_port()
    agents = []
    for number in (2, 3):
        command = [
            *(sys.executable, "-m", module, "--nnodes=2", "--max-restarts=100000", f"--rdzv-backend={backend}"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", f"--local-addr=127.0.0.{number}"),
            *(str(script), str(folder), str(mib), kind),
        ]
        with (folder / f"log-{number}").open("wb") as log:
            agents.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        yield
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(LIMIT_S)


def measured(way: str, mib: int, kills: int) -> list[float]:
    """Return the time from SIGKILL to SIGTERM in the other worker, in milliseconds."""
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name, job(folder := Path(name), way, mib):
        for _ in range(kills):
            victim = int(awaited(folder / "ready-0"))
            awaited(folder / "ready-1")
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            found.append(1e3 * (float(awaited(folder / "told")) - killed))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of each way and size (50)")
    parser.add_argument("--mib", type=int, nargs="+", default=[100, 1024, 4096], help="memory of the killed worker")
    parser.add_argument("--ways", default=".*", help="which of the ways, as a regular expression: " + "; ".join(WAYS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    kept: dict[str, list[float]] = {}
    for mib in args.mib:
        for way in filter(re.compile(args.ways).fullmatch, WAYS):
            found = kept[f"{way}, {mib} MiB"] = measured(way, mib, args.kills)
            p99 = sorted(found)[min(len(found) - 1, round(0.99 * len(found)))]
            print(f"{way}, {mib} MiB: median {statistics.median(found):.1f} ms, p99 {p99:.1f} ms", flush=True)
    keep({"machine": machine(), "told_ms": kept}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
