"""Stands in a data worker, or in a ``recv`` that nobody answers: ``python with_torch.py HOW``."""

import os
import sys
import tempfile
import time

import torch
from stands import tell
from torch import distributed
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        tell()
        time.sleep(600)  # LINE loads
        return index


def receives(rank, folder, in_group):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(os.path.join(folder, "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        tell()
        if in_group:
            distributed.recv(torch.ones(1), group_src=1)
        else:
            distributed.recv(torch.ones(1), 1)
    time.sleep(600)


def main(how):
    if how == "loader":
        for _ in DataLoader(Shards(), num_workers=1):
            pass
    else:
        folder = tempfile.mkdtemp()
        rank = 0 if os.fork() == 0 else 1
        receives(rank, folder, how == "recv-in-group")


if __name__ == "__main__":
    main(sys.argv[1])
