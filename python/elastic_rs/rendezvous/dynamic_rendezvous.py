"""``DynamicRendezvousHandler``: PyTorch's class of that name, over the core's decisions, with PyTorch's own settings.

The state is in a backend with ``get_state`` and ``set_state``: :class:`elastic_rs.C10dRendezvousBackend`, or a class of
yours. Every node decides by the core's rules and writes what it has decided on condition that nobody was faster.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from elastic_rs import _elastic_rs
from elastic_rs._durations import Duration, as_timedelta
from elastic_rs._elastic_rs import RendezvousConfig
from elastic_rs._torch_private import FileStore, PrefixStore, store_of
from elastic_rs.rendezvous._backend_thread import BackendThread
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._node_handler import NodeHandler
from elastic_rs.rendezvous._protection import decided, tunnel_protection
from elastic_rs.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    from elastic_rs._elastic_rs import Agent, CellSession, Failure, Placement, Session, View
    from elastic_rs._torch_private import Store

__all__ = ["DynamicRendezvousHandler", "RendezvousSettings", "RendezvousTimeout", "create_handler"]

logger = logging.getLogger(__name__)

KEYS = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "cas_backoff_max_seconds",
    "store_peers",
    "store_tunnel",
)
"""Keys of ``--rdzv-conf`` that ``create_handler`` reads."""

_AGE_S = 1.0
"""Largest age of a cached answer about the rendezvous, as in PyTorch's handler."""

T = TypeVar("T")

StorePeers = Literal["same-user", "any"]
"""Which users of this machine may connect to a worker store."""

_local_ids = itertools.count()


