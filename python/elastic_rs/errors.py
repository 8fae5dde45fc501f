"""All exceptions of this package. Each derives from :class:`ElasticError`, so one ``except`` clause takes them all.

Each is also an exception that the same failure raises without this package: PyTorch's, or a builtin one. So ``except``
clauses that were written for PyTorch keep working.

Importing this module does not import torch. Exceptions of stores and of the rendezvous are subclasses of PyTorch's:
they are made on first use, which imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs import _imported

if TYPE_CHECKING:
    from elastic_rs._torch_errors import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
        StoreError,
        StoreLookupError,
        StoreNetworkError,
        StoreQueueEmptyError,
        StoreTimeoutError,
    )
    from elastic_rs.discovery._programs import DiscoveryError
    from elastic_rs.elastic._exceptions import (
        HostsUpdatedInterrupt,
        PeerFailed,
        StateMismatchError,
        TensorMismatchError,
    )

__all__ = [
    "DiscoveryError",
    "ElasticError",
    "EtcdConnectionError",
    "EtcdError",
    "EtcdLeaseError",
    "EtcdPermissionError",
    "HostsUpdatedInterrupt",
    "PeerFailed",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "StateMismatchError",
    "StoreError",
    "StoreLookupError",
    "StoreNetworkError",
    "StoreQueueEmptyError",
    "StoreTimeoutError",
    "TensorMismatchError",
]

_HOMES = {
    "elastic_rs._torch_errors": (
        *("RendezvousClosedError", "RendezvousConnectionError", "RendezvousError", "RendezvousGracefulExitError"),
        *("RendezvousStateError", "RendezvousTimeoutError"),
        *("StoreError", "StoreLookupError", "StoreNetworkError", "StoreQueueEmptyError", "StoreTimeoutError"),
    ),
    "elastic_rs.discovery._programs": ("DiscoveryError",),
    "elastic_rs.elastic._exceptions": (
        "HostsUpdatedInterrupt",
        "PeerFailed",
        "StateMismatchError",
        "TensorMismatchError",
    ),
}


class ElasticError(Exception):
    """Base class of this package's exceptions.

    The message is for people. Programs read the attributes, each of which is None where it is not known or has no
    meaning.

    Args:
        args: the message, as of every exception.

    Attributes:
        endpoint: ``host:port`` of the store or the coordinator.
        elapsed: seconds that the operation has taken.
        round: number of the rendezvous round in which it happened, 1 for the first.
        rank: global rank of the worker whose failure is the cause.
    """

    def __init__(
        self,
        *args: object,
        endpoint: str | None = None,
        elapsed: float | None = None,
        round: int | None = None,  # noqa: A002 - the name of the attribute
        rank: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.endpoint = endpoint
        self.elapsed = elapsed
        self.round = round
        self.rank = rank


class EtcdError(ElasticError, OSError):
    """etcd has answered a request of :class:`elastic_rs.EtcdClient` with an error. The message names it."""


class EtcdConnectionError(EtcdError, ConnectionError):
    """No member of etcd has served the request in time, or none can be spoken with (TLS)."""


class EtcdPermissionError(EtcdError, PermissionError):
    """The user may not do this at etcd, or etcd does not know this user with this password."""


class EtcdLeaseError(EtcdError, LookupError):
    """The lease does not exist at etcd: it has ended, or was revoked."""


def __getattr__(name: str) -> Any:
    return _imported(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return list(__all__)
