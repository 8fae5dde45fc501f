"""Ranks of gloo that hang: ``collectives.py KIND,KIND,…``, a kind for each rank. All make two collectives first."""

import ctypes
import os
import re
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


def enter() -> None:
    dist.all_reduce(torch.ones(8))


def sleep() -> None:
    time.sleep(3600)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def search() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def raise_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=[3600]).start()
    raise ValueError("the main thread ends")


def threads_of(process: int | str) -> list[str]:
    return sorted(comm.read_text().strip() for comm in Path(f"/proc/{process}/task").glob("*/comm"))


class Threads(Dataset[str]):
    """Where an item is made: the threads there."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return ",".join(threads_of("self"))


def load() -> None:
    for method in ("fork", "spawn", "forkserver"):
        (batch,) = DataLoader(Threads(), num_workers=1, multiprocessing_context=method)
        os.write(1, f"DATA WORKER {method}: {batch[0]}\n".encode())
    os.write(1, f"WORKER: {','.join(threads_of('self'))}\n".encode())
    sleep()


def main() -> None:
    kind = sys.argv[1].split(",")[int(os.environ["RANK"])]
    dist.init_process_group("gloo")
    for _ in range(2):
        dist.all_reduce(torch.ones(8))
    os.write(1, f"READY {os.environ['RANK']} {os.getpid()}\n".encode())
    globals()[kind]()


if __name__ == "__main__":
    main()
