"""Measure what it costs that somebody looks for hangs, while nothing hangs: `elastic-run` by turns with `--hang=off`.

    python benches/hang_cost.py [--quick] [--only rest|collectives|steps]

- `rest`: two workers make steps of 25 ms without torch. How often threads of the agent wake, and how many packets with
  data it sends. It hosts the coordinator, so heartbeats and their answers count as two.
- `collectives`: one process alone, whose flight recorder keeps 2,000 collectives or none, by turns.
- `steps`: two workers train with DDP and gloo, steps of about 25 ms: pairs of jobs by turns, and the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "hang_cost.json"
WORKERS = 2
STEP_S = 0.025
LIMIT_S = 120.0
MODES = ("report", "off")


def at_rest(folder: Path) -> None:
    """Make steps, until the job is ended."""
    import elastic_rs

    for number in itertools.count(1):
        elastic_rs.step(number)
        if number == 10:
            (folder / f"ready-{os.environ['RANK']}").touch()
        time.sleep(STEP_S)


def collectives(folder: Path, count: int) -> None:
    """Write the microseconds of a collective of a process group of one."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    tensor = torch.ones(8)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(count // 10):
            dist.all_reduce(tensor)
        times.append((time.perf_counter() - began) / (count // 10) * 1e6)
    (folder / "told").write_text(str(statistics.median(times)))


def steps(folder: Path, count: int) -> None:
    """Train, and write the seconds of each step after the first ones."""
    import elastic_rs
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, times = torch.randn(128, 512), []
    for number in range(1, count + 20):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        elastic_rs.step(number)
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "told").write_text(json.dumps(times[20:]))
    dist.barrier()


def command_of(mode: str, what: str, folder: Path, *rest: object) -> list[str]:
    flags = [f"--nproc-per-node={WORKERS}", f"--hang={mode}", "--shutdown-timeout=1"]
    script = [__file__, f"--worker={what}", f"--folder={folder}", *map(str, rest)]
    return [sys.executable, "-m", "elastic_rs.run", "--standalone", *flags, *script]


@contextlib.contextmanager
def resting(mode: str) -> Iterator[int]:
    """Start a job at rest, and yield its agent."""
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name:
        agent = subprocess.Popen(command_of(mode, "rest", Path(name)))
        try:
            until = time.monotonic() + LIMIT_S
            while len(list(Path(name).glob("ready-*"))) < WORKERS:
                if time.monotonic() > until:
                    sys.exit(f"error: no steps within {LIMIT_S:.0f} s")
                time.sleep(0.1)
            yield agent.pid
        finally:
            agent.terminate()
            agent.wait()


def wakes(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep by themselves."""
    statuses = [status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(
        int(found[1])
        for text in statuses
        if (found := re.search(r"^voluntary_ctxt_switches:\t(\d+)", text, re.MULTILINE))
    )


def sent(pid: int) -> int:
    """Return how many packets with data a process has sent on the TCP connections that it has."""
    shown = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout
    return sum(
        int(found[1])
        for line in shown.splitlines()
        if f"pid={pid}," in line and (found := re.search(r"data_segs_out:(\d+)", line))
    )


def measure_rest(seconds: float, repetitions: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(repetitions):
        for mode in MODES:
            with resting(mode) as pid:
                time.sleep(5)
                before = wakes(pid), sent(pid)
                time.sleep(seconds)
                after = wakes(pid), sent(pid)
            per_2s = 2 / seconds
            found[mode].append({"wakes": (after[0] - before[0]) * per_2s, "sends": (after[1] - before[1]) * per_2s})
    for mode, runs in found.items():
        wake, send = (statistics.median(run[name] for run in runs) for name in ("wakes", "sends"))
        print(
            f"at rest for {seconds:.0f} s, --hang={mode:<6} {wake:6.2f} wake-ups, {send:.2f} sends in 2 s", flush=True
        )
    return found


def measure_collectives(count: int, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"2000": [], "0": []}
    for _ in range(repetitions):
        for size, took in found.items():
            with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name:
                env = {**os.environ, "TORCH_FR_BUFFER_SIZE": size, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                script = [__file__, "--worker=collectives", f"--folder={name}", f"--count={count}"]
                subprocess.run([sys.executable, *script], env=env, check=True)
                took.append(float(Path(name, "told").read_text()))
    with_it, without = (statistics.median(took) for took in found.values())
    print(f"a collective alone: {with_it:.1f} us with the flight recorder, {without:.1f} us without (aimed at + 15)")
    return found


def measure_steps(count: int, pairs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for pair in range(pairs):
        for mode in MODES if pair % 2 == 0 else MODES[::-1]:
            with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name:
                env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                subprocess.run(command_of(mode, "steps", Path(name), f"--count={count}"), env=env, check=True)
                found[mode].append(statistics.median(json.loads(Path(name, "told").read_text())))
        report, off = (found[mode][-1] * 1e3 for mode in MODES)
        print(f"  pair {pair + 1}: {report:.1f} ms, with --hang=off {off:.1f} ms", flush=True)
    ratios = [report / off for report, off in zip(*found.values(), strict=True)]
    step_ms = statistics.median(found["off"]) * 1e3
    print(f"DDP, steps of {step_ms:.1f} ms: {statistics.median(ratios):.4f}, median of {pairs} ratios (aimed at 1.01)")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmark works")
    parser.add_argument("--only", choices=["rest", "collectives", "steps"])
    parser.add_argument("--seconds", type=float, help="length of each measurement at rest (300)")
    parser.add_argument("--pairs", type=int, help="pairs of DDP jobs (20)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "rest":
        at_rest(args.folder)
    if args.worker == "collectives":
        collectives(args.folder, args.count)
    if args.worker == "steps":
        steps(args.folder, args.count)
    if args.worker:
        return 0
    seconds = args.seconds or (20.0 if args.quick else 300.0)
    pairs = args.pairs or (2 if args.quick else 20)
    result: dict[str, Any] = {"machine": machine(), "load": [os.getloadavg()[0]]}
    if args.only in (None, "rest"):
        result["at rest, in 2 s"] = measure_rest(seconds, 1 if args.quick else 2)
    if args.only in (None, "collectives"):
        result["collective, us"] = measure_collectives(20_000, 2 if args.quick else 7)
    if args.only in (None, "steps"):
        result["median step, s"] = measure_steps(100, pairs)
    result["load"].append(os.getloadavg()[0])
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
