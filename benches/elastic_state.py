"""Measure what a `TorchState` costs a step: `commit()` of a model of 100 MB beside a memcpy, and a check.

    python benches/elastic_state.py [--repetitions 30]

One process and one thread. A repetition copies as many bytes from one array to another (`memmove`), and then commits,
so that both meet the same machine. The arrays and the state's buffers exist before.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import time
import timeit
from collections.abc import Callable

import torch
from elastic_rs import elastic
from measuring import RESULTS, keep, machine
from torch import nn

OUTPUT = RESULTS / "elastic_state.json"
LAYERS, WIDTH = 25, 1000  # 4 MB each
CHECKS = 200_000


def timed_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    state = elastic.TorchState(model=model, step=0)
    state.commit()
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    copies, commits, ratios = [], [], []
    for _ in range(args.repetitions):
        copies.append(timed_s(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)))
        commits.append(timed_s(state.commit))
        ratios.append(commits[-1] / copies[-1])
    check_s = min(timeit.repeat(state.check_host_updates, number=CHECKS, repeat=5)) / CHECKS

    result = {
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megabytes": nbytes / 1e6,
        "repetitions": args.repetitions,
        "memcpy_ms": statistics.median(copies) * 1e3,
        "commit_ms": statistics.median(commits) * 1e3,
        "commit_per_memcpy": statistics.median(ratios),
        "check_without_agent_ns": check_s * 1e9,
    }
    for name, value in result.items():
        print(f"{name:24} {value}")
    keep(result, OUTPUT)


if __name__ == "__main__":
    main()
