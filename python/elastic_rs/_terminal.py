"""Colours on a terminal, and lines on standard output whose reader may have gone."""

from __future__ import annotations

import os
import sys
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"
_PLAIN = "\x1b[0m"


def shows_colours(stream: TextIO | None) -> bool:
    """Return whether to colour what is written there.

    Never if ``NO_COLOR`` is set and not empty (https://no-color.org), ``TERM`` is ``dumb``, or it is no terminal.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or stream is None:
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # not a file, or closed
        return False


def error_line(program: str, text: str) -> str:
    """Return ``PROGRAM: error: TEXT``, in colours if stderr shows them."""
    return f"{program}: {paint('error:', RED, on=shows_colours(sys.stderr))} {text}"


def warning_line(program: str, text: str) -> str:
    """Return ``PROGRAM: warning: TEXT``, in colours if stderr shows them."""
    return f"{program}: {paint('warning:', YELLOW, on=shows_colours(sys.stderr))} {text}"


def print_line(text: str) -> None:
    """Print, in whatever encoding stdout has. If its reader has gone (`| head -1`), the exit code stays the same.

    Raises:
        SystemExit: stdout cannot be written for another reason.
    """
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:  # not one that is missing, or a test's
        reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except OSError as error:
        close_output()
        if not isinstance(error, BrokenPipeError):
            sys.exit(error_line("elastic-run", f"cannot write to standard output: {error.strerror}"))


def close_output() -> None:
    """Write no more to stdout, whose reader has gone. The interpreter would try to flush the rest at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(text: str) -> str:
    """Return one line without characters that steer a terminal: a peer or a program may have written the text."""
    if text.isprintable():  # as nearly all are
        return text
    return "".join(char if char.isprintable() else " " for char in text)


def paint(text: str, colour: str, *, on: bool) -> str:
    """Return the text in a colour, if colours are on."""
    return f"{colour}{text}{_PLAIN}" if on and text else text
