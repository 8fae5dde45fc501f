"""``elastic_rs.step`` in a process that no agent of elastic_rs has started, and what it counts of optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import elastic_rs
import pytest
import torch
from elastic_rs._step import Step
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from collections.abc import Iterator

optimizers: Any = sys.modules[register_optimizer_step_post_hook.__module__]


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
    for variable in (None, "", "1:2:3:4", "1:2:3:4:128", "not from an agent"):
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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Return what the hook on all optimizers counts, and put it on."""
    found: list[bool] = []
    monkeypatch.setattr(Step, "_count", lambda _, is_next: found.append(is_next))
    monkeypatch.setattr(elastic_rs.step, "_counted", None)
    with monkeypatch.context() as hooks:
        hooks.setattr(optimizers, "_global_optimizer_post_hooks", OrderedDict())
        hooks.delitem(sys.modules, "elastic_rs._count", raising=False)
        import_module("elastic_rs._count")
        yield found


def test_steps_of_optimizers_are_counted(counted: list[bool]) -> None:
    first, second = sgd(), sgd()
    for optimizer in (first, second, first):
        optimizer.step()
    assert counted == [True, False, True]
    for again in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        parameter = again.param_groups[0]["params"][0]
        parameter.grad = torch.ones(1)
        again.step()
        assert parameter.item() == pytest.approx(0.7)
    assert counted == [True, False, True, False, False], "they are others"


class Whole(torch.optim.Optimizer):
    """One that can be compiled as a whole: PyTorch's own have breaks."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})

    @torch.no_grad()
    def step(self, _: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_is_compiled_is_compiled_as_without_the_count(counted: list[bool], backend: str) -> None:
    counters = torch._dynamo.utils.counters
    compile_of = partial(torch.compile, backend=backend)

    def compiled() -> dict[str, Any]:
        torch._dynamo.reset()
        counters.clear()
        (parameter := torch.nn.Parameter(torch.ones(1))).grad = torch.ones(1)
        whole, broken = compile_of(Whole(parameter).step, fullgraph=True), compile_of(sgd().step)
        frames = 0
        for number in range(4):
            frames = counters["frames"]["total"]
            whole()
            broken()
            if number == 2:
                elastic_rs.step(7)
        assert counters["frames"]["total"] == frames, "nothing is compiled again for a script that reports steps"
        assert parameter.item() == pytest.approx(0.6)
        return {name: dict(counters[name]) for name in ("graph_break", "stats")}

    hooked = compiled()
    assert not counted
    optimizers._global_optimizer_post_hooks.clear()
    assert hooked == compiled()


def test_a_step_within_a_graph_of_a_device_ends_the_count(counted: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(Step, "_count_no_more", lambda _: ended.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sgd().step()
    assert (counted, ended) == ([], [True])
