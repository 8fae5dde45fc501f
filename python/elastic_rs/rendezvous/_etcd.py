"""A node's part in a rendezvous over etcd, for every front end: the cluster, and the node's own address.

Does not import torch.
"""

from __future__ import annotations

import logging

from elastic_rs import _elastic_rs
from elastic_rs._elastic_rs import EtcdOptions, RendezvousConfig
from elastic_rs._host_name import host_name

logger = logging.getLogger("elastic_rs.rendezvous")

_RESOLVE_S = 5.0


def etcd_of(endpoint: str, config: RendezvousConfig, most_nodes: int) -> EtcdOptions:
    """Read what says where etcd is, and how to speak to it.

    Raises:
        ValueError: the endpoint is not allowed, a file cannot be read, or keys of the configuration contradict one
            another.
    """
    etcd = _elastic_rs.EtcdOptions.of_config(endpoint, config)
    if not endpoint.strip() and most_nodes > 1:
        logger.warning(
            "no --rdzv-endpoint is given: this node asks etcd at %s; for nodes on several machines give all of them "
            "--rdzv-endpoint=HOST:PORT,HOST:PORT,..., the members of one cluster",
            etcd.endpoints,
        )
    return etcd


def own_address(given: str | None, most_nodes: int, etcd: EtcdOptions) -> str:
    """Return the address at which other nodes find this one, which no other process can find out over etcd."""
    if given:
        return given
    if most_nodes == 1:
        return "127.0.0.1"
    address = etcd.source_address(timeout_s=_RESOLVE_S)
    if address is None:
        address = host_name(wait=True)
        logger.info(
            "other nodes find this one by its name `%s`: etcd at %s is on this machine, or its names have no address; "
            "--local-addr=ADDR gives them an address instead",
            address,
            etcd.endpoints,
        )
    return address
