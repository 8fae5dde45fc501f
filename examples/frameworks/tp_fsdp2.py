"""Tensor parallelism and FSDP2 on one mesh, whose workers live through a change of the world.

    elastic-run --nproc-per-node=4 --max-restarts=10 examples/frameworks/tp_fsdp2.py --folder checkpoints

Pairs of workers share each layer, and the copies of the pairs are sharded. It is ``fsdp2.py`` with a mesh of two
dimensions, so the number of workers is even.
"""

import argparse
import os
import time

import torch
from elastic_rs import elastic
from fsdp2 import last_checkpoint, load, parse_args, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    mesh = init_device_mesh("cpu", (elastic.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if state.checkpoint:
        load(state.checkpoint, model, optimizer)
    print(f"world {elastic.size()}  rank {elastic.rank()}  pid {os.getpid()}  from step {state.step}", flush=True)

    while state.step < args.steps:
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(state.step))
        part = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]  # both workers of a pair take the same
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
            save(state.checkpoint, model, optimizer)
            state.commit()
        time.sleep(args.pause)
    print(f"done  rank {elastic.rank()}  pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)
    checkpoint, step = last_checkpoint(args.folder)
    train(elastic.ObjectState(checkpoint=checkpoint, step=step), args)
