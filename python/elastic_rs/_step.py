"""``elastic_rs.step`` and ``section``: the script says where it is. Only :meth:`Step.auto` needs torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

from elastic_rs._elastic_rs import StepCounter, enter_section

if TYPE_CHECKING:
    from inspect import Signature

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class _Signature:
    """The signature of a call of an instance, for ``inspect.signature``. The class itself has another one."""

    def __get__(self, instance: Step | None, owner: type[Step]) -> Signature:
        if instance is None:
            raise AttributeError("__signature__")
        from inspect import signature

        def step(n: int | None = None, /) -> None:
            """Stand for what the core defines."""

        return signature(step)


class Step(StepCounter):
    """Tell the agent that a step of training has ended: ``elastic_rs.step(n)``, once for each optimizer step.

    ``n`` is the global number of the step that has ended, an ``int`` from 0 to 2**53 - 1; larger ones count as that.
    By default it is the one after the last, and the first one is 1. Only a script that names a number, at least once
    after it has loaded its checkpoint, says where it goes on, so that steps that are made again are counted.

    A call costs a fraction of a microsecond: it writes the number and the time into memory that the agent reads when
    a round begins and ends. Where no agent of elastic_rs has started the process, and in a process that was forked from
    a worker, a call does nothing. It may be called in any thread. Of the processes of one worker the first that calls
    it, or ``elastic.init`` or a function of ``elastic.run``, is the one that counts, until it ends.

    Args:
        n: the global number of the step that has ended. Default: the one after the last.

    Raises:
        TypeError: ``n`` is not an integer.
        OverflowError: ``n`` is negative, or larger than 2**64 - 1.

    >>> import elastic_rs
    >>> for number in range(3):
    ...     elastic_rs.step(number)
    """

    __slots__ = ("_counted", "_hook")
    __signature__ = _Signature()

    if TYPE_CHECKING:

        def __new__(cls) -> Self: ...

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._counted: weakref.ref[Optimizer] | None = None

    def auto(self, last: int | None = None) -> RemovableHandle:
        """Call ``step()`` after each step of an optimizer, from now on. Imports torch.

        Of several optimizers only one is counted: the first that makes a step, and if it is deleted, the next one that
        does. A step that a ``GradScaler`` leaves out is none. After a second call only the new hook counts.

        Args:
            last: number of the last step in the checkpoint from which training goes on, 0 for none. By default it is
                not known where it goes on. Call ``auto`` again when the script goes back to an earlier state.

        Returns:
            A handle whose ``remove()`` ends the counting.

        Raises:
            OverflowError: ``last`` is negative.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if last is not None:
            self._go_on_from(last)
        if self._hook is not None:
            self._hook.remove()
        self._counted = None
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)
        return self._hook

    def _on_optimizer_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._counts(optimizer):
            self()

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is the one whose steps are counted."""
        counted = None if self._counted is None else self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        return counted is None or counted is optimizer


step = Step()


@contextmanager
def section(name: str) -> Iterator[None]:
    """Mark a part of the training that takes longer than a step, such as an evaluation.

    A training that makes no step for much longer than usual hangs. A section has limits of its own, which are learnt
    from its earlier runs. Sections may contain others: the innermost counts. Where no agent of elastic_rs has started
    the process, it does nothing.

    Args:
        name: its name, the same on all ranks. 64 different ones have limits.

    Raises:
        TypeError: the name is no text.
        ValueError: it is empty.

    >>> import elastic_rs
    >>> with elastic_rs.section("eval"):
    ...     pass
    """
    if not isinstance(name, str):
        raise TypeError(f"name is `{name!r}`, of type {type(name).__name__}, must be a text")
    if not name:
        raise ValueError("name is empty, must say which section it is")
    before = enter_section(crc32(name.encode(errors="surrogateescape")) or 1)
    try:
        yield
    finally:
        enter_section(before)
