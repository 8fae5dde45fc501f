"""``TorchState``: modules, optimizers, samplers and plain attributes, saved in host memory and broadcast together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_rs.elastic import _tree, _wire
from elastic_rs.elastic._contents import refuse_parted
from elastic_rs.elastic._exceptions import StateMismatchError
from elastic_rs.elastic._handlers import Handler, StateDictHandler, StateHandler, handler_of
from elastic_rs.elastic._membership import MEMBERSHIP
from elastic_rs.elastic._state import State, check_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Attributes of these types have no handler, and are assigned once a step.
_PLAIN = {bool, float, int, str, type(None)}


class _Saved(NamedTuple):
    """One save: a tree of each value with a ``StateDictHandler``, and the plain attributes."""

    trees: dict[str, Any]
    attributes: dict[str, Any]


class TorchState(State):
    """The state of a PyTorch training job: ``TorchState(model=…, optimizer=…, scheduler=…, sampler=…, epoch=0, …)``.

    Each argument becomes an attribute. A value with a handler (``get_handler_registry``) is saved and broadcast through
    its ``state_dict``. Others are plain attributes: copied, and pickled to be broadcast. Tensors inside them are
    treated as those of a module are.

    There are two buffers in host memory (pinned if the tensors are on a device). A save writes one of them while the
    other keeps the last save, so an interrupted save does no harm. Later saves use the same memory again.

    The interface is that of ``horovod.torch.elastic.TorchState``.

    Args:
        model: the bare module, without ``DistributedDataParallel``. It may be left out.
        optimizer: of the module's parameters. It may be left out.
        kwargs: further values, by the names of their attributes: schedulers, an :class:`ElasticSampler`, numbers.

    Raises:
        ValueError: a name begins with ``_`` or is that of a method, or a value cannot be in a state, such as a wrap, a
            ``ZeroRedundancyOptimizer``, or a module inside a list.

    >>> import torch
    >>> from elastic_rs import elastic
    >>> model = torch.nn.Linear(2, 1)
    >>> state = elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
    >>> state.epoch = 5
    >>> state.restore()
    >>> state.epoch
    0
    """

    _values: dict[str, Handler | None]
    """The handler of each value, or None if it is a plain attribute."""
    _last: _Saved | None
    """The last complete save."""
    _spare: _Saved | None
    """The one before, whose memory the next save uses."""
    _devices: set[torch.device]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__()
        check_names(kwargs)
        self._values, self._last, self._spare, self._devices = {}, None, None, set()
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            self._values[name] = None
            setattr(self, name, value)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_values", ()) and not (self._values[name] is None and type(value) in _PLAIN):
            self._take(name, value)
        super().__setattr__(name, value)

    def on_reset(self) -> None:
        """Called by ``run`` when a new world has been formed. Drops gradients, and distributes a sampler's indices."""
        for handler in self._values.values():
            if handler is not None:
                handler.on_reset()
        super().on_reset()

    def save(self) -> None:
        """Copy the state into host memory."""
        spare, self._spare = self._spare, None
        copier = _tree.Copier()
        saved = _Saved(
            {name: copier.copy(handler.state(), spare and spare.trees.get(name)) for name, handler in self._trees()},
            copier.copy(self._attributes(), spare and spare.attributes),
        )
        _tree.synchronize(copier.devices)
        self._devices = copier.devices
        for handler in self._others():
            handler.save()
        # Whatever interrupts this method, `_last` is a complete save.
        self._last, self._spare = saved, self._last

    def restore(self) -> None:
        """Go back to what was saved last. Gradients of modules are dropped."""
        assert self._last is not None
        for name, handler in self._trees():
            handler.restore(self._last.trees[name])
        for other in self._others():
            other.restore()
        for name, saved in self._last.attributes.items():
            if self._values[name] is None:
                super().__setattr__(name, _tree.fill(saved, None))

    def sync(self) -> None:
        """Give all ranks the present state of the rank ``MEMBERSHIP.source``, and save it.

        One message describes the state. Then the tensors follow, small ones together.
        """
        live = {name: handler.state() for name, handler in self._trees()}, self._attributes()
        received = _wire.send_tree(live, MEMBERSHIP.source, MEMBERSHIP.part_done)
        MEMBERSHIP.parts_done()
        if received is not live:
            self._receive(received, live)
        for _, handler in self._trees():
            handler.on_sync()
        with MEMBERSHIP.syncing():
            for other in self._others():
                other.sync()
        # If a device's collective was aborted, waiting for it ended without an error, over garbage (as in `commit`).
        self._elastic_finish_device_work()
        MEMBERSHIP.raise_if_failed()
        self.save()

    def _receive(self, received: tuple[dict[str, Any], dict[str, Any]], live: tuple[dict[str, Any], Any]) -> None:
        trees, attributes = received
        theirs, ours = sorted({*trees, *attributes}), sorted(self._values)
        if set(trees) != set(live[0]):
            raise StateMismatchError(
                f"the state of rank {MEMBERSHIP.source} has the values {theirs}, {sorted(trees)} of them with a "
                f"state_dict; this rank has {ours} and {sorted(live[0])}: all ranks must make the same TorchState"
            )
        for name, handler in self._trees():
            try:
                handler.receive(trees[name], in_place=_same_tensors(trees[name], live[0][name]))
            except Exception as error:
                raise StateMismatchError(
                    f"this worker cannot take the state that rank {MEMBERSHIP.source} has of `{name}`, a "
                    f"{type(handler.value).__name__}: {error}; every worker must make it before elastic.run as it is "
                    "in the running job, with the same parameter groups for example"
                ) from error
        for name, value in attributes.items():
            setattr(self, name, value)

    def _elastic_finish_device_work(self) -> None:
        _tree.synchronize(self._devices)

    def _take(self, name: str, value: Any) -> None:
        """Choose how the value is saved, and save it, so that a restore does not bring back the one before."""
        new, present = handler_of(value), self._values[name]
        if new is None:
            refuse_parted(name, value, State)
        if present is not None and type(new) is type(present):
            present.set_value(value)
            new = present
        elif isinstance(new, StateHandler):
            new.save()
        self._values[name] = new
        if isinstance(new, StateDictHandler) and self._last is not None:
            self._last.trees[name] = _copy(new.state())

    def _elastic_names(self) -> list[str]:
        return sorted(self._values)

    def _trees(self) -> list[tuple[str, StateDictHandler]]:
        return [(name, one) for name, one in self._values.items() if isinstance(one, StateDictHandler)]

    def _others(self) -> list[StateHandler]:
        return [one for one in self._values.values() if isinstance(one, StateHandler)]

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, handler in self._values.items() if handler is None}


def _copy(live: Any) -> Any:
    copier = _tree.Copier()
    saved = copier.copy(live)
    _tree.synchronize(copier.devices)
    return saved


def _same_tensors(one: Any, other: Any) -> bool:
    tensors: list[Tensor] = []
    others: list[Tensor] = []
    _tree.describe(one, tensors)
    _tree.describe(other, others)
    return len(tensors) == len(others) and all(a is b for a, b in zip(tensors, others, strict=True))
