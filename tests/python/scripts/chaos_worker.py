"""A worker of the chaos tests with cuts: it records every world, step and commit, with the time and a digest.

chaos_worker.py FOLDER UNTIL LENGTH

The parameters are whole numbers, so that sums over ranks are exact. The history is part of the state: a step that was
rolled back is not in it. Rank 0 writes a checkpoint now and then, and each process begins with the latest one. Each
process appends records to FOLDER/trace.WORKER, one line of JSON each:

- ``process``: the length of the history in the checkpoint with which it begins,
- ``world``: rank, size, the world's random id, length and digest of the history with which it begins, and the digest of
  the part that this process committed last,
- ``step``: a step was completed, and when it began,
- ``commit``, ``checkpoint``: length and digest of the history.

Once the file UNTIL exists, the present step is the last. At the end each rank writes its history to FOLDER/result.RANK.
"""

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from elastic_rs import elastic
from torch import nn

FOLDER, UNTIL, LENGTH = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
COMMIT_EVERY, CHECKPOINT_EVERY = 5, 50
CHECKPOINT = FOLDER / "checkpoint"
# A process id alone may be that of another worker too, in another container.
WORKER = f"{os.environ.get('MACHINE', 'worker')}-{os.getpid()}-{random.SystemRandom().randrange(1 << 32):08x}"
trace = os.open(FOLDER / f"trace.{WORKER}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
committed = [0]  # lengths of the history at this process's commits


def record(kind: str, **facts: object) -> None:
    line = {"kind": kind, "at_ns": time.monotonic_ns(), "worker": WORKER, **facts}
    os.write(trace, json.dumps(line).encode() + b"\n")


def length_and_digest(history: list[int]) -> dict[str, object]:
    return {"length": len(history), "digest": hashlib.sha256(repr(history).encode()).hexdigest()[:16]}


def commit(state: elastic.TorchState) -> None:
    state.commit()
    committed.append(len(state.history))
    record("commit", world=state.world, **length_and_digest(state.history))


def write_checkpoint(state: elastic.TorchState) -> None:
    partial = FOLDER / f"checkpoint.{WORKER}"
    partial.write_text(json.dumps({"weight": int(state.model.weight), "history": state.history}))
    partial.rename(CHECKPOINT)
    record("checkpoint", **length_and_digest(state.history))


@elastic.run(backend="gloo")
def train(state: elastic.TorchState) -> None:
    own = torch.tensor([random.SystemRandom().randrange(1 << 60)])
    dist.broadcast(own, 0)
    state.world = int(own)
    place = {"rank": dist.get_rank(), "size": dist.get_world_size(), "world": state.world}
    kept = length_and_digest(state.history[: committed[-1]])
    record("world", **place, **length_and_digest(state.history), kept=kept)
    os.write(1, f"WORLD rank={place['rank']} world={place['size']} at={len(state.history)}\n".encode())
    while not state.done:
        step, began_ns = len(state.history), time.monotonic_ns()
        facts = torch.tensor([dist.get_rank() + step, UNTIL.exists() and step > LENGTH])
        dist.all_reduce(facts)
        with torch.no_grad():
            state.model.weight.copy_((state.model.weight * 3 + int(facts[0])) % 65_521)
        state.history.append(int(facts[0]))
        state.done = bool(facts[1])
        record("step", world=state.world, began_ns=began_ns)
        time.sleep(0.02)
        if len(state.history) % COMMIT_EVERY == 0 or state.done:
            commit(state)
        else:
            state.check_host_updates()
        if dist.get_rank() == 0 and len(state.history) % CHECKPOINT_EVERY == 0:
            write_checkpoint(state)


model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
kept: dict[str, object] = {"weight": 1, "history": []}
if CHECKPOINT.exists():
    kept = json.loads(CHECKPOINT.read_text())
    nn.init.constant_(model.weight, float(str(kept["weight"])))
record("process", loaded=len(kept["history"]))  # type: ignore[arg-type]
state = elastic.TorchState(model=model, history=kept["history"], world=0, done=False)
train(state)
told = {"weight": int(model.weight), "history": state.history}
(FOLDER / f"result.{dist.get_rank()}").write_text(json.dumps(told))
os.write(1, f"DONE rank={dist.get_rank()}\n".encode())
