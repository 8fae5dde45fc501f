"""The exceptions of :mod:`elastic_rs.errors` that are PyTorch's too. That module imports this one on first use."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import api

from elastic_rs.errors import ElasticError

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "StoreError",
    "StoreLookupError",
    "StoreNetworkError",
    "StoreQueueEmptyError",
    "StoreTimeoutError",
]


class StoreError(ElasticError, dist.DistStoreError):
    """A store refused an operation. The store stays usable unless the message says otherwise."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Keys did not appear, or a barrier was not complete, in time. The store stays usable."""


class StoreLookupError(StoreTimeoutError, LookupError):
    """Keys did not appear in an ``EtcdStore`` in time. PyTorch's class raises ``LookupError``."""


# PyTorch has queues, and the exception, since 2.8.
_QueueEmptyError = getattr(dist, "QueueEmptyError", dist.DistStoreError)


class StoreQueueEmptyError(StoreError, _QueueEmptyError):  # type: ignore[misc, valid-type] # either is a class
    """A queue was empty, or another client took the item first. The store stays usable."""


class StoreNetworkError(ElasticError, dist.DistNetworkError):
    """The store cannot be reached, or could not be started. A client that has lost its connection stays unusable."""


class RendezvousError(ElasticError, api.RendezvousError):
    """The rendezvous failed for a reason without a separate class. The message says which."""


class RendezvousClosedError(RendezvousError, api.RendezvousClosedError):
    """The job is over: it succeeded, or it failed somewhere. The message names the node and the cause."""


class RendezvousTimeoutError(RendezvousError, api.RendezvousTimeoutError):
    """No round completed within ``join_timeout``. The message says which nodes had joined and how many were missing."""


class RendezvousConnectionError(RendezvousError, api.RendezvousConnectionError):
    """The coordinator cannot be reached, or another program listens at its address."""


class RendezvousGracefulExitError(RendezvousError, api.RendezvousGracefulExitError):
    """This node was a spare, and the job ended without needing it."""


class RendezvousStateError(RendezvousError, api.RendezvousStateError):
    """The backend holds a value that is not a state of this package. The message says what was found."""


# Tracebacks and pickles name the module in which people find these classes.
for _name in __all__:
    globals()[_name].__module__ = "elastic_rs.errors"
