"""The findings of ``elastic-run doctor``, and questions with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar

from elastic_rs._threads import start_daemon

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: str
    """``ok``; ``note``, which matters to some jobs; or ``mend``, which matters to this one."""
    check: str
    """Name of the check."""
    text: str
    """What was found."""
    remedy: str = ""
    """Of ``mend``: what to do."""

    def __str__(self) -> str:
        line = f"{self.verdict:<5} {self.check:<12} {_shown(self.text)}"
        return f"{line}\n{'':<18} to mend: {_shown(self.remedy)}" if self.remedy else line


def _shown(text: str) -> str:
    """Escape bytes that are no text and control characters: the text has variables and answers of other programs."""
    text = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", check, text)


def note(check: str, text: str) -> Finding:
    """Nothing is wrong with elastic-run, but the user should know it."""
    return Finding("note", check, text)


def mend(check: str, text: str, remedy: str) -> Finding:
    """Something is wrong, and this is what to do."""
    return Finding("mend", check, text, remedy)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The answer to a question that may never be answered."""

    value: T | None
    elapsed_s: float
    error: str = ""
    """Why there is no value."""
    late: bool = False
    """There is no value because the time was over."""


class Question(Generic[T]):
    """A question to something that may block for ever, such as the resolver. It is asked at once.

    A question that is never answered stays in a daemon thread, which does not keep the process from ending.
    """

    def __init__(self, ask: Callable[[], T]) -> None:
        self._found: list[T] = []
        self._error = ""
        self._began = time.monotonic()
        self._elapsed_s = 0.0
        self._thread: Thread | None = None
        try:
            self._thread = start_daemon(lambda: self._run(ask), "doctor-asks")
        except RuntimeError as error:  # no thread is left: the check `processes` reports it
            self._error = str(error)

    def _run(self, ask: Callable[[], T]) -> None:
        try:
            self._found.append(ask())
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: a name that cannot be encoded
            self._error = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._elapsed_s = time.monotonic() - self._began

    def answer(self, limit_s: float) -> Answer[T]:
        """Wait for the answer until ``limit_s`` after the question."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._began + limit_s - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            return Answer(None, limit_s, error=f"no answer within {limit_s:g} s", late=True)
        return Answer(self._found[0] if self._found else None, self._elapsed_s, error=self._error)


def asked(ask: Callable[[], T], limit_s: float) -> Answer[T]:
    """Ask, and wait at most ``limit_s``."""
    return Question(ask).answer(limit_s)
