"""A loop with Hugging Face Accelerate whose workers survive, as docs/frameworks.md has it: accelerated.py FOLDER.

At step 7 rank 1 kills itself, once.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from elastic_rs import elastic

killed = Path(sys.argv[1]) / "killed"


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


@elastic.run(backend="gloo")
def train(state: elastic.TorchState) -> None:
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(state.model)
    rank, world = accelerator.process_index, accelerator.num_processes
    say(f"WORLD rank={rank} world={world} step={state.step} pid={os.getpid()}")
    while state.step < 12:
        state.optimizer.zero_grad()
        accelerator.backward(model(torch.full((2, 4), 1.0 + rank)).square().mean())
        state.optimizer.step()
        state.step += 1
        if state.step == 7 and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
    say(f"DONE rank={rank} weights={weights}")


model = torch.nn.Linear(4, 1)
train(elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), step=0))
