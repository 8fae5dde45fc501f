"""The rendezvous backend ``rust-etcd``: a handler for PyTorch's agent over the core's session with an etcd cluster.

No process of the job matters: any node, and any member of the cluster, may end. Every node watches the state of its run
at etcd, so whatever PyTorch's agent asks between rounds is answered from memory.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from elastic_rs import _elastic_rs
from elastic_rs.rendezvous._config import ETCD_NAMES, RUST_ETCD
from elastic_rs.rendezvous._etcd import etcd_of, own_address
from elastic_rs.rendezvous._launcher_handler import LauncherHandler, created
from elastic_rs.rendezvous._protection import tunnel_protection
from elastic_rs.rendezvous.etcd_store import EtcdStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from elastic_rs._elastic_rs import Placement, Session
    from elastic_rs._torch_private import Store

STORE_TTL_S = 7200.0
"""How long the keys of PyTorch's agents live after they were written, as long as the state of the run."""


def create_rust_etcd_handler(params: RendezvousParameters) -> RustEtcdRendezvousHandler:
    """Create a handler from what torchrun was given.

    Args:
        params: run id, endpoint, node counts and configuration: ``torch.distributed.elastic``'s class.

    Raises:
        ValueError: the endpoint or a ``--rdzv-conf`` key or value is not allowed, or a file cannot be read; the message
            says what is.
    """
    return created(RustEtcdRendezvousHandler, params)


class RustEtcdRendezvousHandler(LauncherHandler):
    """One node's handler of the backend ``rust-etcd``, as ``torch.distributed.elastic`` calls it.

    Args:
        params: run id, endpoint, node counts and configuration, as torchrun passes them. The endpoint names the members
            of the cluster, ``HOST:PORT,HOST:PORT,...``. The configuration's keys are those of ``--rdzv-conf``.
    """

    __module__ = "elastic_rs.rendezvous"

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params, RUST_ETCD)
        self._etcd = etcd_of(params.endpoint or "", self._config, params.max_nodes)
        self._backend = params.backend if params.backend in ETCD_NAMES else RUST_ETCD

    @functools.cached_property
    def session(self) -> Session:
        """This node's session. It connects in the background from its first use on."""
        address = own_address(self._local_addr, self._nodes[1], self._etcd)
        protection = tunnel_protection(self._config, own_store=self.use_agent_store)
        return _elastic_rs.Session.over_etcd(
            self._etcd, self._node_options(address, self._nodes), protection=protection
        )

    def get_backend(self) -> str:
        """Return ``rust-etcd``, or the name of PyTorch's under which this handler was asked for."""
        return self._backend

    def _leave(self, reason: str, timeout: float, signal: int | None = None) -> None:
        if self._has_session():
            super()._leave(reason, timeout, signal)
        self._ended = True

    @functools.cached_property
    def _shared(self) -> EtcdStore:
        """The store that agents share, in all rounds.

        At etcd, since it then outlives every node: the exit barrier holds when the node with rank 0 has gone.
        """
        timeout = timedelta(seconds=self._config.read_timeout)
        prefix = self._etcd.agents_store(self._run_id)
        return EtcdStore(_elastic_rs.EtcdClient(self._etcd), prefix, timeout, ttl=STORE_TTL_S)

    def store_of(self, placement: Placement) -> Store:
        timeout = timedelta(seconds=self._config.read_timeout)
        return self._round_store(self._shared, placement.round, placement.world_size, timeout)
