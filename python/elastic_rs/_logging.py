"""The destination of this package's log records in its own commands, and under torchrun."""

from __future__ import annotations

import logging
import os
import sys

from elastic_rs import _elastic_rs
from elastic_rs._terminal import BOLD, DIM, GREEN, RED, YELLOW, paint, shows_colours

_drawn: set[str] = set()
"""Run ids that nobody has chosen. Log lines are not marked with them."""

_COLOURS = {"WARNING": YELLOW, "ERROR": RED, "CRITICAL": RED}


def draw_run_id() -> str:
    """Draw a name for a job that was given none. Its log lines do not begin with it."""
    import uuid  # takes a millisecond, and most jobs have names

    run_id = str(uuid.uuid4())
    _drawn.add(run_id)
    return run_id


def show_logs_if_asked() -> None:
    """Print this package's log records on stderr if ``ELASTIC_RS_LOG`` names a level (``debug``, ``info``, ...).

    Without it they go wherever Python's ``logging`` is configured to send them; if nowhere, warnings go to stderr, and
    what the logger ``elastic_rs.job`` says: who is who, and what a recovery has cost.
    """
    level = os.environ.get("ELASTIC_RS_LOG", "").upper()
    logger = logging.getLogger("elastic_rs")
    if not level:
        _add_handler(logger).addFilter(lambda _: not logging.getLogger().handlers)
        logging.getLogger("elastic_rs.job").setLevel(logging.INFO)
        _elastic_rs.reset_log_levels()
        return
    if level not in logging.getLevelNamesMapping():
        logger.warning("ELASTIC_RS_LOG is `%s`, must be one of debug, info, warning, error: ignored", level.lower())
        return
    show_logs(level)


def show_logs(level: str) -> None:
    """Print this package's log records of that level and above on stderr."""
    logger = logging.getLogger("elastic_rs")
    logger.setLevel(level)
    _add_handler(logger)
    logger.propagate = False
    logging.getLogger("elastic_rs.job").setLevel(logging.NOTSET)
    _elastic_rs.reset_log_levels()


def _add_handler(logger: logging.Logger) -> logging.Handler:
    """Replace the handler that was made here before, if any."""
    handler = _Stderr()
    handler.setFormatter(_Short())
    logger.addHandler(handler)
    # Of two threads that both do this, the later handler stays: each removes those before the last one.
    for before in [one for one in logger.handlers if isinstance(one, _Stderr)][:-1]:
        logger.removeHandler(before)
    return handler


class _Stderr(logging.Handler):
    """Writes to the present ``sys.stderr``: programs replace it and close the previous one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # A record that cannot be written is dropped. An exception of a signal handler is passed on.
            self.handleError(record)


class _Short(logging.Formatter):
    """``[elastic_rs] 12:00:01.234 INFO rendezvous: TEXT``, in colours if stderr shows them."""

    def format(self, record: logging.LogRecord) -> str:
        part = record.name.removeprefix("elastic_rs.").partition(".")[0]
        text, colour = _without_drawn(record.getMessage()), _COLOURS.get(record.levelname, "")
        on = shows_colours(sys.stderr)
        clock = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        head = paint(f"[elastic_rs] {clock}", DIM, on=on)
        level = paint(record.levelname, colour, on=on and bool(colour))
        if part == "job":
            text = paint(text, GREEN if " recovered in " in text else BOLD, on=on)
        text = f"{head} {level} {part}: {text}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _without_drawn(text: str) -> str:
    run_id, found, rest = text.removeprefix("[").partition("] ")
    return rest if found and run_id in _drawn else text
