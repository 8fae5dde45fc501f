"""A worker that tells its steps: ``stepping.py FOLDER``.

Each step is a collective and steps of two optimizers, and every tenth is a checkpoint. In the first life the last step
is 25, later it is 30. Then the worker waits for the file ``FOLDER/done``. It prints its rank, and when the first step
had ended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import elastic_rs
import torch
from torch import distributed as dist

folder = Path(sys.argv[1])
checkpoint = folder / "checkpoint"
last = 25 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 30

dist.init_process_group("gloo")
rank = dist.get_rank()
parameter = torch.nn.Parameter(torch.ones(1))
optimizers = [torch.optim.SGD([parameter]), torch.optim.SGD([parameter])]
begin = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
for step in range(begin, last + 1):
    total = torch.ones(1)
    dist.all_reduce(total)
    for optimizer in (*optimizers, optimizers[0]):
        optimizer.step()  # nobody counts them: the script reports its steps
    if step % 10 == 0 and rank == 0:
        checkpoint.write_text(str(step))
    elastic_rs.step(step)
    if step == begin:
        sys.stdout.write(f"FIRST {rank} {step} {time.monotonic_ns()}\n")
# What a data loader does counts for nothing.
child = os.fork()
if child == 0:
    elastic_rs.step(1_000_000)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
sys.stdout.write(f"REACHED {rank} {last}\n")
while not (folder / "done").exists():
    time.sleep(0.05)
dist.destroy_process_group()
