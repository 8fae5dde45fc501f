"""A worker of DistributedDataParallel that dies in each of its job's first attempts: attempts.py COUNT one|all.

In attempt N, the worker of rank N (modulo the world's size) kills itself after a few steps, or all do. The attempt
COUNT ends well. ATTEMPT says that the process group of an attempt was made and used.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

count, dying = int(sys.argv[1]), sys.argv[2]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
# One write for the whole line, because the workers of a node share a pipe.
os.write(1, f"ATTEMPT {attempt} rank={dist.get_rank()} world={dist.get_world_size()}\n".encode())
if attempt < count:
    if dying == "all" or dist.get_rank() == attempt % dist.get_world_size():
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
