"""What a command line that is not valid leads to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from elastic_rs._exit_codes import Run
from elastic_rs._terminal import error_line

PROG = "elastic-run"


class UsageError(ValueError):
    """The command line is not valid. The message names the flag, the value that was given and what is allowed."""

    hint = f"{PROG} --help lists all flags"
    """The line that follows the message, if any."""
    everywhere = False
    """Whether every other node of the job would find the same."""

    def name_variables(self, variables: Mapping[str, Sequence[str]]) -> None:
        """Add to the message which variables set the flags that it names."""
        words = str(self).replace("`", " ").replace("=", " ").replace(":", " ").replace(",", " ").split()
        found = [
            f"{variable} sets {next(name for name in names if name in words)}"
            for variable, names in variables.items()
            if not set(names).isdisjoint(words)
        ]
        if found:
            self.args = ("; ".join([str(self), *found]),)


class CommandLineError(UsageError):
    """The command line alone shows what is wrong, whatever folders and devices a node has."""

    everywhere = True


def fail(message: str, hint: str = UsageError.hint) -> NoReturn:
    """End the process with exit code 2: the command line is not valid."""
    try:
        sys.stderr.write("".join(f"{line}\n" for line in (error_line(PROG, message), hint) if line))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # stderr is closed or full. Python would flush it again at its end, and exit with another code.
        sys.stderr = None
    raise SystemExit(Run.NOT_VALID)
