"""A standby: a process that has run the script up to ``run``, and gets its place when another worker fails."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping

STANDBY = "ELASTIC_RS_STANDBY"
PLACE = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Variables of a worker's place."""


class Reads:
    """Which variables of a place the script reads before it has one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._class = type(os.environ)

    def begin(self) -> None:
        """Begin to record which variables the script reads from ``os.environ``, if this process is a standby."""
        if not os.environ.get(STANDBY):
            return
        values, plain = self._values, self._class
        copied: deque[str] = deque()  # names that were listed, and are read in this order by who copies all of them

        # mypy does not know the class of `os.environ` as a base: its name in `os` is private.
        class Noting(plain):  # type: ignore[misc, valid-type]
            def __getitem__(self, name: str) -> str:
                value: str = super().__getitem__(name)
                if copied and copied[0] == name:
                    copied.popleft()
                elif name in PLACE:
                    values[name] = value
                return value

            def __iter__(self) -> Iterator[str]:
                names = list(super().__iter__())
                copied.clear()
                copied.extend(names)
                return iter(names)

        os.environ.__class__ = Noting

    def end(self) -> None:
        """Stop recording: the script has called ``run``."""
        os.environ.__class__ = self._class
        os.environ.pop(STANDBY, None)

    def other_than(self, place: Mapping[str, str]) -> list[str]:
        """Return the variables that were read and have another value in this place, as ``NAME=value``."""
        return [f"{name}={value}" for name, value in sorted(self._values.items()) if place.get(name, value) != value]


READS = Reads()
READS.begin()
