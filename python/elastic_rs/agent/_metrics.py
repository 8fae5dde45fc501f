"""The metrics that PyTorch's agent emits, under PyTorch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.distributed.elastic.metrics.api import prof

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def measured(name: str) -> Callable[[F], F]:
    """Have a method emit the metrics of PyTorch's of that name, which does the same."""

    def measured(method: F) -> F:
        own, method.__qualname__ = method.__qualname__, name
        wrapped: Any = prof(method)
        wrapped.__qualname__ = own
        return cast("F", wrapped)

    return measured
