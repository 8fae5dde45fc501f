"""What a state must not hold inside a plain value. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["refuse_parted"]

# Deeper lists of lists are data.
_DEPTH = 4
_PLAIN = {bool, float, int, str, bytes, type(None)}


def refuse_parted(name: str, value: Any, state_type: type) -> None:
    """Raise if a plain value contains a state, or what a ``TorchState`` has a handler for: a module, an optimizer.

    A plain value is saved as a deep copy. After a restore it would hold another module than the one that the script and
    the optimizer have.

    Args:
        name: of the value in the state.
        value: the value, which has no handler.
        state_type: the class of states.
    """
    for path, kind in _found(name, value, state_type, _DEPTH):
        if kind == "state":
            raise ValueError(f"a state cannot hold another one, which is in `{path}`: give its values to this state")
        raise ValueError(
            f"a state cannot hold {kind} inside another value, which is in `{path}`: a restore would put a copy in its "
            "place, which the script does not use, nor its optimizers. Give each a name of its own: TorchState(encoder=…, "
            "encoder_optimizer=…). torch.nn.ModuleList and ModuleDict are modules themselves"
        )


def _found(path: str, value: Any, state_type: type, depth: int) -> Iterator[tuple[str, str]]:
    if kind := _kind_of(value, state_type):
        yield path, kind
    elif depth and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _found(f"{path}[{key!r}]", inner, state_type, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for number, inner in enumerate(value):
            yield from _found(f"{path}[{number}]", inner, state_type, depth - 1)


def _kind_of(value: Any, state_type: type) -> str | None:
    if isinstance(value, state_type):
        return "state"
    torch = sys.modules.get("torch")
    if torch is None or type(value) in _PLAIN:
        return None
    from elastic_rs.elastic._handlers import is_handled

    if not is_handled(value):
        return None
    if isinstance(value, torch.nn.Module):
        return "a module"
    if isinstance(value, torch.optim.Optimizer):
        return "an optimizer"
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "a learning rate scheduler"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
