"""Ports for tests. They are held until the test ends, so that no other process is given them meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Return a function that returns a new free port each time.

    The socket that holds a port is bound and does not listen. A server can bind the port as well, because both allow
    address reuse. The kernel does not give the port to processes that ask for any port.
    """
    with contextlib.ExitStack() as held:

        def another() -> int:
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            return int(holder.getsockname()[1])

        yield another


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
    """Return a free port."""
    return free_port()
