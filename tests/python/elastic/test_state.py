"""States of one worker: what is saved, restored and replaced, and that saves share nothing with what is live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from elastic_rs import elastic
from elastic_rs.elastic import _contents, _wire
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()


def test_restore_undoes_and_commit_keeps() -> None:
    """``test_elastic_state`` of Horovod's test_torch_elastic.py."""
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.TorchState(model, optimizer, batch=20, epoch=10)
    first = weights(model)

    step(model, optimizer)
    state.batch, state.epoch = 21, 11
    second = weights(model)
    assert not same(first, second)
    state.restore()
    assert same(weights(model), first)
    assert (state.batch, state.epoch) == (20, 10)

    model.load_state_dict(dict(zip(model.state_dict(), second, strict=True)))
    state.batch, state.epoch = 21, 11
    state.commit()
    step(model, optimizer)
    state.restore()
    assert same(weights(model), second)
    assert (state.batch, state.epoch) == (21, 11)


def test_attributes_are_copied_deeply() -> None:
    """Horovod's ``save`` keeps references, so that a restore brings nothing back."""
    for make in (elastic.ObjectState, elastic.TorchState):
        state: Any = make(history=[1], table={"a": [1]}, best=torch.zeros(2) if make is elastic.TorchState else 0.0)
        state.history.append(2)
        state.table["a"].append(2)
        state.commit()
        state.history.append(3)
        state.table["a"].clear()
        if make is elastic.TorchState:
            state.best += 1
        state.restore()
        assert state.history == [1, 2]
        assert state.table == {"a": [1, 2]}
        # What was restored is not the saved copy either.
        state.history.append(4)
        state.restore()
        assert state.history == [1, 2]
        if make is elastic.TorchState:
            assert state.best.tolist() == [0, 0]
            state.best += 1
            state.restore()
            assert state.best.tolist() == [0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), capturable=False, foreach=False),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
    ],
    ids=["SGD", "AdamW", "Adam with a tensor as rate", "Adafactor", "LBFGS"],
)
def test_training_goes_on_from_a_restore_as_from_the_commit(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = make(list(model.parameters()))
    data = torch.randn(6, 4, 3)

    def train(batch: Tensor) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = (model(batch) - 1).square().mean()
            value.backward()
            return value

        optimizer.step(loss)

    state = elastic.TorchState(model=model, optimizer=optimizer)
    for batch in data[:2]:
        train(batch)
    state.commit()
    for batch in data[2:4]:
        train(batch)
    expected = weights(model)
    for _ in range(2):  # the second restore shows that the first has not given the saved tensors away
        for batch in data[4:]:
            train(batch)
        state.restore()
        assert all(parameter.grad is None for parameter in model.parameters())
        for batch in data[2:4]:
            train(batch)
        assert same(weights(model), expected)


def test_a_restore_before_the_first_step_leaves_an_optimizer_without_state() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    state = elastic.TorchState(model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"]
    state.restore()
    assert not optimizer.state_dict()["state"]


def test_schedulers_drive_the_same_optimizer_after_a_restore() -> None:
    """In Horovod a scheduler is pickled with its optimizer, and drives a copy from then on."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    )
    state = elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    rates = []
    for number in range(5):
        if number == 2:
            state.commit()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    state.restore()
    again = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        again.append(optimizer.param_groups[0]["lr"])
    assert again == rates[2:]
    assert state.scheduler is scheduler


def test_saves_use_two_buffers_in_turn() -> None:
    """No memory is allocated once there are two of them, and a save never writes the one that counts."""
    model = nn.Linear(100, 100)
    state = elastic.TorchState(model=model)

    def pointers() -> set[int]:
        assert state._last is not None
        return {tensor.data_ptr() for tensor in state._last.trees["model"].values()}

    first = pointers()
    state.commit()
    second = pointers()
    assert not first & second
    for expected in (first, second, first):
        state.commit()
        assert pointers() == expected
    assert not pointers() & {parameter.data_ptr() for parameter in model.parameters()}


class Interrupting:
    """A value whose state cannot be read once, as when a device fails."""

    broken = False

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise RuntimeError("the device has failed")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def test_an_interrupted_save_keeps_the_last() -> None:
    model = model_of(1.0)
    state: Any = elastic.TorchState(model=model, last=Interrupting(), epoch=1)
    state.commit()  # both buffers exist
    with torch.no_grad():
        model[0].weight.fill_(2.0)  # type: ignore[index]
    state.epoch = 2
    state.commit()
    kept = weights(model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)  # type: ignore[index]
    state.epoch = 3
    state.last.broken = True
    with pytest.raises(RuntimeError, match="the device has failed"):
        state.commit()  # after the model has been copied
    state.last.broken = False
    state.restore()
    assert same(weights(model), kept)
    assert state.epoch == 2
    state.commit()
    state.restore()
    assert same(weights(model), kept)


def test_a_value_is_replaced_and_saved() -> None:
    state: Any = elastic.TorchState(model=model_of(1.0), other=None, epoch=1)
    new = model_of(2.0)
    state.model = new
    expected = weights(new)
    with torch.no_grad():
        new[0].weight.fill_(7.0)  # type: ignore[index]
    state.restore()
    assert state.model is new
    assert same(weights(new), expected)

    state.other = model_of(3.0)  # an attribute becomes a module
    with torch.no_grad():
        state.other[0].weight.fill_(7.0)
    state.restore()
    assert state.other[0].weight[0, 0] == 3
    state.commit()
    state.other = 5  # and an attribute again
    state.commit()
    state.other = 6
    state.restore()
    assert state.other == 5

    state.untracked = 1
    state.commit()
    state.untracked = 2
    state.restore()
    assert state.untracked == 2


class Counter:
    def __init__(self) -> None:
        self.count = 0


class CounterHandler(elastic.StateHandler):
    def __init__(self, value: Counter) -> None:
        super().__init__(value)
        self.saved = 0

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = elastic.broadcast_object(self.value.count)


def test_handlers_of_the_user() -> None:
    before = elastic.get_handler_registry()
    elastic.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state: Any = elastic.TorchState(counter=Counter())
        state.counter.count = 1
        state.commit()
        state.counter.count = 2
        state.restore()
        assert state.counter.count == 1
        state.counter = Counter()
        state.counter.count = 9
        state.restore()
        assert state.counter.count == 0
    finally:
        elastic.set_handler_registry(before)


def test_a_class_with_state_dict_is_not_taken_for_a_value() -> None:
    state: Any = elastic.TorchState(kind=Interrupting)
    assert state.kind is Interrupting
    state.commit()


def test_the_module_must_be_bare() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bare module"):
        elastic.TorchState(model=wrapped)
    state = elastic.TorchState(model=wrapped.module)
    with pytest.raises(ValueError, match="bare module"):
        state.model = wrapped
    assert state.model is wrapped.module


def test_a_sharded_tensor_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="cannot hold a DTensor"):
        elastic.TorchState(weights=shard)


@pytest.mark.parametrize("name", ["commit", "sync", "_private"])
def test_names_that_would_hide_a_method_are_refused(name: str) -> None:
    for make in (elastic.ObjectState, elastic.TorchState):
        with pytest.raises(ValueError, match=f"`{name}`"):
            make(**{name: 1})  # type: ignore[arg-type]


def test_reset_callbacks_are_called_in_order_after_reset() -> None:
    calls = []

    class Mine(elastic.ObjectState):
        def reset(self) -> None:
            calls.append("reset")

    state = Mine()
    state.register_reset_callbacks([lambda: calls.append("a"), lambda: calls.append("b")])
    state.register_reset_callbacks([lambda: calls.append("c")])
    state.on_reset()
    assert calls == ["reset", "a", "b", "c"]


def test_object_state_takes_horovods_functions() -> None:
    sent = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return {"name": "theirs"} if isinstance(value, dict) else value

    state: Any = elastic.ObjectState(bcast_object=broadcast, get_rank=lambda: 0, name="mine")
    state.name = "current"
    state.sync()
    assert sent == [{"name": "current"}]  # Horovod sends what was committed
    assert state.name == "theirs"
    state.name = "changed"
    state.restore()
    assert state.name == "theirs"  # a sync ends with a save


def test_one_worker_needs_no_group() -> None:
    state: Any = elastic.TorchState(model=model_of(1.0), epoch=1)
    expected = weights(state.model)
    state.epoch = 2
    state.sync()
    assert same(weights(state.model), expected)
    tensor = torch.tensor([1.0, 2.0])
    assert torch.equal(elastic.allreduce(tensor), tensor)
    elastic.broadcast_parameters(state.model.state_dict())
    assert elastic.broadcast_object({"a": 1}) == {"a": 1}
    assert (elastic.rank(), elastic.size(), elastic.local_rank(), elastic.local_size()) == (0, 1, 0, 1)
    assert (elastic.cross_rank(), elastic.cross_size()) == (0, 1)
    assert not elastic.is_initialized()


@pytest.mark.parametrize(
    ("values", "path", "kind"),
    [
        ({"models": [model_of(1.0), model_of(2.0)]}, "models[0]", "a module"),
        ({"parts": {"a": 1, "encoder": model_of(1.0)}}, "parts['encoder']", "a module"),
        ({"optimizers": (torch.optim.SGD([torch.ones(1)], lr=1.0),)}, "optimizers[0]", "an optimizer"),
        ({"deep": {"a": [({"b": model_of(1.0)},)]}}, "deep['a'][0][0]['b']", "a module"),
        ({"samplers": [elastic.ElasticSampler(range(4))]}, "samplers[0]", "an ElasticSampler"),
        ({"scalers": {"a": torch.amp.GradScaler("cpu")}}, "scalers['a']", "a GradScaler"),
    ],
)
def test_modules_and_optimizers_inside_other_values_are_refused(values: dict[str, Any], path: str, kind: str) -> None:
    """A restore would put copies there: the optimizer would go on with the old model."""
    for make in (elastic.TorchState, elastic.ObjectState):
        with pytest.raises(ValueError, match="Give each a name of its own") as raised:
            make(**values)
        assert f"cannot hold {kind} inside another value, which is in `{path}`" in str(raised.value)
    state = elastic.TorchState(x=None)
    with pytest.raises(ValueError, match="inside another value"):
        state.x = next(iter(values.values()))


def test_a_look_into_a_long_value_is_bounded() -> None:
    """It is made at each assignment, once a step."""
    looks = []

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                looks.append(one)
                yield one

    _contents.refuse_parted("losses", Counted([0.5] * 1_000_000), elastic.State)
    assert 0 < len(looks) <= _contents.MOST
    looks.clear()
    rows = Counted(Counted([0.5] * 1000) for _ in range(1000))
    _contents.refuse_parted("rows", rows, elastic.State)
    assert 0 < len(looks) <= _contents.MOST
    with pytest.raises(ValueError, match=r"in `rows\['model'\]`"):
        _contents.refuse_parted("rows", {"rows": rows, "model": model_of(1.0)}, elastic.State)


def test_a_list_of_modules_that_is_a_module_is_held() -> None:
    models = nn.ModuleList([model_of(1.0), model_of(2.0)])
    state = elastic.TorchState(model=models, numbers=[1, {"a": 2}])
    first = weights(models)
    step(models[0], torch.optim.SGD(models.parameters(), lr=0.1))
    state.restore()
    assert same(weights(models), first)


def test_a_state_in_a_state_is_refused() -> None:
    inner = elastic.ObjectState(epoch=0)
    for make in (elastic.TorchState, elastic.ObjectState):
        for value in (inner, [inner]):
            with pytest.raises(ValueError, match=r"a state cannot hold another one, which is in `inner.*` *: give its"):
                make(inner=value)
    with pytest.raises(ValueError, match="cannot hold a module"):
        elastic.ObjectState(model=model_of(1.0))


def test_allreduce_scales_whole_numbers_as_horovod_does() -> None:
    whole = torch.tensor([7, -7])
    assert elastic.allreduce(whole, prescale_factor=0.5).tolist() == [3, -3]
    assert elastic.allreduce(whole.to(torch.uint8), postscale_factor=2.5).dtype == torch.uint8
    assert whole.tolist() == [7, -7]


def test_a_tensor_that_allreduce_refuses_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(_: Tensor) -> None:
        raise RuntimeError("the tensors of an allreduce must have the same shape")

    monkeypatch.setattr(_wire, "group_exists", lambda: True)
    monkeypatch.setattr(_wire, "check_equal", differs)
    tensor = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="the same shape"):
        elastic.allreduce_(tensor, prescale_factor=10.0)
    assert tensor.tolist() == [1, 2]
