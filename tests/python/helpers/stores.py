"""The stores of differential tests, and how to compare their results."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import elastic_rs
import torch.distributed as dist
from elastic_rs import _elastic_rs

HOST = "127.0.0.1"
# Connecting can take seconds where names resolve slowly. A test that passes does not wait for this limit.
LIMIT = timedelta(seconds=60)
# Time-out of waits that are not released. Long enough for an answer on a busy machine.
SHORT = timedelta(seconds=0.3)

# Client and server. The results of all pairs must equal those of the first.
PAIRS = [
    ("stock", "libuv"),
    ("stock", "ours"),
    ("elastic_rs", "ours"),
    ("core", "ours"),
    ("core", "libuv"),
    ("core", "legacy"),
    ("stock", "legacy"),
]


class Adapter:
    """The core's client behind the method names and argument types of ``torch.distributed.Store``."""

    def __init__(self, client: _elastic_rs.StoreClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.client.wait(keys, None if timeout is None else timeout.total_seconds())

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.client.barrier(key, world_size, None if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self.client.check(list(keys))

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self.client.list_keys()]

    def clone(self) -> Adapter:
        return Adapter(self.client.clone())


def servers_of(kind: str) -> tuple[Any, int]:
    """Start a server of this kind, and return it with its port. It ends when the returned object is collected."""
    if kind == "ours":
        server = _elastic_rs.StoreServer.listen(None, 0)
        return server, server.port
    store = dist.TCPStore(HOST, 0, is_master=True, timeout=LIMIT, use_libuv=kind == "libuv")
    return store, store.port


def client_of(kind: str, port: int, *, use_libuv: bool = True) -> Any:
    if kind == "core":
        return Adapter(_elastic_rs.StoreClient(HOST, port, timeout_s=LIMIT.total_seconds()))
    if kind == "elastic_rs":
        return elastic_rs.TCPStore(HOST, port, timeout=LIMIT, use_libuv=use_libuv)
    return dist.TCPStore(HOST, port, timeout=LIMIT, use_libuv=use_libuv)


# PyTorch's exception classes that callers can tell apart. Ours derive from them.
_CLASSES = [
    name
    for name in ("QueueEmptyError", "DistStoreError", "DistNetworkError", "DistBackendError")
    if hasattr(dist, name)
]


def outcome(operation: Callable[[], Any]) -> Any:
    """Return the result, or the class of the exception as an ``except`` clause written for PyTorch would see it."""
    try:
        return operation()
    except Exception as error:  # noqa: BLE001 - whatever comes is compared
        for name in _CLASSES:
            if isinstance(error, getattr(dist, name)):
                return f"raises {name}"
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return f"raises {builtin.__name__}"


def until(what: str, is_true: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def bound_socket() -> tuple[socket.socket, int]:
    """Return a socket that has a port but does not listen."""
    bound = socket.socket()
    bound.bind((HOST, 0))
    return bound, bound.getsockname()[1]
