"""A trainer with data workers that saves when it is asked to end: ``loads.py FOLDER``.

It says READY once data comes. A signal is handled between two steps, as trainers do: it says in which step it saved, in
``FOLDER/checkpoint-RANK`` too, and ends well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

BATCH_S = 0.2


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(BATCH_S)
        return torch.ones(1)


def main() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    rank = os.environ["RANK"]
    for step, _ in enumerate(DataLoader(Slow(), num_workers=2)):
        if step == 1:
            os.write(1, f"READY {rank}\n".encode())
        if received:
            Path(sys.argv[1], f"checkpoint-{rank}").write_text(str(step))
            os.write(1, f"SAVED {rank} in step {step}\n".encode())
            return


if __name__ == "__main__":
    main()
