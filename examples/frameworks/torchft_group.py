"""A replica group of torchft, which elastic-run starts, and starts again. Each group is a job of its own.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 3000 --bind node0:29510    # once
    TORCHFT_LIGHTHOUSE=http://node0:29510 REPLICA_GROUP_ID=0 elastic-run --standalone --nproc-per-node=1 \\
        --max-restarts=10 examples/frameworks/torchft_group.py    # on each node, with another REPLICA_GROUP_ID

If a worker dies, the other groups train on without its group. It is started again, and gets their weights.
"""

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

LIMIT = timedelta(seconds=30)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network in replica groups of torchft.")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    group = os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=load,
        min_replica_size=1,
        replica_id=f"group_{group}",
        timeout=LIMIT,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    print(f"group {group}  pid {os.getpid()}", flush=True)
    while manager.current_step() < args.steps:
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(manager.current_step()))
        optimizer.zero_grad()
        loss = (wrapped(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        step, groups = manager.current_step(), manager.num_participants()
        print(f"group {group}  step {step}  groups {groups}  loss {loss.item():.9f}", flush=True)
        time.sleep(args.pause)
    manager.shutdown()
    print(f"done  group {group}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # many workers share the cores of one machine
    main(parse_args())
