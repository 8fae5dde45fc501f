"""An etcd of one member, for tests of what users call. Tests of its faults are elsewhere."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from elastic_rs import EtcdClient, EtcdOptions
from etcd_cluster import Cluster

LIMIT_S = 60


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Return what ``--rdzv-endpoint`` is given."""
    program = os.environ.get("ETCD")
    if not program:
        pytest.skip("no etcd: `make test` gets one (tools/find_tool.py), or ETCD=/path/to/etcd names one")
    with Cluster(program, size=1) as cluster:
        yield cluster.endpoint


@pytest.fixture
def client(endpoint: str) -> EtcdClient:
    """Return a client of that etcd."""
    return EtcdClient(EtcdOptions(endpoint))


@pytest.fixture
def name() -> str:
    """Return a name that no other test uses: all share one etcd."""
    return uuid.uuid4().hex
