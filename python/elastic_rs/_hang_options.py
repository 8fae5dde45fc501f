"""The command that runs at a hang, and the lines that show progress: ``--on-hang``, ``--progress-log``, variables.

Variables are for PyTorch's launcher, which has no such flags. A flag has precedence.
"""

from __future__ import annotations

import os

from elastic_rs import _elastic_rs
from elastic_rs._elastic_rs import ProgressPattern

ON_HANG = "ELASTIC_RS_ON_HANG"
PROGRESS_LOG = "ELASTIC_RS_PROGRESS_LOG"


def name_of(flag: str, variable: str, given: str | None) -> str:
    """Return what an error names: the flag if it is given, else the variable."""
    return variable if given is None else flag


def command_of(flag: str, variable: str, given: str | None, must_be: str) -> str | None:
    """Return a command of the shell, from a flag or else a variable. None: there is none.

    Raises:
        ValueError: no shell could run it. The message names the flag or the variable, and says what it ``must_be``.
    """
    command = os.environ.get(variable) or None if given is None else given
    if command is not None and (not command.strip() or "\0" in command):
        raise ValueError(f"{name_of(flag, variable, given)} is `{command!r}`, must be {must_be}")
    return command


def on_hang_of(given: str | None = None) -> str | None:
    """Return the command that runs once a hang is found. None: there is none.

    Raises:
        ValueError: no shell could run it. The message names the flag or the variable.
    """
    return command_of("--on-hang", ON_HANG, given, "a command of the shell: 'mail -s hang me@example.com'")


def progress_log_of(given: str | None = None) -> ProgressPattern | None:
    """Return which lines of workers show progress. None: none does.

    Raises:
        ValueError: it is no regular expression. The message names the flag or the variable.
    """
    pattern = os.environ.get(PROGRESS_LOG) or None if given is None else given
    if pattern is None:
        return None
    try:
        return _elastic_rs.ProgressPattern(pattern)
    except UnicodeEncodeError:
        wrong = f"is `{os.fsencode(pattern).decode(errors='backslashreplace')}`, must be UTF-8"
    except ValueError as error:
        wrong = str(error)
    raise ValueError(f"{name_of('--progress-log', PROGRESS_LOG, given)} {wrong}")
