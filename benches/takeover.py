"""Measure how soon a job goes on when the agent that leads it is killed.

    python benches/takeover.py [--kills 50] [--nodes 4 2]

A job of so many nodes, the first of which (at most three) are the endpoints of its list. The agent that leads gets
SIGKILL; the time goes from that until the last of the other nodes has started its worker of the next world. The worker
imports nothing. Then the agent is started again, and joins. PyTorch has nothing to compare: its jobs end with node 0.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "takeover.json"
LIMIT_S = 120.0
LEADS = b"this process leads the run"
WORKER = """
import os, sys, time
with open(sys.argv[1], "w") as told:
    told.write(f"{time.monotonic_ns()} {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n")
while True:
    time.sleep(1)
"""


class Job:
    """A job whose workers say when they begin, through a pipe."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.unread = folder, count, b""
        self.endpoint = ",".join(f"127.0.0.1:{free_port()}" for _ in range(min(count, 3)))
        self.script, self.pipe = folder / "worker.py", folder / "pipe"
        self.script.write_text(WORKER)
        os.mkfifo(self.pipe)
        self.reader = os.open(self.pipe, os.O_RDWR)
        self.agents: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            self.agents.append(self.start(number))
            if number < 3:
                self.await_log(number, b"this process may lead the job")

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "elastic_rs.run", f"--nnodes=1:{self.count}", "--rdzv-backend=rust-c10d"),
            *(f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job", f"--local-addr=127.0.0.{number + 2}"),
            *("--rdzv-conf=last_call_timeout=1,rejoin_limit=0", str(self.script), str(self.pipe)),
        ]
        with self.log(number).open("wb") as log:
            return subprocess.Popen(command, env={**os.environ, "ELASTIC_RS_LOG": "info"}, stdout=log, stderr=log)

    def await_log(self, number: int, text: bytes) -> None:
        until = time.monotonic() + LIMIT_S
        while text not in self.log(number).read_bytes():
            if time.monotonic() > until:
                sys.exit(f"error: node {number} does not say `{text.decode()}`")
            time.sleep(0.01)

    def world(self, size: int) -> float:
        """Wait until all workers of a world of this size have begun. Return when the last of them has."""
        until, began = time.monotonic() + LIMIT_S, {}
        while len(began) < size:
            if not select.select([self.reader], [], [], max(0.0, until - time.monotonic()))[0]:
                logs = b"\n".join(self.log(number).read_bytes()[-2000:] for number in range(self.count))
                sys.exit(f"error: no world of {size} after {LIMIT_S:g} s\n{logs.decode(errors='replace')}")
            *lines, self.unread = (self.unread + os.read(self.reader, 1 << 16)).split(b"\n")
            for at, rank, world in (line.split() for line in lines):
                if int(world) == size:
                    began[int(rank)] = int(at) / 1e9
        return max(began.values())

    def leader(self) -> int:
        leads = [number for number in range(min(self.count, 3)) if LEADS in self.log(number).read_bytes()]
        return leads[0] if len(leads) == 1 else sys.exit(f"error: these nodes say that they lead: {leads}")

    def end(self) -> None:
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            agent.wait(LIMIT_S)
        os.close(self.reader)


def measured(count: int, kills: int) -> list[float]:
    """Return the times, in milliseconds."""
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        job = Job(Path(folder), count)
        try:
            job.world(count)
            for _ in range(kills):
                leader = job.leader()
                killed = time.monotonic()
                job.agents[leader].kill()
                found.append(1e3 * (job.world(count - 1) - killed))
                job.agents[leader].wait(LIMIT_S)
                job.agents[leader] = job.start(leader)
                job.world(count)
        finally:
            job.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills for each number of nodes (50)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 2], help="numbers of nodes (4 2)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    kept = {}
    for count in args.nodes:
        found = kept[str(count)] = measured(count, args.kills)
        p99 = sorted(found)[min(len(found) - 1, round(0.99 * len(found)))]
        print(f"{count} nodes: median {statistics.median(found):.0f} ms, p99 {p99:.0f} ms", flush=True)
    keep({"machine": machine(), "next_world_ms": kept}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
