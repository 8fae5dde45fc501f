"""FSDP2 whose workers live through a change of the world: they load the last checkpoint of DCP.

    elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/fsdp2.py --folder checkpoints

A worker that dies takes its shards with it, so the others go back to the last checkpoint. DCP loads it with another
number of workers too.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from elastic_rs import elastic
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a network that is sharded by FSDP2, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    # Everything that belongs to a world is made here, anew in each of them: mesh, shards, optimizer.
    mesh = init_device_mesh("cpu", (elastic.size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if state.checkpoint:
        load(state.checkpoint, model, optimizer)
    print(f"world {elastic.size()}  rank {elastic.rank()}  pid {os.getpid()}  from step {state.step}", flush=True)

    while state.step < args.steps:
        # The same batch of the same step in each attempt. A worker takes its part of it.
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(state.step))
        part = batch.chunk(elastic.size())[elastic.rank()]
        optimizer.zero_grad()
        loss = (model(part) - part.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        state.step += 1
        mean = elastic.allreduce(loss.detach()).item()
        if elastic.rank() == 0:
            print(f"step {state.step}  loss {mean:.9f}", flush=True)
        if state.step % args.save_every == 0:
            state.checkpoint = f"{args.folder}/step-{state.step}"
            save(state.checkpoint, model, optimizer)  # returns when the parts of all workers are written
            state.commit()
        time.sleep(args.pause)
    print(f"done  rank {elastic.rank()}  pid {os.getpid()}", flush=True)


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def last_checkpoint(folder: Path) -> tuple[str | None, int]:
    """Return the newest complete checkpoint and its step. DCP writes ``.metadata`` last."""
    steps = [int(file.parent.name.removeprefix("step-")) for file in folder.glob("step-*/.metadata")]
    return (str(folder / f"step-{max(steps)}"), max(steps)) if steps else (None, 0)


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    checkpoint, step = last_checkpoint(args.folder)  # of a job that was stopped as a whole
    train(elastic.ObjectState(checkpoint=checkpoint, step=step), args)
