"""What a state must not hold inside a plain value. Needs no torch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MOST = 10_000
"""So many values are looked at: each assignment of a list would take a second if it has a million."""

# Deeper lists of lists are data.
_DEPTH = 4
_PLAIN = {bool, float, int, str, bytes, type(None)}


def refuse_parted(name: str, value: Any, state_type: type) -> None:
    """Raise if a plain value contains a state, or what a ``TorchState`` has a handler for: a module, an optimizer.

    A plain value is saved as a deep copy. After a restore it would hold another module than the one that the script and
    the optimizer have.
    """
    if found := _first(name, value, state_type):
        path, kind = found
        if kind == "state":
            raise ValueError(f"a state cannot hold another one, which is in `{path}`: give its values to this state")
        raise ValueError(
            f"a state cannot hold {kind} inside another value, which is in `{path}`: a restore would put a copy in its "
            "place, which the script does not use, nor its optimizers. Give each a name of its own: "
            "TorchState(encoder=…, encoder_optimizer=…). torch.nn.ModuleList and ModuleDict are modules themselves"
        )


def _first(name: str, value: Any, state_type: type) -> tuple[str, str] | None:
    """Return where the first such value is, and its kind. Outer values come first, since the look is bounded."""
    waiting, left = deque([(name, value, 0)]), MOST
    while waiting:
        path, value, depth = waiting.popleft()
        if kind := _kind_of(value, state_type):
            return path, kind
        if depth == _DEPTH or left == 0:
            continue
        for key, inner in islice(_inside(value), left):
            left -= 1
            if type(inner) not in _PLAIN:
                waiting.append((f"{path}[{key!r}]", inner, depth + 1))
    return None


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, set, frozenset)) else ()


def _kind_of(value: Any, state_type: type) -> str | None:
    if isinstance(value, state_type):
        return "state"
    torch = sys.modules.get("torch")
    if torch is None:
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
