"""Which hosts a job may use: for ``elastic-run --host-discovery``, and for drivers of your own.

A subclass of :class:`HostDiscovery` says which hosts there are now, and how many workers each takes::

    class Mine(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {"node1": 8, "node2": 8}

    elastic-run --host-discovery=my_module:Mine --min-np=8 train.py

The classes have the names and methods of ``horovod.runner.elastic.discovery``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs import _imported

if TYPE_CHECKING:
    from elastic_rs.discovery._clusters import DnsHosts, SlurmHosts
    from elastic_rs.discovery._manager import DiscoveredHosts, HostManager
    from elastic_rs.discovery._programs import DiscoveryError
    from elastic_rs.discovery._sources import FileHosts, FixedHosts, HostDiscovery, HostDiscoveryScript
    from elastic_rs.elastic._exceptions import HostUpdateResult

__all__ = [
    "DiscoveredHosts",
    "DiscoveryError",
    "DnsHosts",
    "FileHosts",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "HostManager",
    "HostUpdateResult",
    "SlurmHosts",
]

_HOMES = {
    "._clusters": ("DnsHosts", "SlurmHosts"),
    "._manager": ("DiscoveredHosts", "HostManager", "HostUpdateResult"),
    "._programs": ("DiscoveryError",),
    "._sources": ("FileHosts", "FixedHosts", "HostDiscovery", "HostDiscoveryScript"),
}


def __getattr__(name: str) -> Any:
    return _imported(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return list(__all__)
