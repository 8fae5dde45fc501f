"""How a ``TorchState`` saves, restores and broadcasts values of each type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_rs.elastic import _tree
from elastic_rs.elastic._sampler import ElasticSampler


class StateHandler:
    """Horovod's interface: a handler that keeps what it saves itself.

    For types that :class:`StateDictHandler` does not suit. If a save of the whole state is interrupted, what this
    handler has saved by then stays.

    Args:
        value: what it saves.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the value in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the value of each rank the state that it has on the rank ``elastic.source_rank()``.

        Called on all ranks, in the same order of handlers. Root 0 of ``elastic.broadcast_object`` and its like means
        that rank meanwhile.
        """
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another value instead. ``state.x = y`` calls it.

        Args:
            value: of the same type.
        """
        self.value = value
        self.save()

    def on_reset(self) -> None:
        """Called when a new world has been formed, before the state is broadcast."""


class StateDictHandler:
    """A handler of values with ``state_dict`` and ``load_state_dict``. The state keeps and broadcasts what it returns.

    Derive from it for types whose state is accessible in another way.

    Args:
        value: what it saves.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> Any:
        """Return the live state: a tree of dicts, lists, tuples, tensors, and objects that can be copied."""
        return self.value.state_dict()

    def restore(self, saved: Any) -> None:
        """Give the value a saved state. What is saved must not change when the value changes later.

        Args:
            saved: a copy of what :meth:`state` has returned.
        """
        self.value.load_state_dict(_tree.fill(saved, self.state()))

    def receive(self, state: Any, *, in_place: bool) -> None:
        """Give the value the state that was broadcast.

        Args:
            state: the broadcast tree. Nobody else uses it.
            in_place: whether all of its tensors are those of :meth:`state`, so that they are in the value already.
        """
        del in_place
        self.value.load_state_dict(state)

    def on_sync(self) -> None:
        """Called on every rank, also on the one that has sent its state, when all have it."""

    def set_value(self, value: Any) -> None:
        """Take another value instead. ``state.x = y`` calls it.

        Args:
            value: of the same type.
        """
        self.value = value

    def on_reset(self) -> None:
        """Called when a new world has been formed, before the state is broadcast."""


class ModuleHandler(StateDictHandler):
    """Of ``torch.nn.Module``. Gradients are not saved: after a restore, and in a new world, there are none."""

    def __init__(self, value: nn.Module) -> None:
        super().__init__(_bare(value))

    def restore(self, saved: Any) -> None:
        # `load_state_dict` copies tensors into the module. It may keep other objects.
        self.value.load_state_dict(_copied_objects(saved))
        self._drop_gradients()

    def receive(self, state: Any, *, in_place: bool) -> None:
        if not in_place or not all(isinstance(value, Tensor) for value in state.values()):
            self.value.load_state_dict(state)

    def on_reset(self) -> None:
        self._drop_gradients()

    def set_value(self, value: nn.Module) -> None:
        super().set_value(_bare(value))

    def _drop_gradients(self) -> None:
        """Drop what an interrupted step has left. The next one would add to it."""
        for parameter in self.value.parameters():
            parameter.grad = None


class OptimizerHandler(StateDictHandler):
    """Of ``torch.optim.Optimizer``. Any optimizer whose ``state_dict`` is complete will do, LBFGS too."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__):
            raise ValueError(
                "a TorchState cannot hold a ZeroRedundancyOptimizer: each worker has a part of its state only, and "
                "that of a dead worker is lost. Use the optimizer that it wraps, or restart from checkpoints "
                "(docs/frameworks.md)"
            )
        super().__init__(value)


class SamplerHandler(StateDictHandler):
    """Of ``ElasticSampler``."""

    def on_sync(self) -> None:
        self.value.reset()

    def on_reset(self) -> None:
        self.value.reset()


Handler = StateHandler | StateDictHandler
Registry = Sequence[tuple[type, Callable[[Any], Handler]]]

_registry: Registry = [
    (nn.Module, ModuleHandler),
    (torch.optim.Optimizer, OptimizerHandler),
    (ElasticSampler, SamplerHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and the handler of its values. The first that matches is taken.

    Values of other types with ``state_dict`` and ``load_state_dict`` (learning rate schedulers, ``GradScaler``) get a
    :class:`StateDictHandler`. All others are plain attributes, which are copied and pickled.
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs. It applies to values that are given to a ``TorchState`` later.

    Args:
        registry: pairs of a type and a function that makes the handler of a value. The first that matches is taken, so
            keep those of :func:`get_handler_registry` after your own.
    """
    global _registry  # noqa: PLW0603 # Horovod's interface
    _registry = registry


def handler_of(value: Any) -> Handler | None:
    """Return a new handler of the value, or None if it is a plain attribute."""
    make = _maker_of(value)
    return None if make is None else make(value)


def is_handled(value: Any) -> bool:
    """Return whether the value has a handler, so that it is no plain attribute."""
    return _maker_of(value) is not None


def _maker_of(value: Any) -> Callable[[Any], Handler] | None:
    for kind, make in _registry:
        if isinstance(value, kind):
            return make
    if isinstance(value, type):
        return None
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateDictHandler
    return None


def _bare(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "a TorchState holds the bare module: give it `model.module`, and wrap `state.model` in "
            "DistributedDataParallel inside the function that elastic.run calls. Each new world needs a new wrap"
        )
    return module


def _copied_objects(saved: Any) -> Any:
    """Return the saved state of a module with the same tensors, and with copies of everything else."""
    result = _tree.shallow(saved)
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            result[key] = copy.deepcopy(value)
    return result
