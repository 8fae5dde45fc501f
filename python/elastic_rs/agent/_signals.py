"""Signals that torchrun gets: those that end the agent, as exceptions, and those that do not."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from elastic_rs import _elastic_rs, _signal_options
from elastic_rs._torch_private import signal_handler

logger = logging.getLogger("elastic_rs.agent")


class SignalError(Exception):
    """A signal ended the agent. PyTorch's ``run`` does not know it: it would report the signal a second time."""

    def __init__(self, error: SignalException) -> None:
        super().__init__(error)
        self.error = error


class Ended(SignalException):
    """A signal ended the agent. PyTorch's exception cannot be pickled."""

    def __reduce__(self) -> tuple[type[Ended], tuple[str, signal.Signals]]:
        """Return what makes it again."""
        return type(self), (str(self), self.sigval)


class EndedProcess(Ended, SystemExit):
    """A signal ended torchrun, whose process ends with this code."""

    def __init__(self, msg: str, sigval: signal.Signals, code: int) -> None:
        super().__init__(msg, sigval)
        self.code = code


def is_torchrun() -> bool:
    """Whether PyTorch's ``torch.distributed.run`` calls, whose process ends with the job. A program's goes on."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way to who calls
    while frame is not None:
        spec = frame.f_globals.get("__spec__")  # of `python -m` too, where `__name__` is another
        if "torch.distributed.run" in {frame.f_globals.get("__name__"), getattr(spec, "name", None)}:
            return True
        frame = frame.f_back
    return False


DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""PyTorch's. Who gives it has chosen nothing."""


def handled_names() -> str:
    """Return the names of the signals that end the agent, as torchrun passes them on."""
    return os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", DEFAULT)


def meanings() -> _signal_options.Meanings:
    """Return what the agent does at signals that do not end it, and how it gets notices, by the variables.

    Raises:
        ValueError: a variable is not valid.
    """
    names = {name.strip() for name in handled_names().split(",")}
    ending = [number for name, number in signal.Signals.__members__.items() if name in names]
    return _signal_options.meanings_of(_signal_options.Given(), ending=ending)


class Handlers:
    """Let the signals that torchrun names in the environment raise ``SignalException``, as PyTorch does.

    One that comes twice within half a second is one. SIGHUP stays ignored if it is (``nohup``), unless others are named
    than PyTorch's.

    Args:
        passed_on: further signals, which end nothing.
        heard: is called when one of them has come, in the middle of whatever the main thread does.
    """

    def __init__(self, passed_on: Sequence[int], heard: Callable[[int], None]) -> None:
        self._passed_on: list[int] = []
        self._heard = heard
        self._pid = os.getpid()
        self._handled: list[int] = []
        self._ignored: list[int] = []
        self._before: dict[int, Any] = {}
        self._others: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            logger.warning("signals are not handled: the agent does not run in the main thread")
            return
        names = handled_names()
        for name in names.split(","):
            number = signal.Signals.__members__.get(name.strip())
            if number == signal.SIGHUP and names == DEFAULT and signal.getsignal(number) == signal.SIG_IGN:
                self._ignored.append(number)
                logger.info(
                    "SIGHUP stays ignored, as it was when this process was started (nohup), here and in the workers; "
                    "--signals-to-handle with other names, and SIGHUP among them, handles it all the same"
                )
                continue
            try:
                if number is None:
                    raise ValueError("there is no such signal")
                self._before[number] = signal.signal(number, signal_handler())
                self._handled.append(number)
            except (ValueError, OSError) as error:
                logger.warning("signal `%s` cannot be handled: %s", name, error)
        # Older versions of torch handle these when they start functions, whatever the environment names.
        torchs = {signal.Signals[name] for name in DEFAULT.split(",")} - {*self._handled, *self._ignored, *passed_on}
        self._others = {number: handler for number in torchs if (handler := signal.getsignal(number)) is not None}
        for further in passed_on:
            self._before[further] = signal.signal(further, self._hear)
            self._passed_on.append(further)
        _elastic_rs.watch_signals(self._handled, passed_on=self._passed_on)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._heard(number)
        else:  # a worker that was forked: what it would do without an agent
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def install_again(self) -> None:
        """Undo what PyTorch does when it starts functions: it installs its own handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                signal.signal(number, signal_handler())
            for number in self._passed_on:
                signal.signal(number, self._hear)
            for number in self._ignored:
                signal.signal(number, signal.SIG_IGN)
            for number, handler in self._others.items():
                signal.signal(number, handler)
            _elastic_rs.watch_signals(self._handled, passed_on=self._passed_on, goes_on=True)

    def restore(self, *, has_ended: bool) -> None:
        """Put back the handlers from before, since a program goes on. Under torchrun they stay: its process ends.

        A signal that has ended the agent may be delivered once more, and must not kill the program then.
        """
        if threading.current_thread() is not threading.main_thread() or is_torchrun():
            return
        again = [number for number, before in self._before.items() if callable(before)]
        for number, before in self._before.items():
            if before is not None and (number in again or not has_ended):
                signal.signal(number, before)
        _elastic_rs.watch_signals(again if has_ended else [], goes_on=True)
