"""Train a small network on handwritten digits. Workers may join, leave and be killed; the others keep their processes.

    elastic-run --nnodes=1:3 --nproc-per-node=2 --max-restarts=3 \\
        --rdzv-backend=rust-c10d --rdzv-endpoint=HOST:29400 --rdzv-id=digits examples/digits_elastic.py

It trains the model of ``digits_ddp.py``, with the state in memory. The function ``train`` is called again, in the same
process, whenever the set of workers has changed. It goes on in the middle of the epoch. A failure costs the steps since
the last commit, and a node that joins or leaves costs nothing. A checkpoint is only read when the whole job has been
stopped.

It runs with any launcher, and with none (``python examples/digits_elastic.py``). Under PyTorch's agent a change
restarts all workers, which then begin with the checkpoint.

The data are the 1,797 images of 8x8 pixels that come with scikit-learn. Nothing is downloaded.
"""

import argparse
import math
import os
import time
from pathlib import Path

import elastic_rs
import torch
from digits_ddp import SEED, accuracy, build_model, load_checkpoint, load_data, save_checkpoint
from elastic_rs import elastic
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


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
            state.step += 1
            elastic_rs.step(state.step)  # so that `elastic-rs why` knows what was made again
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
            save_checkpoint(args.checkpoint, state.epoch, state.model, state.optimizer)
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
    step = epoch * math.ceil(len(train_data) / args.batch_size)
    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=epoch, step=step)

    train(state, args, train_data, test_data)
    if elastic.rank() == 0:
        print(f"trained {state.epoch} epochs  test accuracy {accuracy(state.model, test_data):.3f}", flush=True)


if __name__ == "__main__":
    main()
