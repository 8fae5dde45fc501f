"""``install()`` and ``uninstall()``: replace PyTorch's classes by this package's in all modules of torch."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

_lock = threading.Lock()
_parts: list[str] = []
"""What is installed, in order."""
_replaced: list[tuple[str, dict[str, Any], str, Any]] = []
"""For each replaced name: the part, the module's namespace, the name, and the previous value."""
_factories: dict[str, Any] = {}
"""PyTorch's factories of handlers, by the backend's name."""


def install(*, store: bool = True, rendezvous: bool = True, agent: bool = True) -> None:
    """Put this package's classes in the place of PyTorch's, for the whole process. Calling it again changes nothing.

    Args:
        store: ``torch.distributed.TCPStore``.
        rendezvous: the factories of ``c10d``, ``etcd`` and ``etcd-v2`` handlers, ``C10dRendezvousBackend``,
            ``EtcdRendezvousBackend``, ``EtcdStore``, ``DynamicRendezvousHandler``, ``create_handler`` and
            ``create_backend``. ``etcd`` and ``etcd-v2`` are then ``rust-etcd``. Keys of ``--rdzv-conf`` that PyTorch
            ignores are ignored under PyTorch's names, also under ``static``, with a warning.
        agent: ``LocalElasticAgent``, whatever the rendezvous.

    Every module of torch that is loaded is searched. Names that a program has imported before stay what they were.

    >>> import elastic_rs
    >>> import torch.distributed as dist
    >>> elastic_rs.install()
    >>> dist.TCPStore is elastic_rs.TCPStore
    True
    >>> elastic_rs.uninstall()
    """
    with _lock:
        if store and "store" not in _parts:
            _install_store()
            _parts.append("store")
        if rendezvous and "rendezvous" not in _parts:
            _install_rendezvous()
            _parts.append("rendezvous")
        if agent and "agent" not in _parts:
            _install_agent()
            _parts.append("agent")


def uninstall() -> None:
    """Undo :func:`install`, however often it was called. Objects that were made meanwhile stay as they are."""
    with _lock:
        while _replaced:
            _, names, name, before = _replaced.pop()
            names[name] = before
        if _factories:
            from elastic_rs._torch_private import handler_factories

            handler_factories().update(_factories)
            _factories.clear()
        _parts.clear()


def _install_store() -> None:
    from elastic_rs import _torch_private
    from elastic_rs.store import TCPStore

    _replace("store", {_torch_private.TCPStore: TCPStore})


def _install_rendezvous() -> None:
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as their_backend
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as theirs

    from elastic_rs._torch_private import handler_factories
    from elastic_rs.rendezvous import c10d_rendezvous_backend, create_rust_etcd_handler, dynamic_rendezvous

    _replace(
        "rendezvous",
        {
            their_backend.C10dRendezvousBackend: c10d_rendezvous_backend.C10dRendezvousBackend,
            their_backend.create_backend: c10d_rendezvous_backend.create_backend,
            theirs.DynamicRendezvousHandler: dynamic_rendezvous.DynamicRendezvousHandler,
            theirs.create_handler: dynamic_rendezvous.create_handler,
            **_etcd_classes(),
        },
    )
    registry = handler_factories()
    for name, factory in (
        ("c10d", _create_c10d_handler),
        ("etcd", create_rust_etcd_handler),
        ("etcd-v2", create_rust_etcd_handler),
        ("static", _create_static_handler),
    ):
        _factories[name] = registry[name]
        registry[name] = factory


def _etcd_classes() -> dict[Any, Any]:
    try:
        from torch.distributed.elastic.rendezvous import etcd_store as their_store
    except ModuleNotFoundError:  # torch 2.6 without python-etcd: nobody can have these classes
        return {}

    from elastic_rs.rendezvous import etcd_rendezvous_backend, etcd_store

    ours: dict[Any, Any] = {their_store.EtcdStore: etcd_store.EtcdStore}
    with contextlib.suppress(ImportError):  # it needs urllib3, which PyTorch does not
        from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as theirs

        ours[theirs.EtcdRendezvousBackend] = etcd_rendezvous_backend.EtcdRendezvousBackend
        ours[theirs.create_backend] = etcd_rendezvous_backend.create_backend
    return ours


def _install_agent() -> None:
    import torch.distributed.launcher.api  # noqa: F401 - holds the name too
    from torch.distributed.elastic.agent.server import local_elastic_agent as theirs

    from elastic_rs._integration._launcher import _new_agent
    from elastic_rs.agent import LocalElasticAgent

    _replace("agent", {theirs.LocalElasticAgent: LocalElasticAgent, _new_agent: LocalElasticAgent})


def _create_c10d_handler(params: Any) -> Any:
    from elastic_rs.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
    from elastic_rs.rendezvous._config import known_of

    known_of(params.config, {*c10d_rendezvous_backend.KEYS, *dynamic_rendezvous.KEYS}, "c10d")
    backend, store = c10d_rendezvous_backend.create_backend(params)
    return dynamic_rendezvous.create_handler(store, backend, params)


def _create_static_handler(params: Any) -> Any:
    """Create PyTorch's handler, after the warning of keys that it ignores."""
    from elastic_rs.rendezvous._config import known_of

    known_of(params.config, {"rank", "timeout"}, "static")
    return _factories["static"](params)


def _replace(part: str, ours: dict[Any, Any]) -> None:
    """Replace the keys of ``ours`` by their values in all modules of torch that hold them under any name."""
    for module_name, module in list(sys.modules.items()):
        # Native classes stay available in `torch._C`.
        if not module_name.startswith("torch.") or module_name.startswith("torch._C"):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            for before, after in ours.items():
                if value is before:
                    _replaced.append((part, names, name, before))
                    names[name] = after
