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

# Agents wait for the driver, and the driver for its imports. Of these it needs one.
if TYPE_CHECKING:
    from elastic_rs.discovery._clusters import DnsHosts as DnsHosts
    from elastic_rs.discovery._clusters import SlurmHosts as SlurmHosts
    from elastic_rs.discovery._manager import DiscoveredHosts as DiscoveredHosts
    from elastic_rs.discovery._manager import HostManager as HostManager
    from elastic_rs.discovery._manager import HostUpdateResult as HostUpdateResult
    from elastic_rs.discovery._programs import DiscoveryError as DiscoveryError
    from elastic_rs.discovery._sources import FileHosts as FileHosts
    from elastic_rs.discovery._sources import FixedHosts as FixedHosts
    from elastic_rs.discovery._sources import HostDiscovery as HostDiscovery
    from elastic_rs.discovery._sources import HostDiscoveryScript as HostDiscoveryScript

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
    "DiscoveredHosts": "elastic_rs.discovery._manager",
    "DiscoveryError": "elastic_rs.discovery._programs",
    "DnsHosts": "elastic_rs.discovery._clusters",
    "FileHosts": "elastic_rs.discovery._sources",
    "FixedHosts": "elastic_rs.discovery._sources",
    "HostDiscovery": "elastic_rs.discovery._sources",
    "HostDiscoveryScript": "elastic_rs.discovery._sources",
    "HostManager": "elastic_rs.discovery._manager",
    "HostUpdateResult": "elastic_rs.discovery._manager",
    "SlurmHosts": "elastic_rs.discovery._clusters",
}


def __getattr__(name: str) -> Any:
    return _imported(__name__, _HOMES, name)
