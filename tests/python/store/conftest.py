"""Stores of all kinds for the store's tests: PyTorch's and ours, servers and clients, in every pairing."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.stores import Adapter, servers_of

# Connecting can take seconds where names resolve slowly; a test that passes never waits for it.
LIMIT = timedelta(seconds=60)


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
    """Our server, without a store object around it."""
    server = _elastic_rs.StoreServer.listen(None, 0)
    yield server
    server.stop()


@pytest.fixture
def stock(server: _elastic_rs.StoreServer) -> dist.TCPStore:
    """PyTorch's client of our server."""
    return dist.TCPStore("127.0.0.1", server.port, timeout=LIMIT)


@pytest.fixture
def ours(server: _elastic_rs.StoreServer) -> Adapter:
    """The core's client of our server, with the interface of PyTorch's."""
    return Adapter(_elastic_rs.StoreClient("127.0.0.1", server.port, timeout_s=LIMIT.total_seconds()))
