"""Measure how soon another node's worker is told of a death: of a worker, which held so much memory, or of an agent.

    python benches/deaths.py [--kills 50] [--mib 100 1024 4096]
    python benches/deaths.py --agents [--kills 50]

A job of two nodes, each with one worker without torch. One worker touches its memory and gets SIGKILL; the time goes
from that to SIGTERM in the other node's worker. By turns with workers that report steps, whose deaths are known by
their mutex, with workers that do not use this package, whose deaths are known by their parent, and with torchrun.

With `--agents` the agent of the node gets SIGKILL that does not host the coordinator, and another is started in its
place. Agents of elastic-run are small, those of torchrun have imported torch. PyTorch's own agents are not in it: they
tell nobody of an agent's death until another one joins.
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
OUTPUT_OF_AGENTS = RESULTS / "deaths_of_agents.json"
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
AGENTS = {
    "elastic-run": ("elastic_rs.run", "rust-c10d", "none"),
    "torchrun with rust-c10d": ("torch.distributed.run", "rust-c10d", "none"),
}
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


class Job:
    """A job of two nodes."""

    def __init__(self, folder: Path, how: tuple[str, str, str], mib: int) -> None:
        self.folder, self.how, self.mib, self.port = folder, how, mib, free_port()
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, *flags: str) -> subprocess.Popen[bytes]:
        module, backend, kind = self.how
        command = [
            *(sys.executable, "-m", module, "--nnodes=2", "--max-restarts=100000", f"--rdzv-backend={backend}"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job", f"--local-addr=127.0.0.{number}", *flags),
            *(str(self.script), str(self.folder), str(self.mib), kind),
        ]
        with (self.folder / f"log-{number}").open("wb") as log:
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.agents[-1]


@contextmanager
def job(folder: Path, how: tuple[str, str, str], mib: int) -> Iterator[Job]:
    """Run a job of two nodes."""
    of_both = Job(folder, how, mib)
    try:
        yield of_both
    finally:
        for agent in of_both.agents:
            agent.terminate()
        for agent in of_both.agents:
            agent.wait(LIMIT_S)


def measured(way: str, mib: int, kills: int) -> list[float]:
    """Return the time from SIGKILL to SIGTERM in the other worker, in milliseconds."""
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name, job(folder := Path(name), WAYS[way], mib) as both:
        for number in (2, 3):
            both.start(number)
        for _ in range(kills):
            victim = int(awaited(folder / "ready-0"))
            awaited(folder / "ready-1")
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            found.append(1e3 * (float(awaited(folder / "told")) - killed))
    return found


def measured_of_agents(way: str, kills: int) -> list[float]:
    """Return the time from SIGKILL of an agent to SIGTERM in the other node's worker, in milliseconds."""
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name, job(folder := Path(name), AGENTS[way], 1) as both:
        is_host = "--rdzv-conf=rejoin_limit=0,is_host={}"
        both.start(2, is_host.format(1))
        for _ in range(kills):
            victim = both.start(3, is_host.format(0))
            for rank in (0, 1):
                awaited(folder / f"ready-{rank}")
            killed = time.monotonic()
            victim.kill()
            found.append(1e3 * (float(awaited(folder / "told")) - killed))
            both.agents.remove(victim)
            victim.wait(LIMIT_S)
    return found


def show(what: str, found: list[float]) -> None:
    p99 = sorted(found)[min(len(found) - 1, round(0.99 * len(found)))]
    print(f"{what}: median {statistics.median(found):.1f} ms, p99 {p99:.1f} ms", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of each way and size (50)")
    parser.add_argument("--agents", action="store_true", help="kill agents, and no workers")
    parser.add_argument("--mib", type=int, nargs="+", default=[100, 1024, 4096], help="memory of the killed worker")
    parser.add_argument("--ways", default=".*", help="which of the ways, as a regular expression: " + "; ".join(WAYS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    kept: dict[str, list[float]] = {}
    for way in AGENTS if args.agents else ():
        show(f"an agent of {way}", kept.setdefault(f"an agent of {way}", measured_of_agents(way, args.kills)))
    for mib in () if args.agents else args.mib:
        for way in filter(re.compile(args.ways).fullmatch, WAYS):
            found = kept[f"{way}, {mib} MiB"] = measured(way, mib, args.kills)
            show(f"{way}, {mib} MiB", found)
    output = args.output or (OUTPUT_OF_AGENTS if args.agents else OUTPUT)
    keep({"machine": machine(), "told_ms": kept}, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
