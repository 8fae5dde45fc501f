"""Measure how soon a rank that hangs is named and found, and what a look at a rank that holds the GIL takes.

    python benches/hang_times.py [--runs 3] [--kinds sleep,stop,...]

Two jobs for each run of a kind, of four ranks with gloo and steps of 0.2 s (tests/python/scripts/hangs_in_training.py).
Times begin when the last rank has made its last step, and end when `status` names the rank, or shows that it is a hang.
The first job has `--hang-timeout=5`. The second has none, so that only a finding that is certain comes soon.
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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_rs._elastic_rs import Observer
from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "hang_times.json"
TRAINS = Path(__file__).resolve().parents[1] / "tests/python/scripts/hangs_in_training.py"
RANKS, VICTIM = 4, 2
CERTAIN = ("stop", "ended", "uneven", "crossed")
UNCERTAIN = ("sleep", "gil", "loader", "busy")
NAMED_S, FOUND_S, FOUND_BY_TIMEOUT_S, LOOK_S = 3.6, 10.0, 6.5, 0.8
LIMIT_S = 60.0
LOOKS, LOOKS_SHARED_S = 20, 2.0
POLL_S = 0.02


class Job:
    """A job in which a rank hangs."""

    def __init__(self, folder: Path, kind: str, *options: str) -> None:
        self.log = folder / "log"
        self.port = free_port()
        # Of crossed groups only ranks 0 and 1 are members.
        self.victim = 1 if kind == "crossed" else VICTIM
        command = [
            *(sys.executable, "-m", "elastic_rs.run", "--nnodes=1", f"--nproc-per-node={RANKS}"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job", "--tee=3"),
            *(f"--log-dir={folder / 'logs'}", "--warm-start", "--shutdown-timeout=1", *options),
            *(str(TRAINS), kind, str(self.victim)),
        ]
        env = {
            **os.environ,
            "GO": str(folder / "go"),
            "STEP_S": "0.2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def lines(self, pattern: str, count: int) -> list[re.Match[str]]:
        """Wait for that many matches in what the job prints."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            text = self.log.read_text(errors="replace")
            found = list(re.finditer(pattern, text))
            if len(found) >= count:
                return found
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"error: no {count} lines like `{pattern}` within {LIMIT_S:.0f} s:\n{text[-3000:]}")
            time.sleep(POLL_S)

    def until_still(self) -> float:
        """Wait until the last rank has made its last step, and return when that was."""
        return max(float(match[1]) for match in self.lines(r"LAST \d ([\d.]+)", RANKS))

    def times(self, *, found: bool) -> dict[str, Any]:
        """Return how many seconds after the last step `status` names the rank, and shows a hang if wanted."""
        last, observer = self.until_still(), Observer.connect("127.0.0.1", self.port)
        times: dict[str, Any] = {}
        while True:
            if time.time() > last + LIMIT_S:
                sys.exit(f"error: not within {LIMIT_S:.0f} s:\n{self.log.read_text(errors='replace')[-3000:]}")
            _, state, *_ = observer.ask(state=True)
            hang = json.loads(state or "{}").get("hang")
            if hang and hang["ranks"] == [self.victim]:
                times.setdefault("named_s", time.time() - last)
                if not found:
                    return times
                if hang["found"]:
                    return {**times, "found_s": time.time() - last, "kind": hang["kind"]}
            time.sleep(POLL_S)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def job_of(kind: str, *options: str) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        job = Job(Path(folder), kind, *options)
        try:
            yield job
        finally:
            job.end()


def looks_at_a_held_gil() -> dict[str, Any]:
    """Return how long looks take, and the number of threads of the rank that holds the GIL, before and after."""
    with job_of("gil", "--hang-timeout=600") as job:
        pid = {match[1]: match[2] for match in job.lines(r"READY (\d) (\d+)", RANKS)}[str(job.victim)]
        job.until_still()
        time.sleep(LOOKS_SHARED_S)
        observer, took = Observer.connect("127.0.0.1", job.port), []
        before = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        for _ in range(LOOKS):
            began = time.monotonic()
            _, seen = observer.look(rank=job.victim)
            took.append(time.monotonic() - began)
            time.sleep(LOOKS_SHARED_S)
        view = json.loads(seen)["view"]
        frames = [frame["function"] for frame in view["frames"]]
        threads = [before, len(os.listdir(f"/proc/{pid}/task"))]  # noqa: PTH208
        return {"s": took, "threads": threads, "gil": view["gil"], "frames": frames}


def load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="jobs of each kind (3)")
    parser.add_argument("--kinds", help=f"measure only these: {', '.join([*CERTAIN, *UNCERTAIN])}")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else [*CERTAIN, *UNCERTAIN]
    result: dict[str, Any] = {"machine": machine(), "load": [load()], "kinds": {}}
    print(f"seconds after the last step, at most, of {args.runs}: named (aimed at {NAMED_S}); found, if it is certain")
    print(f"(aimed at {FOUND_S}); found with --hang-timeout=5 (aimed at {FOUND_BY_TIMEOUT_S})")
    for kind in kinds:
        runs: dict[str, list[dict[str, Any]]] = {"by itself": [], "by timeout": []}
        for _ in range(args.runs):
            with job_of(kind, "--hang-timeout=5") as job:
                runs["by timeout"].append(job.times(found=True))
            with job_of(kind) as job:
                runs["by itself"].append(job.times(found=kind in CERTAIN))
        named = max(run["named_s"] for both in runs.values() for run in both)
        certain = f"{max(run['found_s'] for run in runs['by itself']):.2f}" if kind in CERTAIN else "-"
        found = max(run["found_s"] for run in runs["by timeout"])
        said = {run["kind"] for both in runs.values() for run in both if "kind" in run}
        print(f"{kind:<8} {','.join(said):<12} {named:5.2f} {certain:>6} {found:6.2f}   load {load()}", flush=True)
        result["kinds"][kind] = runs
    result["held gil"] = held = looks_at_a_held_gil()
    median, most = statistics.median(held["s"]), max(held["s"])
    print(f"a look at a rank that holds the GIL: {median:.2f} s, at most {most:.2f} s of {LOOKS} (aimed at {LOOK_S})")
    print(f"its threads before and after: {held['threads']}; it is shown as {held['gil']}, in {held['frames'][:2]}")
    result["load"].append(load())
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
