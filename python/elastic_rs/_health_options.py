"""What is checked before a node joins: ``--health-check``, or a variable for PyTorch's launcher. A flag comes first."""

from __future__ import annotations

import os

from elastic_rs._hang_options import name_of

HEALTH_CHECK = "ELASTIC_RS_HEALTH_CHECK"
BUILT_IN = "builtin"
"""No command, but what is built in."""


def health_check_of(given: str | None = None) -> str | None:
    """Return what is checked before a node joins: ``builtin``, or a command. None: nothing.

    Raises:
        ValueError: no shell could run it. The message names the flag or the variable.
    """
    check = os.environ.get(HEALTH_CHECK) or None if given is None else given
    if check is not None and (not check.strip() or "\0" in check):
        name = name_of("--health-check", HEALTH_CHECK, given)
        raise ValueError(f"{name} is `{check!r}`, must be {BUILT_IN} or a command of the shell: '/opt/check-node.sh'")
    return check
