"""Exceptions of this package. Each is also PyTorch's exception of its kind, so ``except`` clauses keep working."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import api

__all__ = [
    "ElasticError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "StoreError",
    "StoreNetworkError",
    "StoreQueueEmptyError",
    "StoreTimeoutError",
]


class ElasticError(Exception):
    """Anything that went wrong in this package and that the caller may want to handle."""


class StoreError(ElasticError, dist.DistStoreError):
    """A store refused an operation. The store stays usable unless the message says otherwise."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Keys did not appear, or a barrier was not complete, in time. The store stays usable."""


# PyTorch has queues, and the exception, since 2.8.
_QueueEmptyError = getattr(dist, "QueueEmptyError", dist.DistStoreError)


class StoreQueueEmptyError(StoreError, _QueueEmptyError):  # type: ignore[misc, valid-type] # either is a class
    """A queue held nothing, or another client was faster. The store stays usable."""


class StoreNetworkError(ElasticError, dist.DistNetworkError):
    """The store cannot be reached, or could not be started. A client that lost its connection stays broken."""


class RendezvousError(ElasticError, api.RendezvousError):
    """The rendezvous failed for a reason that has no class of its own: the message says which."""


class RendezvousClosedError(RendezvousError, api.RendezvousClosedError):
    """The job is over: it succeeded, or it failed somewhere; the message names the node and the cause."""


class RendezvousTimeoutError(RendezvousError, api.RendezvousTimeoutError):
    """No round completed within ``join_timeout``; the message says who was in and who was missing."""


class RendezvousConnectionError(RendezvousError, api.RendezvousConnectionError):
    """The coordinator cannot be reached, or something else listens in its place."""


class RendezvousGracefulExitError(RendezvousError, api.RendezvousGracefulExitError):
    """This node was a spare, and the job ended without needing it."""


class RendezvousStateError(RendezvousError, api.RendezvousStateError):
    """What the backend holds is not a state of this package; the message says what was found."""
