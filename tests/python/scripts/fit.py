"""A Lightning training script as users write it: fit.py FOLDER. It does not know this package.

It trains for four epochs, writes checkpoints to the folder, and continues from the last one. At the beginning of the
third epoch the worker of rank 1 exits with code 7 and without a message, once.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

folder = Path(sys.argv[1])
last = folder / "last.ckpt"
rank = int(os.environ["RANK"])


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer(batch) - batch.sum(dim=1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        say(f"EPOCH {self.current_epoch} rank={self.global_rank} world={self.trainer.world_size}")
        crashed = folder / "crashed"
        if self.current_epoch == 2 and self.global_rank == 1 and not crashed.exists():
            crashed.touch()
            os._exit(7)


pl.seed_everything(rank, verbose=False)  # DDP gives all ranks the weights of rank 0
trainer = pl.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=4,
    callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data: Any = torch.utils.data.DataLoader(torch.rand(64, 4), batch_size=8)  # type: ignore[arg-type]
model = Line()
trainer.fit(model, data, ckpt_path=last if last.exists() else None)
say(
    f"FIT rank={trainer.global_rank} world={trainer.world_size} epochs={trainer.current_epoch} "
    f"weights={[round(weight, 5) for weight in model.layer.weight.flatten().tolist()]}"
)
