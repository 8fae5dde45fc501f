"""Log records of ``elastic-run``, whose process imports ``logging`` only if something else does.

That import takes as long as all others of an agent together. Where nothing has imported ``logging``, nobody can have
configured it, and records are written here as it would write them. The core's records go the same way
(``crates/py/src/logging.rs``).
"""

from __future__ import annotations

import os
import sys
import time

from elastic_rs import _elastic_rs
from elastic_rs._terminal import BOLD, DIM, GREEN, RED, YELLOW, paint, shows_colours

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

__all__ = ["Log", "line", "ready", "show", "show_logs_if_asked"]

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
_NAMES = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}
_COLOURS = {"WARNING": YELLOW, "ERROR": RED, "CRITICAL": RED}

_pending = False
"""The destination of records was asked for, and ``logging`` does not know it yet."""
_all, _job = WARNING, WARNING
"""The lowest level that is shown while ``logging`` is not imported. ``elastic_rs.job`` has its own."""


def show_logs_if_asked() -> None:
    """Do what ``_logging.show_logs_if_asked`` does: now if something uses ``logging``, else when something does."""
    global _pending, _all, _job  # noqa: PLW0603 - one destination for the process
    _pending = True
    asked = os.environ.get("ELASTIC_RS_LOG", "").upper()
    levels = {name: level for level, name in _NAMES.items()}
    if "logging" in sys.modules or (asked and asked not in levels):
        ready()  # `logging` has names for further levels
        return
    _all, _job = (levels[asked], levels[asked]) if asked else (WARNING, INFO)
    _elastic_rs.expect_log_records(all=_all, job=_job)


def ready() -> None:
    """Let ``logging`` know the destination, if it was asked for. The core calls it before its first record there."""
    global _pending  # noqa: PLW0603
    if _pending:
        from elastic_rs import _logging

        _logging.show_logs_if_asked()  # two threads may both do it
        _pending = False


def show(level: int, name: str, text: str) -> None:
    """Write a record to stderr as ``logging`` would, which nothing has imported.

    Args:
        level: its number in ``logging``.
        name: of the logger.
        text: the message.
    """
    if level < (_job if name == "elastic_rs.job" else _all):
        return
    # In a process that has not asked for a destination, `logging` writes the bare message of a warning.
    shown = line(name, _NAMES[level], text, time.time()) if _pending else text
    try:
        sys.stderr.write(f"{shown}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return  # a record that cannot be written is dropped


def line(name: str, level: str, text: str, at: float) -> str:
    """Return ``[elastic_rs] 12:00:01.234 INFO rendezvous: TEXT``, in colours if stderr shows them.

    Args:
        name: of the logger.
        level: the name of the record's level.
        text: the message.
        at: when, in seconds since 1970.
    """
    part = name.removeprefix("elastic_rs.").partition(".")[0]
    on, colour = shows_colours(sys.stderr), _COLOURS.get(level, "")
    clock = f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"
    head = paint(f"[elastic_rs] {clock}", DIM, on=on)
    shown_level = paint(level, colour, on=on and bool(colour))
    if part == "job":
        text = paint(text, GREEN if " recovered in " in text else BOLD, on=on)
    return f"{head} {shown_level} {part}: {text}"


class Log:
    """The logger of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, text: str, *values: object) -> None:
        """Log at INFO."""
        self._log(INFO, text, values)

    def warning(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log at WARNING."""
        self._log(WARNING, text, values, exc_info=exc_info)

    def debug(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log at DEBUG."""
        self._log(DEBUG, text, values, exc_info=exc_info)

    def _log(self, level: int, text: str, values: tuple[object, ...], *, exc_info: bool = False) -> None:
        # Only `logging` can show an exception.
        if "logging" in sys.modules or (exc_info and level >= _all):
            self._logger().log(level, text, *values, exc_info=exc_info, stacklevel=3)
        else:
            show(level, self._name, text % values if values else text)

    def _logger(self) -> logging.Logger:
        import logging

        ready()
        return logging.getLogger(self._name)
