"""Where teed lines go when ``sys.stdout`` or ``sys.stderr`` is not this process's own stream.

The core writes to file descriptors. A program that has put something of its own there (a notebook, a test,
``redirect_stdout``) finds lines in that with PyTorch's agent, whose tailing is Python; so it does here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Consoles"]

logger = logging.getLogger("elastic_rs.agent")

# Time after which a stream that takes nothing is given up.
END_S = 5.0


class Consoles:
    """The descriptors for the core, and the threads behind those that are pipes."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def of(self, *, stdout: bool, stderr: bool) -> Iterator[tuple[int, int]]:
        """Yield the two descriptors. The core duplicates them. Output ends when it closes its duplicates.

        Args:
            stdout: whether anything is teed there. What workers write to this process's streams themselves stays so.
            stderr: the same.
        """
        with contextlib.ExitStack() as stack:
            yield (
                self._open(1, sys.stdout, stack) if stdout else 1,
                self._open(2, sys.stderr, stack) if stderr else 2,
            )

    def end(self) -> None:
        """Wait until all has been written, once the workers are gone."""
        while self._threads:
            self._threads.pop().join(END_S)

    def _open(self, number: int, stream: Any, stack: contextlib.ExitStack) -> int:
        if stream is None or _descriptor(stream) == number:
            return number
        read, write = os.pipe()
        stack.callback(os.close, write)
        thread = threading.Thread(target=_copy, args=(read, stream), name="elastic_rs-console", daemon=True)
        thread.start()
        self._threads.append(thread)
        return write


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # not a file, or closed
        return None


def _copy(read: int, stream: Any) -> None:
    works = True
    with open(read, encoding="utf-8", errors="replace", newline="") as lines:
        for line in lines:
            if not works:
                continue  # read on: otherwise the core would block, and with it the workers' other streams
            try:
                stream.write(line)
            except Exception:
                works = False
                logger.exception("output of workers is no longer shown: cannot write to `%r`", stream)
