"""Lightning Fabric whose workers live through a change of the world: they load the last checkpoint.

elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/fabric_loop.py --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path

import torch
from elastic_rs import elastic
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with Lightning Fabric, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=devices, num_nodes=nodes)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    bare = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))
    data = TensorDataset(torch.rand(512, 8, generator=torch.Generator().manual_seed(0)))
    batches = list(fabric.setup_dataloaders(DataLoader(data, batch_size=12)))
    step = 0
    if state.checkpoint:
        step = fabric.load(state.checkpoint, {"model": model, "optimizer": optimizer})["step"]
    print(f"world {fabric.world_size}  rank {fabric.global_rank}  pid {os.getpid()}  from step {step}", flush=True)

    while step < args.steps:
        (batch,) = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        step += 1
        if fabric.global_rank == 0:
            print(f"step {step}  loss {loss.item():.9f}", flush=True)
        if step % args.save_every == 0:
            state.checkpoint = f"{args.folder}/step-{step}.ckpt"
            fabric.save(state.checkpoint, {"model": model, "optimizer": optimizer, "step": step})
            fabric.barrier()  # rank 0 has written it
            state.commit()
        time.sleep(args.pause)
    print(f"done  rank {fabric.global_rank}  pid {os.getpid()}", flush=True)


def last_checkpoint(folder: Path) -> str | None:
    steps = [int(file.stem.removeprefix("step-")) for file in folder.glob("step-*.ckpt")]
    return str(folder / f"step-{max(steps)}.ckpt") if steps else None


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    train(elastic.ObjectState(checkpoint=last_checkpoint(args.folder)), args)  # of a job that was stopped as a whole
