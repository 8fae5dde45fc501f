"""The metrics that PyTorch's agent emits, under PyTorch's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed.elastic.metrics.api import prof

F = TypeVar("F", bound="Callable[..., Any]")


def measured(name: str) -> Callable[[F], F]:
    """Have a method emit the metrics of PyTorch's of that name, which does the same."""

    def measured(method: F) -> F:
        own, method.__qualname__ = method.__qualname__, name
        wrapped: Any = prof(method)
        wrapped.__qualname__ = own
        return cast("F", wrapped)

    return measured
