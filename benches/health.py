"""Measure how soon a spare runs after the check of a machine has found it ill. Stock torchrun has no such check.

    python benches/health.py [--jobs 20]

Jobs of two nodes and a spare, each an elastic-run, with workers without torch. One worker is killed, and the check of
its machine, a command, says ill. The time goes from the command's end to the first line of the spare's worker.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "health.json"
LIMIT_S = 60.0
WORKER = """
import os, sys, time
from pathlib import Path
begun = Path(sys.argv[1], f"begun-{os.environ['NODE']}")
begun.with_suffix(".new").write_text(f"{time.time()} {os.getpid()}")
begun.with_suffix(".new").rename(begun)
time.sleep(600)
"""


def wait(what: str, until: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not until():
        if time.monotonic() > end:
            sys.exit(f"error: {what} has not happened within {LIMIT_S:g} s")
        time.sleep(0.005)


def job(folder: Path) -> float:
    """Return how long after the verdict the spare's worker has begun, in seconds."""
    script, ill = folder / "worker.py", folder / "ill"
    script.write_text(WORKER)
    port = free_port()
    check = f"test ! -e {ill} || {{ date +%s.%N > {folder}/verdict; exit 1; }}"
    agents: list[subprocess.Popen[bytes]] = []

    def start(number: int, *options: str) -> Path:
        host = f"127.0.0.{number}"
        command = [
            *(sys.executable, "-m", "elastic_rs.run", "--nnodes=2", "--max-restarts=3", f"--local-addr={host}"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", *options),
            *(str(script), str(folder)),
        ]
        with (folder / f"log-{number}").open("wb") as log:
            env = os.environ | {"NODE": str(number), "ELASTIC_RS_LOG": "info"}
            agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        return folder / f"begun-{number}"

    try:
        start(2)
        wait("the coordinator", lambda: "hosts the coordinator" in (folder / "log-2").read_text())
        bad = start(3, f"--health-check={check}")
        wait("the first round", bad.exists)
        spare = start(4)
        wait("the spare", lambda: "runs undisturbed" in (folder / "log-4").read_text())
        ill.touch()
        os.kill(int(bad.read_text().split()[1]), signal.SIGKILL)
        wait("the spare's worker", spare.exists)
        return float(spare.read_text().split()[0]) - float((folder / "verdict").read_text())
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, help="jobs that are measured (20)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    found = []
    for _ in range(args.jobs):
        with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
            found.append(job(Path(folder)))
    print(f"spare's worker after the verdict: median {statistics.median(found):.3f} s, most {max(found):.3f} s")
    keep({"machine": machine(), "spare_s": found}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
