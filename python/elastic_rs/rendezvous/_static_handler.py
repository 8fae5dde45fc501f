"""``static`` for PyTorch's launcher: ranks by ``--node-rank``, over the session of ``rust-c10d``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_rs._integration._plugin import with_agent
from elastic_rs.rendezvous._config import endpoint_of
from elastic_rs.rendezvous._handler import RustC10dRendezvousHandler
from elastic_rs.rendezvous._launcher_handler import created

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler


class StaticRendezvousHandler(RustC10dRendezvousHandler):
    """One node's handler. Workers use the endpoint's store, which is empty in each round."""

    _ranks_as_asked = True

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share a store that already listens: always, as with PyTorch's handler."""
        return True

    def get_backend(self) -> str:
        """Return ``static``."""
        return "static"


def create_static_handler(params: RendezvousParameters, *, host: str, port: int) -> RendezvousHandler:
    """Create a handler from what torchrun was given, as it passes it to its own handler of this name.

    The endpoint of these parameters has no brackets around an IPv6 address, so it is given apart.
    """
    config = dict(params.config)
    rank = config.pop("rank")
    config.setdefault("node_rank", rank)
    config.setdefault("is_host", int(rank == 0))
    if not isinstance(timeout := config.pop("timeout"), str):
        config.setdefault("join_timeout", timeout)
    else:
        config["timeout"] = timeout
    nodes = params.max_nodes  # as torchrun
    endpoint = endpoint_of(host, port)
    ours = RendezvousParameters("static", endpoint, params.run_id, nodes, nodes, local_addr=params.local_addr, **config)
    return with_agent(created(StaticRendezvousHandler, ours))
