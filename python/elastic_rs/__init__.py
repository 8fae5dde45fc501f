"""Rust insides for PyTorch's launcher layer: TCP store and rendezvous, as drop-ins for ``torch.distributed.elastic``.

Installing the package registers the rendezvous backends ``rust-c10d`` and ``rust-etcd`` with ``torchrun``. Nothing
needs to be imported::

    torchrun --rdzv-backend=rust-c10d --rdzv-endpoint=HOST:29400 --rdzv-id=JOB --nnodes=1:4 train.py
    torchrun --rdzv-backend=rust-etcd --rdzv-endpoint=H1:2379,H2:2379,H3:2379 --rdzv-id=JOB --nnodes=1:4 train.py

Importing this package does not import torch. Its submodules and the names below are loaded on first use, so that
``elastic_rs.elastic`` and the others need no import of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_rs import agent, aio, discovery, elastic, errors, rendezvous, run, store
    from elastic_rs._checkpoint import checkpointed, should_checkpoint
    from elastic_rs._elastic_rs import EtcdClient, EtcdOptions
    from elastic_rs._integration._install import install, uninstall
    from elastic_rs._launch import LaunchConfig, launch
    from elastic_rs._step import section, step
    from elastic_rs._version import __version__
    from elastic_rs.agent import LocalElasticAgent
    from elastic_rs.errors import ElasticError
    from elastic_rs.rendezvous import (
        RustC10dRendezvousHandler,
        RustEtcdRendezvousHandler,
        create_rust_c10d_handler,
        create_rust_etcd_handler,
    )
    from elastic_rs.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
    from elastic_rs.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousSettings,
        RendezvousTimeout,
        create_handler,
    )
    from elastic_rs.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend
    from elastic_rs.rendezvous.etcd_store import EtcdStore
    from elastic_rs.store import TCPStore

__all__ = [
    "C10dRendezvousBackend",
    "DynamicRendezvousHandler",
    "ElasticError",
    "EtcdClient",
    "EtcdOptions",
    "EtcdRendezvousBackend",
    "EtcdStore",
    "LaunchConfig",
    "LocalElasticAgent",
    "RendezvousSettings",
    "RendezvousTimeout",
    "RustC10dRendezvousHandler",
    "RustEtcdRendezvousHandler",
    "TCPStore",
    "__version__",
    "agent",
    "aio",
    "checkpointed",
    "create_backend",
    "create_handler",
    "create_rust_c10d_handler",
    "create_rust_etcd_handler",
    "discovery",
    "elastic",
    "errors",
    "install",
    "launch",
    "rendezvous",
    "run",
    "section",
    "should_checkpoint",
    "step",
    "store",
    "uninstall",
]

_SUBMODULES = frozenset({"agent", "aio", "discovery", "elastic", "errors", "rendezvous", "run", "store"})

_HOMES = {
    "._checkpoint": ("checkpointed", "should_checkpoint"),
    "._elastic_rs": ("EtcdClient", "EtcdOptions"),
    "._integration._install": ("install", "uninstall"),
    "._launch": ("LaunchConfig", "launch"),
    "._step": ("section", "step"),
    "._version": ("__version__",),
    ".agent": ("LocalElasticAgent",),
    ".errors": ("ElasticError",),
    ".rendezvous.c10d_rendezvous_backend": ("C10dRendezvousBackend", "create_backend"),
    ".rendezvous.dynamic_rendezvous": (
        "DynamicRendezvousHandler",
        "RendezvousSettings",
        "RendezvousTimeout",
        "create_handler",
    ),
    ".rendezvous.etcd_rendezvous_backend": ("EtcdRendezvousBackend",),
    ".rendezvous.etcd_store": ("EtcdStore",),
    ".rendezvous": (
        *("RustC10dRendezvousHandler", "RustEtcdRendezvousHandler"),
        *("create_rust_c10d_handler", "create_rust_etcd_handler"),
    ),
    ".store": ("TCPStore",),
}


def _imported(module: str, homes: Mapping[str, Collection[str]], name: str) -> Any:
    """Return what ``module`` has under this name, from the module that ``homes`` names for it.

    A package may name its own modules by a leading dot.
    """
    for home, names in homes.items():
        if name in names:
            return getattr(import_module(home, module), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    found = _imported(__name__, _HOMES, name)
    if name == "step":
        globals()[name] = found  # scripts call it in each step, and this function costs more than the call
    return found


def __dir__() -> list[str]:
    return list(__all__)
