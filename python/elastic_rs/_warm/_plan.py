"""Plans the fork server of warm starts: which command lines can have one, and what it executes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MODULES = ("torch",)

CODE = (
    "import sys; first = sys.path[:1]; del sys.path[:1]; "
    "from elastic_rs._warm._fork_server import main; sys.path[:0] = first; main()"
)
"""What a fork server executes. The modules and the workers' arguments follow.

A folder `elastic_rs` in the working directory is not this package, so the working directory is not searched for it.
"""


@dataclass(frozen=True)
class Plan:
    """The parameters of a fork server, for the core."""

    begin: list[str]
    """Arguments between the workers' program and their own arguments."""
    fixed: int
    """Number of leading arguments that are the same for all workers: up to the script."""
    what: str
    """The modules, for the log."""


def plan(command: Sequence[str], modules: Sequence[str] = DEFAULT_MODULES) -> Plan | str:
    """Plan the fork server for workers with this command, or return why they can have none."""
    if command[0] != sys.executable:
        return f"the workers' program is `{command[0]}`, not this Python, `{sys.executable}`"
    found = target(command[1:])
    if found is None:
        return "the workers' command line is not `python -u SCRIPT` or `python -u -m MODULE`"
    from elastic_rs.run import _path  # not in a fork server, which reads this module too

    if command[1 + found[1]] == _path.__file__:
        return "with --run-path workers start cold; give the script as SCRIPT, or with -m"
    return Plan(["-u", "-c", CODE, ",".join(modules)], found[1] + 1, ", ".join(f"`{name}`" for name in modules))


def target(args: Sequence[str]) -> tuple[bool, int] | None:
    """Find the script in the arguments of ``python``: whether it is a module, and the index of its name.

    None for a command line with other options than ``-u`` and ``-m``.
    """
    at = 1 if args[:1] == ["-u"] else -1
    if at == -1:
        return None
    is_module = args[at : at + 1] == ["-m"]
    at += is_module
    if at >= len(args) or args[at].startswith("-"):
        return None
    return is_module, at
