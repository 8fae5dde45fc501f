"""A control group that freezes what runs in it, as a machine stands still that is about to go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.stores import until

V1, V2 = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")
IN_V1, IN_V2 = ("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0")


class Freezer:
    """A control group, of either version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._frozen, self._thawed = IN_V2 if (folder / IN_V2[0]).exists() else IN_V1

    @property
    def under(self) -> list[str]:
        """Return the prefix that runs a command in this group."""
        return ["sh", "-c", f'echo $$ >{self._folder}/cgroup.procs && exec "$@"', "sh"]

    def freeze(self) -> None:
        """Freeze all processes. With version 1 even SIGKILL takes effect only after ``thaw``."""
        (self._folder / self._file).write_text(self._frozen)
        if self._file == IN_V1[0]:
            until("all stand still", lambda: (self._folder / self._file).read_text().strip() == self._frozen)

    def thaw(self) -> None:
        """Let the processes go on."""
        (self._folder / self._file).write_text(self._thawed)

    def processes(self) -> list[int]:
        """Return the processes of this group."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """Make a control group. Its processes go on at the end."""
    name = f"elastic_rs-{os.getpid()}-{time.monotonic_ns()}"
    folder = (V1 if V1.exists() else V2) / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets no test make a control group: {error}")
    made = Freezer(folder)
    try:
        yield made
    finally:
        made.thaw()
        for pid in made.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until("its processes have ended", lambda: not made.processes())
        folder.rmdir()
