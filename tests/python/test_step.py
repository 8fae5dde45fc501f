"""``elastic_rs.step`` in a process that no agent of elastic_rs has started, and what it counts of optimizers."""

from __future__ import annotations

import gc
import subprocess
import sys

import elastic_rs
import pytest
import torch
from elastic_rs._step import Step


class Counting(Step):
    """Counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, n: int | None = None, /) -> None:  # type: ignore[override]
        self.calls += 1
        super().__call__(n)


def sgd() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1)


def test_without_an_agent_nothing_happens_and_torch_is_not_imported() -> None:
    code = (
        "import sys, elastic_rs; elastic_rs.step(); elastic_rs.step(7); elastic_rs.step(2**63); "
        "assert 'torch' not in sys.modules; assert 'step' in vars(elastic_rs)"
    )
    for variable in (None, "", "1:2:3:4", "not from an agent"):
        env = {} if variable is None else {"ELASTIC_RS_STEPS": variable}
        subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, timeout=60, check=True)


def test_what_is_no_number_of_a_step_is_refused() -> None:
    with pytest.raises(OverflowError):
        elastic_rs.step(-1)
    with pytest.raises(TypeError):
        elastic_rs.step("7")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        elastic_rs.step.auto(-1)


def test_auto_counts_the_steps_of_one_optimizer() -> None:
    step = Counting()
    first, second = sgd(), sgd()
    handle = step.auto(last=41)
    for optimizer in (first, second, first, second):
        optimizer.step()
    assert step.calls == 2
    # A scaler that has found no finite gradients leaves the step out.
    scaler = torch.amp.GradScaler("cpu")
    for group in first.param_groups:
        group["params"][0].grad = scaler.scale(torch.full((1,), float("inf")))
    scaler.step(first)
    assert step.calls == 2
    del first, optimizer, group
    gc.collect()
    second.step()
    assert step.calls == 3
    step.auto()
    second.step()
    assert step.calls == 4, "the first hook has ended"
    handle.remove()
    second.step()
    assert step.calls == 5
    step.auto().remove()
    second.step()
    assert step.calls == 5
