"""Train a small network on handwritten digits. Workers may join, leave and be killed while it runs.

    torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=3 \\
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=digits examples/digits_ddp.py

Whenever the set of workers changes, torchrun stops all of them and starts this script again. So the script does what
every elastic script does: it reads its rank from the environment, and loads the last checkpoint if there is one. Rank 0
writes a checkpoint after each epoch. All nodes must see the checkpoint's folder.

The data are the 1,797 images of 8x8 pixels that come with scikit-learn. Nothing is downloaded.
"""

import argparse
import time
from pathlib import Path

import elastic_rs
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 2024


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training on handwritten digits.")
    parser.add_argument(
        "--epochs", type=int, default=60, help="total, counted over all restarts (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=96, help="images per step, over all workers together (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("digits.pt"),
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


def save_checkpoint(path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint in one step. If the worker is killed meanwhile, the previous checkpoint is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer, and return the number of completed epochs: 0 without a checkpoint."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


def train_epoch(
    model: nn.Module, batches: DataLoader[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer, steps: int
) -> float:
    """Train for one epoch after so many steps, and return the mean loss over all workers."""
    model.train()
    total = torch.zeros(2)  # sum of losses, number of images
    for step, (images, labels) in enumerate(batches, steps + 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # the gradients of all workers are averaged here
        optimizer.step()
        elastic_rs.step(step)  # so that `elastic-rs why` knows what was made again
        total += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    return float((model(images).argmax(dim=1) == labels).float().mean())


@record  # a failure's traceback reaches torchrun's final report
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    torch.manual_seed(SEED)  # every worker begins with the same weights

    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, test_data = load_data()
    # The sampler distributes the images to the workers. The batch is divided among them, so that a step sees the same
    # number of images with six workers as with two, and the learning rate fits every world.
    sampler = DistributedSampler(train_data, shuffle=True, seed=SEED)
    batches = DataLoader(train_data, batch_size=max(1, args.batch_size // world_size), sampler=sampler)

    done = load_checkpoint(args.checkpoint, model, optimizer)
    ddp_model = DistributedDataParallel(model)
    if rank == 0:
        origin = f"resumed after epoch {done} from {args.checkpoint}" if done else "starting with new weights"
        print(f"{origin}  world {world_size}", flush=True)

    for epoch in range(done + 1, args.epochs + 1):
        started = time.monotonic()
        sampler.set_epoch(epoch)  # another order of the images in each epoch
        loss = train_epoch(ddp_model, batches, optimizer, (epoch - 1) * len(batches))
        if rank == 0:
            save_checkpoint(args.checkpoint, epoch, model, optimizer)
            print(
                f"epoch {epoch}/{args.epochs}  world {world_size}  loss {loss:.3f}  "
                f"test accuracy {accuracy(model, test_data):.3f}",
                flush=True,
            )
        time.sleep(max(0.0, args.min_epoch_time - (time.monotonic() - started)))

    if rank == 0 and done >= args.epochs:
        print(f"nothing left to train  test accuracy {accuracy(model, test_data):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
