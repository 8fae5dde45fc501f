"""A worker of `elastic_rs.elastic` for tests: it trains a line through points, and prints each step as JSON.

The agent is whoever started it. --stop STEP says STOPPED and stops in the middle of that step, as a process that hangs.
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_rs import elastic
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--name", default="worker")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--length", type=int, default=24)
parser.add_argument("--commit-every", type=int, default=1)
parser.add_argument("--own-group", action="store_true", help="make the process group before elastic.run")
parser.add_argument("--die", type=int, help="die by SIGKILL in the middle of that step")
parser.add_argument("--stop", type=int)
parser.add_argument("--fail-once", type=Path, help="exit with 3 in the second epoch, if this file does not exist yet")
parser.add_argument("--checkpoint", type=Path)
args = parser.parse_args()
BATCH = 2


def say(what: str, **values: Any) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{what} {json.dumps({'name': args.name, **values})}\n".encode())


def digest(state: Any) -> str:
    """Return what identifies all that the state holds, to the last bit."""
    tensors = [*state.model.state_dict().values()]
    for values in state.optimizer.state_dict()["state"].values():
        tensors += [value for value in values.values() if torch.is_tensor(value)]
    numbers = [float(value).hex() for tensor in tensors for value in tensor.flatten()]
    rate = state.optimizer.param_groups[0]["lr"]
    return json.dumps([*numbers, rate, state.scheduler.last_epoch, state.sampler.state_dict(), state.step])


@elastic.run(timeout=timedelta(seconds=240))
def train(state: Any) -> None:
    generation = os.environ.get("TORCHELASTIC_GENERATION", "0")
    say("BEGIN", rank=elastic.rank(), size=elastic.size(), generation=generation, step=state.step, state=digest(state))
    model = DistributedDataParallel(state.model)
    while state.epoch < args.epochs:
        batches = torch.utils.data.DataLoader(range(args.length), batch_size=BATCH, sampler=state.sampler)  # type: ignore[arg-type, var-annotated]
        for number, indices in enumerate(batches):
            if state.step == args.die:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == args.stop:
                say("STOPPED")
                os.kill(os.getpid(), signal.SIGSTOP)
            if args.fail_once and state.epoch == 1 and number == 1 and not args.fail_once.exists():
                args.fail_once.touch()
                os._exit(3)
            points = indices.double().unsqueeze(1) / args.length
            state.optimizer.zero_grad()
            (model(points) - 3 * points - 1).square().mean().backward()
            state.optimizer.step()
            state.scheduler.step()
            state.sampler.record_batch(number, BATCH)
            state.step += 1
            say(
                "STEP",
                rank=elastic.rank(),
                size=elastic.size(),
                epoch=state.epoch,
                step=state.step,
                indices=indices.tolist(),
            )
            if state.step % args.commit_every == 0:
                state.commit()
                say("COMMIT", rank=elastic.rank(), step=state.step)
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        if args.checkpoint and elastic.rank() == 0:
            torch.save({"model": state.model.state_dict(), "epoch": state.epoch}, args.checkpoint)


torch.manual_seed(os.getpid())  # every worker begins with other weights: a sync makes them equal
model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
epoch = 0
if args.checkpoint and args.checkpoint.exists():
    loaded = torch.load(args.checkpoint, weights_only=True)
    model.load_state_dict(loaded["model"])
    epoch = loaded["epoch"]
    say("LOADED", epoch=epoch)
if args.own_group:
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
sampler = elastic.ElasticSampler(range(args.length), seed=3)
sampler.set_epoch(epoch)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    sampler=sampler,
    epoch=epoch,
    step=0,
    table={"pid": os.getpid()},
)
train(state)
say(
    "END",
    rank=elastic.rank(),
    size=elastic.size(),
    state=digest(state),
    epoch=state.epoch,
    table=state.table,
    pid=os.getpid(),
)
