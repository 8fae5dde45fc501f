"""What the handlers of torchrun's backends have in common: its parameters, and which agent is to run the workers."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState

from elastic_rs import _elastic_rs
from elastic_rs._host_name import host_name
from elastic_rs.rendezvous._config import MAX_NODES, config_of
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._node_handler import NodeHandler
from elastic_rs.rendezvous._protection import decided, tunnel_protection

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousParameters

H = TypeVar("H", bound="LauncherHandler")


class LauncherHandler(NodeHandler):
    """One node's handler, made of torchrun's parameters."""

    def __init__(self, params: RendezvousParameters, backend: str) -> None:
        if not params.run_id:
            raise ValueError("The run id must be a non-empty string.")
        # The session would raise this too, but it is made on first use, because our agent adds parameters before.
        _elastic_rs.validate_run_id(params.run_id)
        if params.max_nodes > MAX_NODES:
            raise ValueError(f"The maximum number of nodes ({params.max_nodes}) must be at most {MAX_NODES}.")
        config = config_of(params.config, backend, params.backend)
        if not self._ranks_as_asked:
            config = decided(config, own_store=shares_store())
        super().__init__(run_id=params.run_id, config=config, name=f"{socket.gethostname()}:{os.getpid()}")
        self._local_addr = params.local_addr
        self._nodes = (params.min_nodes, params.max_nodes)
        tunnel_protection(config, own_store=self.use_agent_store)

    @property
    def wants_agent(self) -> bool:
        """Whether our agent is to run the workers (``--rdzv-conf agent=rust``, the default)."""
        return self._config.wants_agent

    def _close(self, cause: str | None = None) -> None:
        self.session.close(cause=cause)

    def _has_session(self) -> bool:
        """Whether the session, a cached property, was used."""
        return "session" in self.__dict__


def created(make: Callable[[RendezvousParameters], H], params: RendezvousParameters) -> H:
    """Make a handler. A failure is also an event of PyTorch's."""
    try:
        return make(params)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(
            run_id=params.run_id, message=message, node_state=NodeState.FAILED, hostname=host_name()
        )
        raise
