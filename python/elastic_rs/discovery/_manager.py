"""Horovod's view of a job's hosts, over the core's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_rs._durations import Duration, as_seconds
from elastic_rs._elastic_rs import HostTable
from elastic_rs.elastic._exceptions import HostUpdateResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_rs.discovery._sources import HostDiscovery


class DiscoveredHosts:
    """The hosts that may be used, as they were at one time.

    Args:
        host_slots: pairs of a host and the number of its workers, the oldest host first.
    """

    def __init__(self, host_slots: Sequence[tuple[str, int]]) -> None:
        self._slots = dict(host_slots)

    @property
    def host_slots(self) -> dict[str, int]:
        """The slots of each host."""
        return dict(self._slots)

    @property
    def available_hosts(self) -> set[str]:
        """The names of the hosts."""
        return set(self._slots)

    @property
    def host_assignment_order(self) -> list[str]:
        """The names, the oldest host first. This is the order of ranks."""
        return list(self._slots)

    def get_slots(self, host: str) -> int:
        """Return the slots of a host; 0 if it may not be used.

        Args:
            host: its name.
        """
        return self._slots.get(host, 0)

    def has_host_assignment(self) -> bool:
        """Whether there is a host at all."""
        return bool(self._slots)

    def count_available_slots(self) -> int:
        """Return the slots of all hosts together."""
        return sum(self._slots.values())


class HostManager:
    """The hosts that a discovery finds, in order of age, without those that are kept out.

    Args:
        discovery: where hosts come from.
        cooldown_range: how long a host is kept out, the first time and at most: each a ``timedelta``, or seconds.
            None: for ever.
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: tuple[Duration, Duration] | None = None) -> None:
        self._discovery = discovery
        cooldown_s = None
        if cooldown_range is not None:
            first, most = cooldown_range
            cooldown_s = (as_seconds("cooldown_range", first), as_seconds("cooldown_range", most))
        self._table = HostTable(cooldown_s=cooldown_s)

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts that may be used now. The object does not change later."""
        return DiscoveredHosts(self._table.available())

    def update_available_hosts(self) -> HostUpdateResult:
        """Ask the discovery, and return what has changed since the last time.

        Raises:
            DiscoveryError: it could not be asked. Other discoveries may raise other exceptions. The last list stays.
        """
        found = self._discovery.find_available_hosts_and_slots()
        return HostUpdateResult(self._table.update(list(found.items())))

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """Return the hosts in order of age: those that were there before in their order, then the others.

        Args:
            available_hosts: the hosts that may be used. New ones keep the order in which they are given.
            prev_host_assignment_order: the hosts before, the oldest first.
        """
        available = list(available_hosts)
        known = [host for host in prev_host_assignment_order if host in available]
        return known + [host for host in available if host not in known]

    def blacklist(self, host: str) -> None:
        """Keep a host out, since it has failed.

        Args:
            host: its name.
        """
        self._table.blacklist(host)

    def is_blacklisted(self, host: str) -> bool:
        """Whether a host is kept out.

        Args:
            host: its name.
        """
        return self._table.is_blacklisted(host)
