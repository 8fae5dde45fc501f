"""Train a network on images, as scripts for Horovod Elastic do: what such a script looks like when it is ported.

    elastic-run -H localhost:2 --max-restarts=3 examples/horovod_images.py

The names are Horovod's, as far as they exist here (docs/horovod.md). What differs: ``DistributedDataParallel`` inside
``train`` takes the place of ``DistributedOptimizer``, and the learning rate's scheduler is in the state.

The images are drawn at random around ten patterns, so nothing is downloaded.
"""

import argparse
import os
import time
from pathlib import Path

import elastic_rs.elastic as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE = 10, 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A ported script of Horovod Elastic's: images.")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--images", type=int, default=2000, help="of an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=20, help="of each worker (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="for one worker (default: %(default)s)")
    parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES", help="(default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each batch, to watch")
    parser.add_argument(
        "--nan-at", type=int, metavar="BATCH", help="the loss of that batch is NaN once, to see what happens"
    )
    parser.add_argument("--until", type=Path, metavar="FILE", help="end after the epoch in which the file appears")
    return parser.parse_args()


def images(count: int, seed: int) -> TensorDataset:
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(count, 1, SIDE, SIDE, generator=generator), labels)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.LazyLinear(32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def mean(value: Tensor) -> float:
    """Return the average over all workers."""
    return float(hvd.allreduce(value, name="mean"))


def test(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    pictures, labels = data[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        return mean((model(pictures).argmax(1) == labels).float().mean())


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    data, test_data = images(args.images, 2), images(500, 3)
    model = network()
    model(data[0][0].unsqueeze(0))  # makes the lazy layer
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    is_nan_still_to_come = args.nan_at is not None

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    def loss_of(wrap: nn.Module, pictures: Tensor, labels: Tensor, batch: int) -> Tensor:
        nonlocal is_nan_still_to_come
        loss = cross_entropy(wrap(pictures), labels)
        if is_nan_still_to_come and batch == args.nan_at:
            is_nan_still_to_come = False
            loss = loss * float("nan")
        return loss

    @hvd.elastic.run
    def train(state: hvd.TorchState) -> None:
        scale_learning_rate()
        wrap = DistributedDataParallel(state.model)  # was DistributedOptimizer
        world = f"world of {hvd.size()}, rank {hvd.rank()}, pid {os.getpid()}"
        print(
            f"{world}: epoch {state.epoch}, batch {state.batch}, {state.sampler.processed_num} images done", flush=True
        )
        while state.epoch < args.epochs:
            state.model.train()
            for number, (pictures, labels) in enumerate(DataLoader(data, args.batch_size, sampler=state.sampler)):
                optimizer.zero_grad()
                loss = loss_of(wrap, pictures, labels, state.batch)
                if not torch.isfinite(loss):
                    raise hvd.HorovodInternalError(f"the loss of batch {state.batch} is {loss.item()}")
                loss.backward()
                nn.utils.clip_grad_norm_(state.model.parameters(), 10.0)
                optimizer.step()
                state.sampler.record_batch(number, args.batch_size)
                state.batch += 1
                time.sleep(args.pause)
                if state.batch % args.commit_every == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            accuracy = test(state.model, test_data)
            ends = args.until is not None and mean(torch.tensor(float(args.until.exists()))) > 0
            if hvd.rank() == 0:
                print(
                    f"epoch {state.epoch} of {args.epochs}: accuracy {accuracy:.3f}, world of {hvd.size()}", flush=True
                )
            state.epoch = args.epochs if ends else state.epoch + 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(data), epoch=0, batch=0
    )
    state.register_reset_callbacks([scale_learning_rate])
    train(state)
    if hvd.rank() == 0:
        print(f"done after {state.batch} batches", flush=True)


if __name__ == "__main__":
    main()
