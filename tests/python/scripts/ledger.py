"""A worker of the chaos test: its parameters depend on every index of every step, and it keeps a ledger of them.

ledger.py RESULT UNTIL LENGTH

The parameters are whole numbers, so that sums over ranks are exact. Each step mixes them with the indices of all ranks.
The ledger is part of the state: a step that was rolled back is not in it. Each worker also remembers its last commit
beside the state, and prints after each change of the world whether the state still contains it. Once the file UNTIL
exists, the present epoch is the last. At the end each rank writes parameters and ledger to RESULT.RANK.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from elastic_rs import elastic
from torch import nn

RESULT, UNTIL, LENGTH = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
COMMIT_EVERY = 7
commits = [0]  # lengths of the ledger at this worker's commits


def digest(ledger: list[str], length: int) -> str:
    return hashlib.sha256("\n".join(ledger[:length]).encode()).hexdigest()[:16]


def say(text: str) -> None:
    os.write(1, f"{text} pid={os.getpid()}\n".encode())


def commit(state: elastic.TorchState) -> None:
    state.commit()
    commits.append(len(state.ledger))
    say(f"COMMIT at={commits[-1]} digest={digest(state.ledger, commits[-1])}")


@elastic.run(backend="gloo")
def train(state: elastic.TorchState) -> None:
    kept = f"committed={commits[-1]} digest={digest(state.ledger, commits[-1])}"
    say(f"WORLD rank={dist.get_rank()} world={dist.get_world_size()} at={len(state.ledger)} {kept}")
    while not state.done:
        for number, index in enumerate(state.sampler):
            own = torch.tensor([index, UNTIL.exists()])
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, own)
            step = [int(it[0]) for it in gathered]
            state.ending = state.ending or any(bool(it[1]) for it in gathered)
            with torch.no_grad():
                weight = state.model.weight
                weight.copy_((weight * 3 + sum(it + 1 for it in step)) % 65_521)
            state.ledger.append(json.dumps([state.epoch, step]))
            state.sampler.record_batch(number, 1)
            time.sleep(0.01)
            if len(state.ledger) % COMMIT_EVERY == 0:
                commit(state)
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.done = state.ending
        commit(state)


model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
sampler = elastic.ElasticSampler(range(LENGTH), shuffle=True, seed=5)
state = elastic.TorchState(model=model, sampler=sampler, epoch=0, ledger=[], ending=False, done=False)
train(state)
told = {"weight": int(model.weight), "ledger": [json.loads(entry) for entry in state.ledger], "text": state.ledger}
Path(f"{RESULT}.{dist.get_rank()}").write_text(json.dumps(told))
say(f"DONE rank={dist.get_rank()}")
