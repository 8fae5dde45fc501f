"""Counts the steps of optimizers, so that a script that reports none is seen to go on. Imported only beside torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_rs._step import step

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _on_optimizer_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # nothing of this is compiled, so that it is no graph break
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        step._count_no_more()  # the steps that replay the graph are not seen  # noqa: SLF001
    else:
        step._count(step._counts(optimizer))  # noqa: SLF001


# The hook is never removed: torch.compile would compile an optimizer's step again when the hooks have changed.
register_optimizer_step_post_hook(_on_optimizer_step)