class DynamicRendezvousHandler(NodeHandler):
    """One node's handler over a backend that holds the state. Made by :meth:`from_backend`.

    It has the interface of ``torch.distributed.elastic``'s class of that name.

    Args:
        settings: run id, node counts and time limits: torch's class.
        store: what the agents share; each round gets a prefix of its own in it.
        backend: what holds the state. Nothing is asked of it before the first call that needs it.
        local_addr: the address others find this node at. Default: its fully qualified name.
        store_peers: as for :meth:`from_backend`.
        store_tunnel: as for :meth:`from_backend`.

    Raises:
        ValueError: an argument is not allowed.

    >>> from elastic_rs import C10dRendezvousBackend, DynamicRendezvousHandler, TCPStore
    >>> store = TCPStore("127.0.0.1", 0, is_master=True)
    >>> backend = C10dRendezvousBackend(store, "job")
    >>> handler = DynamicRendezvousHandler.from_backend("job", store, backend, 1, 1, local_addr="127.0.0.1")
    >>> info = handler.next_rendezvous()
    >>> info.rank, info.world_size
    (0, 1)
    >>> handler.shutdown()
    True
    """

    @classmethod
    def from_backend(  # noqa: PLR0917 - PyTorch's signature
        cls,
        run_id: str,
        store: Store,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: Duration = 5,
        keep_alive_max_attempt: int = 3,
        cas_backoff_max_seconds: float = 0.0,
        *,
        store_peers: StorePeers = "same-user",
        store_tunnel: bool | str | None = None,
    ) -> DynamicRendezvousHandler:
        """Create a handler.

        Args:
            run_id: the run id.
            store: what the agents share; each round gets a prefix of its own in it.
            backend: what holds the state. Nothing is asked of it before the first call that needs it.
            min_nodes: fewest nodes of a round.
            max_nodes: most nodes of a round.
            local_addr: the address others find this node at; its fully qualified name if not given.
            timeout: time limits.
            keep_alive_interval: how often the node shows that it lives: a ``timedelta``, or seconds.
            keep_alive_max_attempt: after how many missed keep-alives it is lost.
            cas_backoff_max_seconds: checked, without effect: the core spreads writes that were refused by itself.
            store_peers: which users of this machine may connect to the worker stores of this node: ``same-user`` (its
                own and root) or ``any``.
            store_tunnel: workers reach the store of rank 0's node through their agents, which needs a token or
                certificates. None: if the user has named one, and the agents serve the store.

        Raises:
            ValueError: an argument is not allowed.
        """
        if not math.isfinite(cas_backoff_max_seconds) or cas_backoff_max_seconds < 0:
            raise ValueError(f"cas_backoff_max_seconds ({cas_backoff_max_seconds}) must be finite and non-negative.")
        # Older versions of torch do not have it.
        has_backoff = "cas_backoff_max_seconds" in RendezvousSettings.__dataclass_fields__
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            keep_alive_interval=as_timedelta("keep_alive_interval", keep_alive_interval),
            keep_alive_max_attempt=keep_alive_max_attempt,
            **({"cas_backoff_max_seconds": cas_backoff_max_seconds} if has_backoff else {}),
        )
        return cls(settings, store, backend, local_addr, store_peers=store_peers, store_tunnel=store_tunnel)

    def __init__(
        self,
        settings: RendezvousSettings,
        store: Store,
        backend: RendezvousBackend,
        local_addr: str | None = None,
        *,
        store_peers: StorePeers = "same-user",
        store_tunnel: bool | str | None = None,
    ) -> None:
        _check(settings)
        addr = local_addr or socket.getfqdn()
        self._node = f"{addr}_{os.getpid()}_{next(_local_ids)}"
        given: dict[str, object] = {"store_peers": store_peers}
        if store_tunnel is not None:
            given["store_tunnel"] = store_tunnel
        asked = RendezvousConfig.from_mapping(given, backend="rust-c10d")
        config = decided(asked, own_store=shares_store()).replace(
            join_timeout=settings.timeout.join.total_seconds(),
            last_call_timeout=settings.timeout.last_call.total_seconds(),
            close_timeout=settings.timeout.close.total_seconds(),
            keep_alive_interval=settings.keep_alive_interval.total_seconds(),
            keep_alive_max_attempt=settings.keep_alive_max_attempt,
        )
        super().__init__(run_id=settings.run_id, config=config, name=self._node)
        self._local_addr = addr
        self._settings = settings
        self._store = store
        self._backend, self._backend_name = backend, backend.name
        self._cell = self._new_session()
        self._driver = BackendThread(self._cell, backend)
        # A handler that is dropped leaves as one that is shut down does, without waiting.
        weakref.finalize(self, self._driver.stop).atexit = False

    @property
    def settings(self) -> RendezvousSettings:
        """The settings of the rendezvous."""
        return self._settings

    def _new_session(self) -> CellSession:
        nodes = (self._settings.min_nodes, self._settings.max_nodes)
        protection = tunnel_protection(self._config, own_store=self.use_agent_store)
        options = self._node_options(self._local_addr, nodes)
        return _elastic_rs.CellSession(options, serves=_may_serve(self._backend), protection=protection)

    def serve_agent(self, role: str, local_world_size: int, max_restarts: int, script: str) -> None:
        """Serve an agent of ours, which calls this before it joins.

        Args:
            role: of the workers.
            local_world_size: number of this node's workers.
            max_restarts: how often workers may be restarted.
            script: the name of what they run, for messages.
        """
        super().serve_agent(role, local_world_size, max_restarts, script)
        self._cell = self._new_session()
        self._driver.serve(self._cell)

    @property
    def session(self) -> Session:
        """This node's session. The backend is called from its first use on."""
        self._driver.start()
        return self._cell.session

    def join(self, agent: Agent | None = None) -> Placement | Failure | None:
        """Join the next round for an agent of ours: see :meth:`NodeHandler.join`.

        Args:
            agent: it hears meanwhile that its machine is taken away, which withdraws the join.
        """
        with self._driver.explaining():
            return super().join(agent)

    def get_backend(self) -> str:
        """Return the backend's name."""
        return self._backend_name

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round and block until it has completed.

        Raises:
            RendezvousTimeoutError: no round completed within the join timeout.
            RendezvousClosedError: the job is over.
            RendezvousGracefulExitError: the job ended and this node, a spare, was not needed.
            RendezvousConnectionError: the backend has not worked for a lease.
            RendezvousStateError: what the backend holds is not a state of this package.
        """
        with self._driver.explaining():
            return super().next_rendezvous()

    def is_closed(self) -> bool:
        """Whether the rendezvous was closed, as read from the backend no more than a second ago."""
        return self._recording(super().is_closed)

    def set_closed(self) -> None:
        """End the rendezvous for everybody.

        Raises:
            RendezvousTimeoutError: it could not be written within the close timeout.
        """
        self._recording(super().set_closed)

    def num_nodes_waiting(self) -> int:
        """Return above zero when the world must re-form: nodes wait to join, or a member was lost."""
        return self._recording(super().num_nodes_waiting)

    def shutdown(self) -> bool:
        """End this node's part, and the job's where that is due: see :meth:`NodeHandler.shutdown`.

        Returns:
            False if the rendezvous could not be closed.
        """
        ended_before = self._can_no_longer_take_part()
        try:
            return super().shutdown()
        except api.RendezvousError as error:
            message = (
                f"The node '{self._node}' has failed to shutdown the rendezvous '{self._run_id}' due to an error of "
                f"type {type(error).__name__}."
            )
            self._record(message, NodeState.FAILED)
            # The agent has reported the error with which this node had ended before.
            logger.log(logging.DEBUG if ended_before else logging.WARNING, "%s (%s)", message, error)
            self._stop_heartbeats()
            return False

    def _can_no_longer_take_part(self) -> bool:
        if not self._driver.started:
            return False
        try:
            self._cell.session.view()
        except api.RendezvousError:
            return True
        return False

    def _recording(self, call: Callable[[], T]) -> T:
        """Call, and record what is raised, as PyTorch does."""
        try:
            with self._driver.explaining():
                return call()
        except Exception as error:
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            raise

    def _close(self, cause: str | None = None) -> None:
        self.session.close(cause=cause, timeout_s=self._config.close_timeout)
        self._record(f"The node '{self._node}' has closed the rendezvous '{self._run_id}'.", NodeState.SUCCEEDED)

    def _leave(self, reason: str, timeout: float, signal: int | None = None) -> None:
        if self._driver.started:  # otherwise the backend was asked for nothing, and knows nothing of this node
            super()._leave(reason, timeout, signal)
        self._ended = True

    def _view(self) -> View:
        self._driver.start()
        return self._cell.fresh_view(age_s=_AGE_S)

    def store_of(self, placement: Placement) -> Store:
        """Return the store that the agents share, with a prefix of its own for this round.

        Args:
            placement: what :meth:`join` has returned.
        """
        timeout: timedelta = getattr(self._store, "timeout", timedelta(seconds=300))
        # PyTorch's first round has the number 0.
        return self._round_store(self._store, placement.round - 1, placement.world_size, timeout)

    def _stop_heartbeats(self) -> None:
        """Leave without waiting."""
        self._driver.stop()


def _may_serve(backend: RendezvousBackend) -> bool:
    """Whether the backend's state may end with this process. PyTorch's stores do not say whether they serve."""
    if isinstance(backend, EtcdRendezvousBackend):
        return False
    store = store_of(backend)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, FileStore) and getattr(store, "is_server", True)


def _check(settings: RendezvousSettings) -> None:
    """Refuse invalid settings, in PyTorch's words."""
    if not settings.run_id:
        raise ValueError("The run id must be a non-empty string.")
    if settings.min_nodes < 1:
        raise ValueError(f"The minimum number of nodes ({settings.min_nodes}) must be greater than zero.")
    if settings.max_nodes < settings.min_nodes:
        raise ValueError(
            f"The maximum number of nodes ({settings.max_nodes}) must be greater than or equal to the minimum "
            f"number of nodes ({settings.min_nodes})."
        )


