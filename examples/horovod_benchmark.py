"""Measure how many images a second workers train, as Horovod Elastic's synthetic benchmark does: a ported script.

    elastic-run -H localhost:2 --max-restarts=3 examples/horovod_benchmark.py

The state has no sampler here: the data are the same random batch again and again, and ``batch`` says how far it is.
"""

import argparse
import os
import time
from pathlib import Path

import elastic_rs.elastic as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A ported script of Horovod Elastic's: a benchmark without data.")
    parser.add_argument("--batches", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker (default: %(default)s)")
    parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES", help="(default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each batch, to watch")
    parser.add_argument(
        "--nan-at", type=int, metavar="BATCH", help="the loss of that batch is NaN once, to see what happens"
    )
    parser.add_argument("--until", type=Path, metavar="FILE", help="end at the commit after the file appears")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pictures, labels = torch.randn(args.batch_size, 512, device=device), torch.arange(args.batch_size, device=device)
    is_nan_still_to_come = args.nan_at is not None

    @hvd.elastic.run
    def benchmark(state: hvd.TorchState) -> None:
        nonlocal is_nan_still_to_come
        wrap = DistributedDataParallel(state.model)
        world = f"world of {hvd.size()}, rank {hvd.rank()}, pid {os.getpid()}"
        print(f"{world}: batch {state.batch}", flush=True)
        began, first = time.monotonic(), state.batch
        while state.batch < args.batches:
            optimizer.zero_grad()
            loss = cross_entropy(wrap(pictures), labels)
            if is_nan_still_to_come and state.batch == args.nan_at:
                is_nan_still_to_come = False
                loss = loss * float("nan")
            if not torch.isfinite(loss):
                raise hvd.HorovodInternalError(f"the loss of batch {state.batch} is {loss.item()}")
            loss.backward()
            optimizer.step()
            state.batch += 1
            time.sleep(args.pause)
            if state.batch % args.commit_every:
                state.check_host_updates()
                continue
            seen = args.until is not None and args.until.exists()
            if hvd.allreduce(torch.tensor(float(seen)), op=hvd.Max).item():
                state.batch = args.batches
            state.commit()
        rate = torch.tensor(args.batch_size * (state.batch - first) / max(time.monotonic() - began, 1e-9))
        rate = hvd.allreduce(rate, op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"done: {rate.item():.0f} images/s with {hvd.size()} workers on {device.type}", flush=True)

    benchmark(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))


if __name__ == "__main__":
    main()
