"""The rendezvous backend ``rust-c10d``: a handler for PyTorch's agent over the core's session.

One process, that of the node whose address the endpoint is, hosts the store and the coordinator on the endpoint's port.
Every node holds one session with it. Whatever PyTorch's agent asks between rounds is answered from memory, which pushes
keep current.
"""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.elastic.events.api import NodeState

from elastic_rs import _elastic_rs
from elastic_rs.errors import RendezvousConnectionError
from elastic_rs.rendezvous._config import (
    DEFAULT_PORT,
    RUST_C10D,
    endpoint_of,
    parse_endpoints,
    warn_of_loopback,
    warn_of_no_endpoint,
)
from elastic_rs.rendezvous._launcher_handler import LauncherHandler, created
from elastic_rs.rendezvous._node import claim, why_not_host
from elastic_rs.rendezvous._protection import protection, refuse_c10d
from elastic_rs.store import TCPStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from elastic_rs._elastic_rs import EndpointServer, Placement, Protection, RendezvousConfig, Session
    from elastic_rs._torch_private import Store


def create_rust_c10d_handler(params: RendezvousParameters) -> RustC10dRendezvousHandler:
    """Create a handler from what torchrun was given.

    Args:
        params: run id, endpoint, node counts and configuration: ``torch.distributed.elastic``'s class.

    Raises:
        ValueError: the endpoint or a ``--rdzv-conf`` key or value is not allowed; the message says what is.
        RendezvousConnectionError: this process must host the coordinator (``is_host=1``) and cannot; the message
            names who has the port, where the system reports it.
    """
    return created(RustC10dRendezvousHandler, params)


class RustC10dRendezvousHandler(LauncherHandler):
    """One node's handler of the backend ``rust-c10d``, as ``torch.distributed.elastic`` calls it.

    Args:
        params: run id, endpoint, node counts and configuration, as torchrun passes them. The configuration's keys are
            those of ``--rdzv-conf``.
    """

    __module__ = "elastic_rs.rendezvous"

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params, RUST_C10D)
        # Before anything can fail: what is left at the process's end looks at it.
        self._host: EndpointServer | None = None
        if not self.wants_agent:
            refuse_c10d("--rdzv-conf agent=torch")
        if self._ranks_as_asked:
            refuse_c10d("--rdzv-backend=static")
        self._protected = self._protection()
        endpoints = parse_endpoints(params.endpoint or "", _default_port(params, self._config), self._config)
        if len(endpoints) > 1 and not self.wants_agent:
            raise ValueError("--rdzv-conf agent is `torch`, must be `rust` with a list of endpoints: docs/takeover.md")
        if len(endpoints) > 1 and self._ranks_as_asked:
            raise ValueError(f"--rdzv-backend=static has the endpoints `{params.endpoint}`, must have one")
        if not params.endpoint:
            warn_of_no_endpoint(params.max_nodes, endpoints[0][1])
        else:
            flag = "--master-addr" if self._ranks_as_asked else "--rdzv-endpoint"
            warn_of_loopback(endpoints, self._config, params.max_nodes, flag)
        self._started = time.monotonic()
        self._host, self._why_not_host = self._claim(endpoints)
        if self._host is not None:
            if len(endpoints) == 1:
                endpoints = [(endpoints[0][0], self._host.port)]
            where = ",".join(endpoint_of(*endpoint) for endpoint in endpoints)
            self._record(f"Process {os.getpid()} hosts the coordinator at {where}.", NodeState.INIT)
        self._endpoints = endpoints

    def _protection(self) -> Protection | None:
        """Return how this process's sessions are protected. None: they are not."""
        return protection()

    @functools.cached_property
    def session(self) -> Session:
        """This node's session. It connects in the background from its first use on."""
        options = self._node_options(self._local_addr, self._nodes)
        return _elastic_rs.Session(self._endpoints, options, coordinator=self._host, protection=self._protected)

    def get_backend(self) -> str:
        """Return ``rust-c10d``."""
        return RUST_C10D

    def _leave(self, reason: str, timeout: float, signal: int | None = None) -> None:
        try:
            if self._has_session():
                super()._leave(reason, timeout, signal)
            elif not self._ended:
                self._ended = True
                # This node has never introduced itself, but others may have.
                if self._host is not None:
                    self._host.wait_for_nodes(timeout_s=self._config.drain_timeout)
        finally:
            # Also if a signal ends the wait: the coordinator's events are written then.
            if self._host is not None:
                self._host.stop()

    def _claim(self, endpoints: list[tuple[str, int]]) -> tuple[EndpointServer | None, str]:
        """Become the coordinator's host, if this process is to be. The second value says why it is not."""
        try:
            # PyTorch's agents meet in the endpoint's store, and so do workers with fixed ranks.
            uses_store = self._ranks_as_asked or not self.wants_agent
            return claim(endpoints, self._run_id, self._config, self._protected, uses_store=uses_store)
        except OSError as error:
            reason = error.strerror or error
            at = ",".join(endpoint_of(*endpoint) for endpoint in endpoints)
            text = f"cannot host the coordinator at {at}: {reason}"
            raise RendezvousConnectionError(text, endpoint=at) from error

    def store_of(self, placement: Placement) -> Store:
        refuse_c10d("PyTorch's agent")
        host, port = self._endpoints[0]
        timeout = timedelta(seconds=self._config.read_timeout)
        store = TCPStore(host, port, timeout=timeout)
        return self._round_store(store, placement.round, placement.world_size, timeout)

    def _explain(self, error: BaseException) -> None:
        if self._why_not_host and isinstance(error, RendezvousConnectionError) and not self.session.was_welcomed:
            error.add_note(why_not_host(self._why_not_host, self._started))


def _default_port(params: RendezvousParameters, config: RendezvousConfig) -> int:
    """Return the port of an endpoint without one: any free port if no other node has to find it.

    torchrun does so for its own ``c10d`` alone; else a second job of one node would meet the first.
    """
    alone = not params.endpoint and params.max_nodes == 1 and config.is_host is not False
    return 0 if alone else DEFAULT_PORT
