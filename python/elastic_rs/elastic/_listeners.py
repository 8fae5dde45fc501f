"""Objects that are notified of membership changes when they are announced, before the next check."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from elastic_rs._elastic_rs import WorkerChannel
from elastic_rs.elastic._exceptions import HostUpdateResult

_log = logging.getLogger("elastic_rs.elastic")


class Listener(Protocol):
    """Anything with ``on_hosts_updated``."""

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Called in a thread of this package.

        Args:
            timestamp: the number of the change: later ones have larger numbers. In Horovod it is a time.
            update_res: what happens to the number of workers.
        """


class Listeners:
    """The registered listeners, and the thread that calls them. It is started when it has something to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._channel: WorkerChannel | None = None
        self._thread: threading.Thread | None = None

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)
            self._start()

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener]

    def connected(self, channel: WorkerChannel) -> None:
        with self._lock:
            self._channel = channel
            self._start()

    def _start(self) -> None:
        if self._thread is None and self._channel is not None and self._listeners:
            self._thread = threading.Thread(
                target=self._listen, args=(self._channel,), name="elastic_rs-changes", daemon=True
            )
            self._thread.start()

    def _listen(self, channel: WorkerChannel) -> None:
        while True:
            try:
                number, flags = channel.wait_change()
            except (OSError, RuntimeError) as error:  # the agent has gone, or this process ends
                _log.debug("no more changes are announced: %s", error)
                return
            with self._lock:
                listeners = list(self._listeners)
            for listener in listeners:
                try:
                    listener.on_hosts_updated(number, HostUpdateResult(flags))
                except Exception:  # noqa: BLE001 # it is the user's
                    _log.exception("listener %r failed", listener)
