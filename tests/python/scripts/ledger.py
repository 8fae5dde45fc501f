"""A worker of the chaos test: its parameters depend on every index of every step, and it keeps a ledger of them.

ledger.py RESULT EPOCHS LENGTH

The parameters are whole numbers, so that sums over ranks are exact. Each step mixes them with the indices of all ranks.
The ledger is part of the state: a step that was rolled back is not in it. At the end each rank writes parameters and
ledger to RESULT.RANK.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from elastic_rs import elastic
from torch import nn

RESULT, EPOCHS, LENGTH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
COMMIT_EVERY = 7


@elastic.run(backend="gloo")
def train(state: elastic.TorchState) -> None:
    os.write(1, f"WORLD rank={dist.get_rank()} world={dist.get_world_size()} pid={os.getpid()}\n".encode())
    while state.epoch < EPOCHS:
        for number, index in enumerate(state.sampler):
            own = torch.tensor([index])
            indices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(indices, own)
            step = [int(it) for it in indices]
            with torch.no_grad():
                weight = state.model.weight
                weight.copy_((weight * 3 + sum(it + 1 for it in step)) % 65_521)
            state.ledger.append([state.epoch, step])
            state.sampler.record_batch(number, 1)
            time.sleep(0.01)
            if len(state.ledger) % COMMIT_EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
sampler = elastic.ElasticSampler(range(LENGTH), shuffle=True, seed=5)
state = elastic.TorchState(model=model, sampler=sampler, epoch=0, ledger=[])
train(state)
told = {"weight": int(model.weight), "ledger": state.ledger}
Path(f"{RESULT}.{dist.get_rank()}").write_text(json.dumps(told))
os.write(1, f"DONE rank={dist.get_rank()}\n".encode())
