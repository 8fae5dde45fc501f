"""Lightning's Trainer whose workers live through a change of the world: they load its last checkpoint.

elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/lightning_trainer.py --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from elastic_rs import elastic
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with Lightning's Trainer, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch[0]) - batch[0].sum(dim=1, keepdim=True)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Watched(pl.Callback):
    """Prints, and slows training down so that there is something to watch."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_start(self, trainer: pl.Trainer, _: Any) -> None:
        print(
            f"world {elastic.size()}  rank {elastic.rank()}  pid {os.getpid()}  from step {trainer.global_step}",
            flush=True,
        )

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        if elastic.rank() == 0:
            print(f"step {trainer.global_step}  loss {outputs['loss'].item():.9f}", flush=True)
        time.sleep(self.pause_s)


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    class Commit(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.is_last_batch:  # of an epoch
                state.checkpoint = f"{args.folder}/step-{trainer.global_step}.ckpt"
                trainer.save_checkpoint(state.checkpoint)  # returns when rank 0 has written it
                state.commit()

    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=args.steps,
        callbacks=[Watched(args.pause), Commit()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = TensorDataset(torch.rand(120, 8, generator=torch.Generator().manual_seed(0)))  # with two workers: 5 steps
    trainer.fit(Net(), DataLoader(data, batch_size=12), ckpt_path=state.checkpoint)
    print(f"done  rank {elastic.rank()}  pid {os.getpid()}", flush=True)


def last_checkpoint(folder: Path) -> str | None:
    steps = [int(file.stem.removeprefix("step-")) for file in folder.glob("step-*.ckpt")]
    return str(folder / f"step-{max(steps)}.ckpt") if steps else None


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    train(elastic.ObjectState(checkpoint=last_checkpoint(args.folder)), args)  # of a job that was stopped as a whole
