"""Threads that take no signals: those belong to the main thread, which waits in calls that only a signal to it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic_rs import _elastic_rs


def start_daemon(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that takes no signals, and that does not keep the process from ending.

    Raises:
        RuntimeError: no thread is left.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _elastic_rs.without_signals(thread.start)
    return thread
