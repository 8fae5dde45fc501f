"""Train with gloo until one rank hangs: ``hangs_in_training.py KIND RANK``. Once the file GO exists, it may go on."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import elastic_rs
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

STEPS_BEFORE = 8
STEPS_AFTER = 60
STEP_S = 0.1


class Batches(IterableDataset[int]):
    def __init__(self, stops_at: int | None) -> None:
        self.stops_at = stops_at

    def __iter__(self) -> Iterator[int]:
        for number in range(10_000):
            if number == self.stops_at:
                read_shard()
            yield number


def read_shard() -> None:
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)


def hang(kind: str) -> None:
    match kind:
        case "sleep":
            read_shard()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            ctypes.PyDLL(None).sleep(3600)
        case "exit":
            os._exit(0)
        case "mismatch":
            dist.broadcast(torch.ones(7), src=0)
        case "input":
            input()
        case "prints":
            for number in range(1, 61):
                print(f"reads shard {number}", flush=True)
                time.sleep(0.25)
            read_shard()


def main() -> None:
    kind, victim = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"READY {rank} {os.getpid()}", flush=True)
    stops_at = STEPS_BEFORE if kind == "loader" and rank == victim else None
    batches = iter(DataLoader(Batches(stops_at), batch_size=None, num_workers=int(kind == "loader")))
    for number in range(1, 10_000):
        if kind == "loader":
            next(batches)
        if number == STEPS_BEFORE and rank == victim:
            hang(kind)
        time.sleep(STEP_S)
        dist.all_reduce(torch.ones(3))
        elastic_rs.step(number)
        if Path(os.environ["GO"]).exists() and number > STEPS_BEFORE + STEPS_AFTER:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
