"""Hosts that a cluster's own directory names: Slurm, and DNS (a headless service of Kubernetes)."""

from __future__ import annotations

import ipaddress
import os
import re
import socket

from elastic_rs.discovery._programs import DiscoveryError, printed_by
from elastic_rs.discovery._sources import HostDiscovery

TIMEOUT_S = 20.0
GONE = ("down", "drain", "fail", "maint", "boot", "pow", "unk", "no_respond", "reboot", "inval")
"""Prefixes of states in which a node is not this job's any longer. A node that drains (``drng``) still runs it."""


class SlurmHosts(HostDiscovery):
    """The nodes of this Slurm job that are up.

    Each call asks Slurm's controller, by ``sinfo``; a ``--discovery-interval`` of 10 s or more spares it.

    Args:
        slots: of each node; None: those of ``SLURM_NTASKS_PER_NODE``, else ``SLURM_GPUS_ON_NODE``, else 1.

    Raises:
        ValueError: this is no Slurm job.
    """

    def __init__(self, slots: int | None = None) -> None:
        self._nodes = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST") or ""
        if not self._nodes:
            raise ValueError("SLURM_JOB_NODELIST is not set: this is no Slurm job")
        self._slots = slots or _slots_of_slurm() or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the nodes in Slurm's order.

        Raises:
            DiscoveryError: ``sinfo`` fails or says something else.
        """
        listing = printed_by(["sinfo", "--noheader", "--Node", f"--nodes={self._nodes}", "--format=%N %t"], TIMEOUT_S)
        hosts: dict[str, int] = {}
        for line in listing.splitlines():
            name, _, state = line.strip().partition(" ")
            # `*` after the state: the node does not respond.
            if name and state and not state.endswith("*") and not state.startswith(GONE):
                hosts[name] = self._slots
        return hosts


def _slots_of_slurm() -> int | None:
    # `4(x2)` is the number per node for each group of equal nodes. The first group stands for all.
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if found := re.match(r"[1-9]\d*", os.environ.get(name, "")):
            return int(found[0])
    return None


class DnsHosts(HostDiscovery):
    """All addresses of a name, such as a headless service of Kubernetes.

    Args:
        name: the name. It is looked up again at each call.
        slots: of each address.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(self, name: str, slots: int = 1) -> None:
        if not name:
            raise ValueError("no name is given whose addresses are the hosts")
        self._name = name
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the addresses, in the order of their numbers.

        Raises:
            DiscoveryError: the name has no address now.
        """
        try:
            found = socket.getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DiscoveryError(f"`{self._name}` cannot be resolved: {error.strerror or error}") from None
        addresses = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
        ordered = sorted(addresses, key=lambda address: (address.version, int(address)))
        return {str(address): self._slots for address in ordered}
