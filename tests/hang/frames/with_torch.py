"""Stands in a data worker, or in a ``recv`` that nobody answers: ``python with_torch.py HOW``."""

import os
import sys
import time

import torch
from stands import tell
from torch import distributed
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        tell()
        time.sleep(600)  # LINE loads
        return index


def receives(rank: int, port: int, *, in_group: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.TCPStore("localhost", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        tell()
        if in_group:
            distributed.recv(torch.ones(1), group_src=1)
        else:
            distributed.recv(torch.ones(1), 1)
    time.sleep(600)


def main(how: str) -> None:
    if how == "loader":
        for _ in DataLoader(Shards(), num_workers=1):
            pass
    else:
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        rank = 0 if os.fork() == 0 else 1
        receives(rank, store.port, in_group=how == "recv-in-group")


if __name__ == "__main__":
    main(sys.argv[1])