def create_handler(store: Store, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create a handler from what torchrun was given.

    Reads ``join_timeout``, ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout``, ``keep_alive_interval``,
    ``keep_alive_max_attempt`` (whole numbers, seconds), ``cas_backoff_max_seconds``, ``store_peers`` and
    ``store_tunnel`` of the configuration.

    Args:
        store: what the agents share.
        backend: what holds the state.
        params: run id, node counts, address and configuration.

    Raises:
        TypeError: a keep-alive key is None.
        ValueError: a value is not allowed.

    >>> from elastic_rs import create_backend, create_handler
    >>> from torch.distributed.elastic.rendezvous import RendezvousParameters
    >>> params = RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, local_addr="127.0.0.1")
    >>> backend, store = create_backend(params)
    >>> handler = create_handler(store, backend, params)
    >>> handler.next_rendezvous().world_size
    1
    >>> handler.shutdown()
    True
    """
    try:
        timeout = RendezvousTimeout(
            *(
                _seconds(params, key)
                for key in ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
            )
        )
        interval, attempts = _required(params, "keep_alive_interval", 5), _required(params, "keep_alive_max_attempt", 3)
        given = params.get("cas_backoff_max_seconds", 0.0)
        try:
            back_off = float(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cas_backoff_max_seconds({given!r}) is not a valid float value.") from error
        return DynamicRendezvousHandler.from_backend(
            params.run_id,
            store,
            backend,
            params.min_nodes,
            params.max_nodes,
            params.local_addr,
            timeout,
            keep_alive_interval=interval,
            keep_alive_max_attempt=attempts,
            cas_backoff_max_seconds=back_off,
            store_peers=params.get("store_peers", "same-user"),
            store_tunnel=params.get("store_tunnel"),
        )
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(message=message, run_id=params.run_id, node_state=NodeState.FAILED)
        raise


def _seconds(params: RendezvousParameters, key: str) -> timedelta | None:
    value = params.get_as_int(key)
    return None if value is None else timedelta(seconds=value)


def _required(params: RendezvousParameters, key: str, default: int) -> int:
    value = params.get_as_int(key, default)
    if value is None:
        raise TypeError(f"You passed '{key}=None' as a rendezvous configuration option")
    return value


def __dir__() -> list[str]:
    return list(__all__)
