"""Ports for tests. They are held until the test ends, so that nobody else on the machine is given them meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Return a function that returns another port each time, on which servers can listen and nobody does yet.

    The socket that holds a port is bound and does not listen. Servers can share the port with it, since both ask for
    address reuse. The kernel does not give it to processes that ask for any port.
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
    """Return one such port."""
    return free_port()
