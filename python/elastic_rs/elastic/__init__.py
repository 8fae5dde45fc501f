"""Workers that survive a change of the world: Horovod Elastic's ``State`` and ``run``, for plain PyTorch.

The function that trains keeps its state in a ``State`` and commits it now and then. When another worker fails, or nodes
join or leave, this process goes on: ``run`` makes a new process group, brings all workers to the same state, and calls
the function again::

    from elastic_rs import elastic

    @elastic.run
    def train(state):
        model = DistributedDataParallel(state.model)
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(elastic.TorchState(model=model, optimizer=optimizer, epoch=0))

``docs/elastic-in-place.md`` describes it, and ``docs/horovod.md`` how a script of Horovod's is ported. Importing this
package does not import torch; what needs it is loaded on first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from elastic_rs import _imported
from elastic_rs.elastic._exceptions import HorovodInternalError, HostsUpdatedInterrupt, HostUpdateResult, PeerFailed
from elastic_rs.elastic._listeners import Listener
from elastic_rs.elastic._membership import MEMBERSHIP
from elastic_rs.elastic._not_offered import refuse
from elastic_rs.elastic._ranks import cross_rank, cross_size, is_initialized, local_rank, local_size, rank, size
from elastic_rs.elastic._run import checked_timeout, run
from elastic_rs.elastic._state import ObjectState, State

if TYPE_CHECKING:
    from elastic_rs import elastic as elastic  # Horovod's name, see below
    from elastic_rs._durations import Duration
    from elastic_rs.elastic._collectives import (
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        allreduce_,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from elastic_rs.elastic._handlers import StateDictHandler, StateHandler, get_handler_registry, set_handler_registry
    from elastic_rs.elastic._sampler import ElasticSampler
    from elastic_rs.elastic._torch_state import TorchState

_HOMES = {
    "._collectives": (
        *("Average", "Max", "Min", "Product", "Sum", "allreduce", "allreduce_"),
        *("broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"),
    ),
    "._handlers": ("StateDictHandler", "StateHandler", "get_handler_registry", "set_handler_registry"),
    "._sampler": ("ElasticSampler",),
    "._torch_state": ("TorchState",),
}

__all__ = [
    "Average",
    "ElasticSampler",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "Listener",
    "Max",
    "Min",
    "ObjectState",
    "PeerFailed",
    "Product",
    "State",
    "StateDictHandler",
    "StateHandler",
    "Sum",
    "TorchState",
    "allreduce",
    "allreduce_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "get_handler_registry",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "register_listener",
    "remove_listener",
    "run",
    "set_handler_registry",
    "shutdown",
    "size",
    "source_rank",
]

# In `import elastic_rs.elastic as hvd`, Horovod's `hvd.elastic.run` and `hvd.elastic.TorchState` keep their names.
if not TYPE_CHECKING:
    elastic = sys.modules[__name__]


def init(backend: str | None = None, timeout: Duration | None = None) -> None:
    """Connect to the agent and make the process group, unless the script has made one. ``run`` does it otherwise.

    It has the name of ``horovod.torch.init``.

    Args:
        backend: of the process group: one of ``torch.distributed``, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
            Default: NCCL for GPUs if there are any, and gloo for the rest.
        timeout: of its collectives: a ``timedelta``, or seconds. Default: torch's, which is 30 minutes for gloo and 10
            for NCCL.

    Raises:
        PeerFailed: another worker has failed meanwhile.
        RuntimeError: the process group cannot be made, as ``torch.distributed.init_process_group`` raises it.
        TypeError: an argument has the wrong type.
    """
    MEMBERSHIP.begin(backend, checked_timeout(backend, timeout))
    if not MEMBERSHIP.has_group:
        MEMBERSHIP.enter()


def shutdown() -> None:
    """Destroy the process group, if there is one. Processes that end need not call it.

    ``init`` or ``run`` make another one afterwards, if all workers call them.
    """
    if is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()


def source_rank() -> int:
    """Return the rank whose state is the newest. ``run`` broadcasts the state from it when a world begins."""
    return MEMBERSHIP.source


def register_listener(listener: Listener) -> None:
    """Call ``listener.on_hosts_updated(number, flags)`` in a thread whenever a change of the membership is announced.

    That is before the checks of the workers raise it. States need not be registered. Horovod's
    ``notification_manager.register_listener`` does the same.

    Args:
        listener: any object with that method. If it raises, the exception is logged.
    """
    MEMBERSHIP.listeners.add(listener)


def remove_listener(listener: Listener) -> None:
    """Do not call a listener any more.

    Args:
        listener: as given to :func:`register_listener`. One that is not registered changes nothing.
    """
    MEMBERSHIP.listeners.remove(listener)


if not TYPE_CHECKING:  # to a checker of types, each name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        refuse(name, sys._getframe(1))  # noqa: SLF001 - documented
        return _imported(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return list(__all__)
