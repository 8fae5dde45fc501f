"""Train on shards of data, each rank on its own. examples/demo_hang.py lets the file system of one shard die."""

import argparse
import time
from pathlib import Path

import elastic_rs
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


def load_batch(shard: Path) -> torch.Tensor:
    with shard.open("rb", buffering=0) as file:
        data = file.read(4 * WIDTH)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(1, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, help="folder with a file rank-R-shard-N for each shard of a rank")
    parser.add_argument("--steps", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--steps-per-shard", type=int, default=110, help="(default: %(default)s)")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(args.steps):
        if step % args.steps_per_shard == 0:
            batch = load_batch(args.shards / f"rank-{rank}-shard-{step // args.steps_per_shard}")
        time.sleep(0.1)  # as if the model were large
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        elastic_rs.step(step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
