"""A loop with Hugging Face Accelerate whose workers live through a change of the world. The state is in memory.

    elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/accelerate_loop.py --folder checkpoints

It works with DistributedDataParallel. With FSDP or DeepSpeed, use their checkpoints.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from elastic_rs import elastic
from torch import nn


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with Accelerate, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for a checkpoint; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument("--commit-every", type=int, default=5, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


@elastic.run
def train(state: elastic.TorchState, args: argparse.Namespace) -> None:
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()  # or an Accelerator has the ranks of the last world
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(state.model)
    rank, size = accelerator.process_index, accelerator.num_processes
    print(f"world {size}  rank {rank}  pid {os.getpid()}  from step {state.step}", flush=True)

    while state.step < args.steps:
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(state.step))
        part = batch.chunk(size)[rank]
        state.optimizer.zero_grad()
        loss = (model(part) - part.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        state.optimizer.step()
        state.step += 1
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            print(f"step {state.step}  loss {mean:.9f}", flush=True)
        if state.step % args.commit_every == 0:
            state.commit()
        time.sleep(args.pause)
    if accelerator.is_main_process:
        args.folder.mkdir(parents=True, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), args.folder / "model.pt")
    print(f"done  rank {rank}  pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    train(elastic.TorchState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), step=0), args)
