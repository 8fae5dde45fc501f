"""Count how often the one rank of eight that sleeps inside a step is named, by `status`, with its line.

    python benches/hang_asleep.py [--sleeps 50] [--seed 7]

One job with gloo and steps of 0.1 s, in which a random rank sleeps at one of three random lines, again and again. A
sleep ends when `status` has named somebody: what it says first counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import RESULTS, free_port, keep, machine

OUTPUT = RESULTS / "hang_asleep.json"
RANKS, STEPS_BETWEEN, STEP_S, POLL_S, LIMIT_S = 8, 8, 0.1, 0.02, 120.0


def cases(seed: int, count: int) -> list[tuple[int, str]]:
    """Return who sleeps, and where."""
    chance = random.Random(seed)
    return [(chance.randrange(RANKS), chance.choice(list(PLACES))) for _ in range(count)]


def loads(sleeps: Path) -> None:
    until_gone(sleeps)


def computes(sleeps: Path) -> None:
    until_gone(sleeps)


def saves(sleeps: Path) -> None:
    until_gone(sleeps)


PLACES = {place.__name__: place for place in (loads, computes, saves)}
"""Where a rank sleeps: `status` must show the function."""


def until_gone(sleeps: Path) -> None:
    while sleeps.exists():
        time.sleep(0.05)


def train(folder: Path, seed: int, count: int) -> None:
    """Make steps, and sleep in some of them for as long as a file is there."""
    import elastic_rs
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    # After the last sleep the others must still wait for somebody.
    for number, (rank, place) in enumerate([*cases(seed, count), (None, "")]):
        for step in range(STEPS_BETWEEN):
            time.sleep(STEP_S)
            dist.all_reduce(torch.ones(3))
            elastic_rs.step(number * STEPS_BETWEEN + step)
        if dist.get_rank() == rank:
            sleeps = folder / f"sleeps-{number}"
            sleeps.touch()
            PLACES[place](sleeps)
    dist.destroy_process_group()


def first_named(observer: Any) -> dict[str, Any]:
    """Return what `status` says first of a standstill."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        _, state, *_ = observer.ask(state=True)
        if hang := json.loads(state or "{}").get("hang"):
            found: dict[str, Any] = hang
            return found
        time.sleep(POLL_S)
    sys.exit(f"error: nobody was named within {LIMIT_S:.0f} s")


def measure(folder: Path, seed: int, count: int) -> list[dict[str, Any]]:
    from elastic_rs._elastic_rs import Observer

    port = free_port()
    command = [
        *(sys.executable, "-m", "elastic_rs.run", "--nnodes=1", f"--nproc-per-node={RANKS}"),
        *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--warm-start"),
        *(__file__, f"--folder={folder}", f"--seed={seed}", f"--sleeps={count}"),
    ]
    agent = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    told = []
    try:
        for number, (rank, place) in enumerate(cases(seed, count)):
            sleeps, until = folder / f"sleeps-{number}", time.monotonic() + LIMIT_S
            while not sleeps.exists():
                if time.monotonic() > until or agent.poll() is not None:
                    sys.exit(f"error: sleep {number} has not begun within {LIMIT_S:.0f} s")
                time.sleep(POLL_S)
            observer = Observer.connect("127.0.0.1", port)
            hang = first_named(observer)
            took = time.time() - sleeps.stat().st_mtime
            is_right = hang["ranks"] == [rank] and any(place in line for line in hang["lines"])
            told.append({"rank": rank, "place": place, "is_right": is_right, "s": took, "lines": hang["lines"]})
            if not is_right:
                print(f"rank {rank} in {place}, and status says: {hang['lines']}", flush=True)
            sleeps.unlink()
            while json.loads(observer.ask(state=True)[1] or "{}").get("hang"):
                time.sleep(POLL_S)
        agent.wait(LIMIT_S)
    finally:
        agent.kill()
        agent.wait()
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleeps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        train(args.folder, args.seed, args.sleeps)
        return 0
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        told = measure(Path(folder), args.seed, args.sleeps)
    load.append(os.getloadavg()[0])
    times = sorted(one["s"] for one in told)
    print(
        f"{sum(one['is_right'] for one in told)} of {len(told)} named rightly, after {times[len(times) // 2]:.2f} s, "
        f"at most {times[-1]:.2f} s; load {load[0]:.0f} to {load[1]:.0f}"
    )
    keep({"machine": machine(), "load": load, "told": told}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
