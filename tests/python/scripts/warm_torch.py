"""A worker that uses processes as training scripts do: warm_torch.py CRASHES (number of attempts that crash)."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(text: str) -> None:
    os.write(1, f"rank {RANK}, attempt {ATTEMPT}: {text}\n".encode())  # in one piece


@dataclass
class Doubled:
    """A result from another process, in which `__main__` may have another name."""

    value: int


def double(number: int) -> Doubled:
    return Doubled(2 * number)


def pool(method: str) -> list[int]:
    with multiprocessing.get_context(method).Pool(2) as workers:
        return [doubled.value for doubled in workers.map(double, range(4))]


def forked() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    say("warm" if "elastic_rs._warm._fork_server" in sys.modules else "cold")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 2) * (RANK + 1), torch.zeros(8, 1))
    # A loader forks its workers from this process, which has threads by now, as in any training script.
    for inputs, targets in DataLoader(data, batch_size=4, num_workers=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    weights = torch.cat([value.detach().flatten() for value in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(WORLD_SIZE)]
    dist.all_gather(others, weights)
    say(f"trained: {all(torch.equal(weights, other) for other in others)}")
    if int(sys.argv[1]) > ATTEMPT:
        dist.barrier()  # both have said so
        if RANK == WORLD_SIZE - 1:
            os._exit(3)
        dist.barrier()
    say(f"spawned: {pool('spawn')}, served: {pool('forkserver')}, forked: {forked()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
