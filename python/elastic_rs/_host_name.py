"""This host's fully qualified name, looked up once per process by a separate thread.

``socket.getfqdn`` asks a name server. One that never answers costs 10 s or more each time, and PyTorch's launcher asks
for every event and every line of a report.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import socket
import threading
import time
from typing import Any

from elastic_rs._threads import start_daemon

PATIENCE_S = 1.0
"""How long callers wait for the look-up, counted from its start."""

MODULES = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.events",
    "torch.distributed.elastic.multiprocessing.errors",
)
"""PyTorch's modules that put the name into events and reports. Modules that send it to other nodes are not included."""


class _Question:
    def __init__(self) -> None:
        self.name = socket.gethostname()  # `getfqdn` falls back to it too
        self._answered = threading.Event()
        self._due = time.monotonic() + PATIENCE_S
        start_daemon(self._ask, "elastic_rs-host-name")

    def _ask(self) -> None:
        # A name of 64 letters, the longest that Linux has, is too long for a part of a name in DNS.
        with contextlib.suppress(UnicodeError):
            self.name = socket.getfqdn()
        self._answered.set()

    def wait(self) -> None:
        self._answered.wait(max(0.0, self._due - time.monotonic()))


@functools.cache
def _question() -> _Question:
    return _Question()


def ask() -> None:
    """Start the look-up, if it has not been started yet."""
    _question()


def host_name(*, wait: bool = False) -> str:
    """Return the fully qualified name, or the short one as long as no name server has answered.

    With ``wait`` it is waited for, at most until 1 s after the look-up began.
    """
    question = _question()
    if wait:
        question.wait()
    return question.name


def wait_for_readers(destination: str) -> None:
    """Wait for the fully qualified name if a handler of PyTorch's events of that destination shows it.

    No longer than :func:`host_name` does.
    """
    from torch.distributed.elastic.events.handlers import get_logging_handler

    if not isinstance(get_logging_handler(destination), logging.NullHandler):
        host_name(wait=True)


def spare_torch_the_wait() -> None:
    """Answer :func:`host_name` where PyTorch's agent, events and reports call ``socket.getfqdn`` for this host."""
    ask()
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if getattr(module, "socket", None) is socket:
            module.socket = _Socket()


class _Socket:
    """Replaces the module ``socket`` in a module of PyTorch's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def getfqdn(self, name: str = "") -> str:
        """Return what ``socket.getfqdn`` returns, but without waiting for this host's own name."""
        this_host = ("", "0.0.0.0", "::", socket.gethostname())  # noqa: S104 - names, nothing is bound
        return host_name() if name in this_host else socket.getfqdn(name)
