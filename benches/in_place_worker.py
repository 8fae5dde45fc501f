"""The worker of benches/in_place.py: trains a model of 100 MB on random data, as users' scripts do.

    in_place_worker.py PIPE MODE FOLDER EVERY

With MODE `plain` the state is a checkpoint that rank 0 writes every EVERY steps, and that all ranks load. With
`in-place` it is committed every EVERY steps. Each step, and each phase before the first step of a world, is told to
PIPE: a word, the time, rank, world, step, pid. All ranks have the same parameters when they are wrapped, so the wrap
does not broadcast them again (`init_sync=False`). HELD_MIB, if set: memory that each worker of the first world holds.
"""

import mmap
import os
import sys
import time
from pathlib import Path

PIPE, MODE, FOLDER, EVERY = os.open(sys.argv[1], os.O_WRONLY), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
CHECKPOINT = FOLDER / "checkpoint.pt"


def tell(what: str, step: int = 0) -> None:
    numbers = os.environ["RANK"], os.environ["WORLD_SIZE"], step, os.getpid()
    os.write(PIPE, f"{what} {time.monotonic_ns()} {' '.join(map(str, numbers))}\n".encode())


tell("began")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

tell("imported")

from in_place_model import MODEL, WIDTH  # noqa: E402


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=1e-3)
    tell("made")
    return MODEL, optimizer


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(1, WIDTH)).square().mean().backward()
    optimizer.step()


def plain() -> None:
    model, optimizer = make()
    dist.init_process_group("gloo")
    tell("grouped")
    step = 0
    if CHECKPOINT.exists():
        kept = torch.load(CHECKPOINT)
        model.load_state_dict(kept["model"])
        step = kept["step"]
    tell("world", step)
    wrapped = DistributedDataParallel(model, init_sync=False)
    tell("wrapped", step)
    while True:
        step_of(wrapped, optimizer)
        step += 1
        if step % EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, new := CHECKPOINT.with_suffix(".new"))
            new.replace(CHECKPOINT)
        tell("step", step)


def in_place() -> None:
    from elastic_rs import elastic

    class State(elastic.TorchState):
        def sync(self) -> None:
            tell("grouped", self.step)
            super().sync()

    def hold() -> mmap.mmap:
        memory = mmap.mmap(-1, int(os.environ["HELD_MIB"]) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1
        return memory

    held = []

    @elastic.run(backend="gloo")
    def train(state: State) -> None:
        if "HELD_MIB" in os.environ and state.step == 0 and not held:
            held.append(hold())
        tell("world", state.step)
        wrapped = DistributedDataParallel(state.model, init_sync=False)
        tell("wrapped", state.step)
        try:
            while True:
                step_of(wrapped, state.optimizer)
                state.step += 1
                tell("step", state.step)
                if state.step % EVERY == 0:
                    state.commit()
                else:
                    state.check_host_updates()
        finally:
            tell("stopped", state.step)

    model, optimizer = make()
    train(State(model=model, optimizer=optimizer, step=0))


{"plain": plain, "in-place": in_place}[MODE]()
