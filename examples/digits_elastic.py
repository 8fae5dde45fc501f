"""Train a small network on handwritten digits. Workers may join, leave and be killed; the others keep their processes.

    elastic-run --nnodes=1:3 --nproc-per-node=2 --max-restarts=3 \\
        --rdzv-backend=rust-c10d --rdzv-endpoint=HOST:29400 --rdzv-id=digits examples/digits_elastic.py

It is ``digits_ddp.py`` with a state in memory. The function ``train`` is called again, in the same process, whenever
the set of workers has changed. It goes on in the middle of the epoch. A failure costs the steps since the last commit,
and a node that joins or leaves costs nothing. A checkpoint is only read when the whole job has been stopped.

It runs with any launcher, and with none (``python examples/digits_elastic.py``). Under PyTorch's agent a change
restarts all workers, which then begin with the checkpoint.

The data are the 1,797 images of 8x8 pixels that come with scikit-learn. Nothing is downloaded.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from elastic_rs import elastic
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

SEED = 2024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training on handwritten digits, in place.")
    parser.add_argument("--epochs", type=int, default=60, help="total (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=96, help="images per step, over all workers together (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument(
        "--commit-every", type=int, default=5, metavar="STEPS", help="what a failure can cost (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("digits_elastic.pt"),
        help="file to resume from and write (default: %(default)s)",
    )
    parser.add_argument(
        "--min-epoch-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="let an epoch take at least this long, to have time to watch (default: %(default)s)",
    )
    return parser.parse_args()


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set. The split is the same in every worker and in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0 ... 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=SEED)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def save_checkpoint(path: Path, state: elastic.TorchState) -> None:
    """Replace the checkpoint in one step. If the worker is killed meanwhile, the previous checkpoint is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    parts = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    torch.save({"epoch": state.epoch, **parts}, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer, and return the number of completed epochs: 0 without a checkpoint."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    return float((model(images).argmax(dim=1) == labels).float().mean())


@elastic.run  # calls it in each world, with a process group, and with the same state on all ranks
def train(
    state: elastic.TorchState, args: argparse.Namespace, train_data: TensorDataset, test_data: TensorDataset
) -> None:
    # What belongs to one process group is made here, anew in each world.
    model = DistributedDataParallel(state.model)
    # A step sees the same number of images with six workers as with two, and the learning rate fits every world.
    batch_size = max(1, args.batch_size // elastic.size())
    if elastic.rank() == 0:
        done = state.sampler.processed_num
        print(
            f"training from epoch {state.epoch + 1}, image {done}  world {elastic.size()}  pid {os.getpid()}",
            flush=True,
        )

    while state.epoch < args.epochs:
        started = time.monotonic()
        batches = DataLoader(train_data, batch_size=batch_size, sampler=state.sampler)
        pause_s = args.min_epoch_time * batch_size * elastic.size() / len(train_data)
        total = torch.zeros(2)  # sum of losses, number of images, since this world began or the epoch
        model.train()
        for number, (images, labels) in enumerate(batches):
            state.optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # the gradients of all workers are averaged here
            state.optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
            state.sampler.record_batch(number, batch_size)
            time.sleep(max(0.0, (number + 1) * pause_s - (time.monotonic() - started)))
            if (number + 1) % args.commit_every == 0:
                state.commit()
            else:
                state.check_host_updates()
        total = elastic.allreduce(total, op=elastic.Sum)

        state.epoch += 1
        state.sampler.set_epoch(state.epoch)  # another order of the images in each epoch
        if elastic.rank() == 0:
            save_checkpoint(args.checkpoint, state)
            print(
                f"epoch {state.epoch}/{args.epochs}  world {elastic.size()}  loss {total[0] / max(1, total[1]):.3f}  "
                f"test accuracy {accuracy(state.model, test_data):.3f}",
                flush=True,
            )
        state.commit()


@record  # a failure's traceback reaches the launcher's final report
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    torch.manual_seed(SEED)

    train_data, test_data = load_data()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # Every worker loads the checkpoint. One that joins a running job gets the present state from the others afterwards.
    epoch = load_checkpoint(args.checkpoint, model, optimizer)
    sampler = elastic.ElasticSampler(train_data, shuffle=True, seed=SEED)
    sampler.set_epoch(epoch)
    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=epoch)

    train(state, args, train_data, test_data)
    if elastic.rank() == 0:
        print(f"trained {state.epoch} epochs  test accuracy {accuracy(state.model, test_data):.3f}", flush=True)


if __name__ == "__main__":
    main()
