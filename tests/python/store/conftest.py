"""Stores of all kinds for the store's tests: PyTorch's and ours, servers and clients, in every pairing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.stores import LIMIT, servers_of


@pytest.fixture
def served() -> Iterator[Callable[[str], int]]:
    """Start a server by kind (`ours`, `libuv`, `legacy`) and return its port."""
    kept: list[Any] = []

    def start(kind: str) -> int:
        server, port = servers_of(kind)
        kept.append(server)
        return port

    yield start
    kept.clear()


@pytest.fixture
def server() -> Iterator[_elastic_rs.StoreServer]:
    """Start our server without a store object."""
    server = _elastic_rs.StoreServer.listen(None, 0)
    yield server
    server.stop()


@pytest.fixture
def stock(server: _elastic_rs.StoreServer) -> dist.TCPStore:
    """Connect PyTorch's client to our server."""
    return dist.TCPStore("127.0.0.1", server.port, timeout=LIMIT)
