"""Train with gloo until one rank hangs: ``hangs_in_training.py KIND RANK [STEP]``.

It goes on once the file GO exists, if it can.
"""

import contextlib
import ctypes
import itertools
import os
import pdb
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_rs
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

STEPS_BEFORE = 8
STEPS_AFTER = 60
STEP_S = float(os.environ.get("STEP_S", "0.1"))


def read_shard() -> None:
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)


def hang(kind: str) -> None:
    """Hang, in the kinds that do so between two collectives."""
    match kind:
        case "sleep" | "first_use" | "new_group" | "unreported":
            read_shard()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            ctypes.PyDLL(None).sleep(3600)
        case "re":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            os._exit(0)
        case "mismatch":
            dist.broadcast(torch.ones(7), src=0)
        case "uneven":
            dist.barrier()
        case "input":
            somebody_types()
            input()
        case "prints":
            for number in range(1, 61):
                os.write(1, f"reads shard {number}\n".encode())
                time.sleep(0.25)
            read_shard()
        case "pdb":
            somebody_types()
            pdb.set_trace()
        case "fifo":
            fifo = Path(os.environ["GO"]).with_name("fifo")
            os.mkfifo(fifo)
            fifo.read_text()
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # the second time
        case "thread":
            lock = threading.Lock()
            held = threading.Event()
            threading.Thread(target=hold, args=(lock, held), daemon=True).start()
            held.wait()
            lock.acquire()  # which the other thread holds
        case "busy":
            sum(1 for _ in itertools.count())
        case "full_pipe":
            os.write(os.pipe()[1], bytes(10_000_000))


def somebody_types() -> None:
    """Let standard input be a pipe into which nobody writes."""
    os.dup2(os.pipe()[0], 0)
    sys.stdin = open(0)  # noqa: SIM115 - until the end


def hold(lock: threading.Lock, held: threading.Event) -> None:
    with lock:
        held.set()
        read_shard()


class Batches(IterableDataset[int]):
    def __init__(self, kind: str, stops_at: int | None) -> None:
        self.kind, self.stops_at = kind, stops_at

    def __iter__(self) -> Iterator[int]:
        for number in range(10_000):
            if number == self.stops_at and self.kind == "loader":
                read_shard()
            if number == self.stops_at and self.kind == "loader_stopped":
                os.kill(os.getpid(), signal.SIGSTOP)  # only the data worker
            yield number


class Communication:
    """What the ranks send one another in a step, and the kinds that hang in it."""

    def __init__(self, kind: str, victim: int) -> None:
        self.kind = kind
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.source = (victim + 1) % self.ranks
        self.groups: list[Any] = [dist.new_group(ranks, group_desc=name) for name, ranks in self.members().items()]

    def members(self) -> dict[str, list[int]]:
        match self.kind:
            case "crossed":
                return {"a": [0, 1], "b": [0, 1]}
            case "first_use":
                return {"late": [0, 1, 2]}
            case "tp_dp":
                return {"tp0": [0, 1], "tp1": [2, 3], "dp0": [0, 2], "dp1": [1, 3]}
        return {}

    def step(self, number: int, *, is_last: bool, hangs: bool) -> None:
        """Take part in a step. After the last one something hangs: for this rank, or for those that wait for it."""
        match self.kind:
            case "order" if hangs:
                dist.broadcast(torch.ones(7), self.source)  # too early
                dist.all_reduce(torch.ones(3))
            case "order":
                dist.all_reduce(torch.ones(3))
                dist.broadcast(torch.ones(7), self.source)
            case "operation" if hangs:
                dist.broadcast(torch.ones(3), self.source)  # not all_reduce
            case "size" if hangs:
                dist.all_reduce(torch.ones(2))  # not 3
            case "swallowed":
                with contextlib.suppress(OSError):
                    if hangs:
                        raise OSError("the disk is full")
                    dist.all_reduce(torch.ones(3))
                dist.all_reduce(torch.ones(5))  # whatever was raised
            case "tp_dp":
                tensor, data = self.groups[self.rank // 2], self.groups[2 + self.rank % 2]
                dist.all_reduce(torch.ones(8), group=tensor)
                if hangs:
                    read_shard()
                dist.all_reduce(torch.ones(9), group=tensor)
                dist.all_reduce(torch.ones(7), group=data)
            case "messages":
                if self.rank > 0:
                    dist.recv(torch.empty(4), self.rank - 1)
                if hangs:
                    read_shard()
                if self.rank + 1 < self.ranks:
                    dist.send(torch.ones(4), self.rank + 1)
                if number % 5 == 0:
                    dist.all_reduce(torch.ones(3))
            case _:
                if self.kind == "crossed" and self.rank < 2:
                    for group in reversed(self.groups) if hangs else self.groups:
                        dist.all_reduce(torch.ones(2), group=group)  # in either order
                if self.kind == "first_use" and is_last and self.rank < 3:
                    dist.all_reduce(torch.ones(2), group=self.groups[0])
                if self.kind == "new_group" and is_last:
                    dist.new_group()
                dist.all_reduce(torch.ones(3))


def main() -> None:
    kind, victim, *step = sys.argv[1:]
    last = int(step[0]) if step else STEPS_BEFORE
    # Before the process group: torch._dynamo, which it imports, would keep that until Python ends, and a thread of gloo
    # that lets go of the last tensor then aborts the process (torch 2.15, github.com/pytorch/pytorch/issues/190489).
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_victim = rank == int(victim)
    os.write(1, f"READY {rank} {os.getpid()}\n".encode())
    communication = Communication(kind, int(victim))
    loads = kind.startswith("loader")
    batches = iter(DataLoader(Batches(kind, last if is_victim else None), batch_size=None, num_workers=int(loads)))
    for number in range(1, 10_000):
        if loads:
            next(batches)
        hangs = number == last and is_victim
        if hangs and kind == "ended":
            threading.Thread(target=read_shard).start()
            return
        if hangs:
            hang(kind)
        time.sleep(STEP_S)
        communication.step(number, is_last=number == last, hangs=hangs)
        if kind == "unreported":
            optimizer.step()
        else:
            elastic_rs.step(number)
        if number == last - 1:
            os.write(1, f"LAST {rank} {time.time()}\n".encode())
        if Path(os.environ["GO"]).exists() and number > last + STEPS_AFTER:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
