"""The thread that asks a discovery again and again, and hands the answers to the core."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from elastic_rs._elastic_rs import Driver
from elastic_rs._threads import start_daemon
from elastic_rs.discovery._programs import DiscoveryError, kill_running

if TYPE_CHECKING:
    from elastic_rs.discovery._sources import HostDiscovery


class Poll:
    """Asks a discovery again when an interval has passed since its answer, or once if there is none."""

    def __init__(self, discovery: HostDiscovery, listener: Driver, interval_s: float | None) -> None:
        self._discovery = discovery
        self._listener = listener
        self._interval_s = interval_s
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread. It takes no signals."""
        start_daemon(self._run, "elastic_rs-discovery")

    def stop(self) -> None:
        """Stop asking. A call in progress is not waited for; the program that it runs is killed."""
        self._stopped.set()
        kill_running()

    def _run(self) -> None:
        self.ask()
        while self._interval_s is not None and not self._stopped.wait(self._interval_s):
            self.ask()

    def ask(self) -> None:
        try:
            found = self._discovery.find_available_hosts_and_slots()
            self._listener.found([(str(host), int(slots)) for host, slots in found.items()])
        except DiscoveryError as error:
            self._listener.failed(str(error))
        except Exception as error:  # noqa: BLE001 - whatever a user's class raises
            self._listener.failed(f"{type(error).__name__}: {error}")
