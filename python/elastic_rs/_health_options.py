"""What is checked before a node joins: ``--health-check``, or a variable for PyTorch's launcher. A flag comes first."""

from __future__ import annotations

from elastic_rs._hang_options import command_of

HEALTH_CHECK = "ELASTIC_RS_HEALTH_CHECK"
BUILT_IN = "builtin"
"""The value that asks for the built-in checks alone."""


def health_check_of(given: str | None = None) -> str | None:
    """Return what is checked before a node joins: ``builtin``, or a command. None: nothing.

    Raises:
        ValueError: no shell could run it. The message names the flag or the variable.
    """
    must_be = f"{BUILT_IN} or a command of the shell: '/opt/check-node.sh'"
    return command_of("--health-check", HEALTH_CHECK, given, must_be)
