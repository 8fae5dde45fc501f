"""A node's part in a rendezvous: what ``--rdzv-conf`` says, the session, and handlers for PyTorch's agent.

Importing this package does not import torch, which ``elastic-run`` does without; the names below do, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs import _imported

if TYPE_CHECKING:
    from elastic_rs.rendezvous._config import DEFAULT_PORT
    from elastic_rs.rendezvous._etcd_handler import RustEtcdRendezvousHandler, create_rust_etcd_handler
    from elastic_rs.rendezvous._handler import RustC10dRendezvousHandler, create_rust_c10d_handler

__all__ = [
    "DEFAULT_PORT",
    "RustC10dRendezvousHandler",
    "RustEtcdRendezvousHandler",
    "create_rust_c10d_handler",
    "create_rust_etcd_handler",
]

_HOMES = {
    "._config": ("DEFAULT_PORT",),
    "._etcd_handler": ("RustEtcdRendezvousHandler", "create_rust_etcd_handler"),
    "._handler": ("RustC10dRendezvousHandler", "create_rust_c10d_handler"),
}


def __getattr__(name: str) -> Any:
    return _imported(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return list(__all__)
