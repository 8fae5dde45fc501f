"""DeepSpeed's ZeRO whose workers live through a change of the world: they load the last checkpoint.

elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/deepspeed_zero.py --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import groups
from elastic_rs import elastic
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_force_ds_cpu_optimizer": False,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with DeepSpeed's ZeRO, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    groups._WORLD_GROUP = None  # or DeepSpeed takes that of the last world
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if state.checkpoint:
        engine.load_checkpoint(str(args.folder), tag=state.checkpoint)
    rank, size = elastic.rank(), elastic.size()
    print(f"world {size}  rank {rank}  pid {os.getpid()}  from step {engine.global_steps}", flush=True)

    while engine.global_steps < args.steps:
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(engine.global_steps)).chunk(size)[rank]
        loss = (engine(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = elastic.allreduce(loss.detach()).item()
        if rank == 0:
            print(f"step {engine.global_steps}  loss {mean:.9f}", flush=True)
        if engine.global_steps % args.save_every == 0:
            state.checkpoint = f"step-{engine.global_steps}"
            engine.save_checkpoint(str(args.folder), tag=state.checkpoint)  # returns when all have written their parts
            state.commit()
        time.sleep(args.pause)
    print(f"done  rank {rank}  pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first, for CPUs
    latest = args.folder / "latest"  # of a job that was stopped as a whole
    train(elastic.ObjectState(checkpoint=latest.read_text() if latest.exists() else None), args)
