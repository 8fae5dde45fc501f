"""How this package starts a Python of its own: an agent on a host, or a program that asks PyTorch.

Workers, and the fork servers of warm starts, are the user's programs. Their ``sys.path`` begins as Python has it.
"""

from __future__ import annotations

import sys

AGENT = "import sys; from elastic_rs._hosted import main; sys.exit(main())"
"""What an agent's Python runs."""

_entered: str | None = None


def leader_first(asked: object, program: object) -> bool:
    """Return whether the stop signal is for a worker's own process first, and only then for what it has started.

    A shell does not pass a signal on, and another program may rely on PyTorch's way, in which the whole group gets it.

    Args:
        asked: the value of ``first_signal``; None if it is not given.
        program: what is executed as the worker.
    """
    return program == sys.executable if asked is None else asked == "leader"


def arguments(code: str, *args: str) -> list[str]:
    """Return what follows the interpreter in a command line.

    ``-P`` keeps the current folder off ``sys.path``: it may be ``/tmp``, or another folder that others write into.
    """
    return ["-P", "-c", code, *args]


def enter(folder: str) -> None:
    """Note the folder in which scripts of ``--run-path`` find modules. An agent's own imports do not."""
    global _entered  # noqa: PLW0603 - one for the process, as sys.path is
    _entered = folder


def first_folder() -> str:
    """Return the first entry of the ``sys.path`` that a launcher started by its user has."""
    return sys.path[0] if _entered is None else _entered
