"""The worker of benches/in_place.py: trains a model of 100 MB on random data, as users' scripts do.

    in_place_worker.py PIPE MODE FOLDER EVERY

With MODE `plain` the state is a checkpoint that rank 0 writes every EVERY steps, and that all ranks load. With
`in-place` it is committed every EVERY steps. Each step is told to PIPE: a word, the time, rank, world, step, pid.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PIPE, MODE, FOLDER, EVERY = os.open(sys.argv[1], os.O_WRONLY), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
CHECKPOINT = FOLDER / "checkpoint.pt"
WIDTH = 2500  # four layers of it are 25 million parameters, 100 MB


def tell(what: str, step: int) -> None:
    numbers = dist.get_rank(), dist.get_world_size(), step, os.getpid()
    os.write(PIPE, f"{what} {time.monotonic_ns()} {' '.join(map(str, numbers))}\n".encode())


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(1, WIDTH)).square().mean().backward()
    optimizer.step()


def plain() -> None:
    dist.init_process_group("gloo")
    model, optimizer = make()
    step = 0
    if CHECKPOINT.exists():
        kept = torch.load(CHECKPOINT)
        model.load_state_dict(kept["model"])
        step = kept["step"]
    tell("world", step)
    wrapped = DistributedDataParallel(model)
    while True:
        step_of(wrapped, optimizer)
        step += 1
        if step % EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, new := CHECKPOINT.with_suffix(".new"))
            new.replace(CHECKPOINT)
        tell("step", step)


def in_place() -> None:
    from elastic_rs import elastic

    @elastic.run(backend="gloo")
    def train(state: elastic.TorchState) -> None:
        tell("world", state.step)
        wrapped = DistributedDataParallel(state.model)
        while True:
            step_of(wrapped, state.optimizer)
            state.step += 1
            tell("step", state.step)
            if state.step % EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()

    model, optimizer = make()
    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))


{"plain": plain, "in-place": in_place}[MODE]()
