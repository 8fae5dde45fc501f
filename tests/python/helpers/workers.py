"""The lines that ``scripts/worker.py`` and ``scripts/family.py`` print: ``WORKER rank=0 world=2 ...``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .procs import Process


def place(node: Process, world: int, *, host: str | None = None, since: int = 0) -> dict[str, str]:
    """Wait for a worker of the node in a world of that size, and return the values that it printed.

    A driver's lines begin with the host's name: ``host`` waits for a worker on that host.
    """
    begin = "" if host is None else rf"^\[{host}\] "
    values = node.line(rf"{begin}WORKER (.*\bworld={world}\b.*)", since=since)[1]
    return dict(value.split("=", 1) for value in values.split())
