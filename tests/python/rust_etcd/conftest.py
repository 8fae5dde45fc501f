"""Fixtures of the tests with etcd. A test that damages its cluster asks for one of its own."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster
from helpers.etcd import Nodes, Relayed
from helpers.procs import Job


@pytest.fixture(scope="session")
def program() -> str:
    """Return the path of an etcd binary."""
    path = os.environ.get("ETCD")
    if not path:
        pytest.skip("no etcd: `make test` gets one (tools/find_tool.py), or ETCD=/path/to/etcd names one")
    return path


@pytest.fixture(scope="module")
def cluster(program: str) -> Iterator[Cluster]:
    """Return three members that the tests of a module share. They are not damaged."""
    with Cluster(program) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Admin:
    """Return the operator of the shared cluster."""
    return Admin(cluster)


@pytest.fixture
def own_cluster(program: str) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a cluster for this test alone."""
    with contextlib.ExitStack() as stack:

        def start(**how: Any) -> Cluster:
            return stack.enter_context(Cluster(program, **how))

        yield start


@pytest.fixture
def relayed(program: str) -> Iterator[Relayed]:
    """Return a cluster for this test alone, with a relay before each port."""
    with contextlib.closing(Relayed(program)) as relayed:
        yield relayed


@pytest.fixture
def nodes(job: Job) -> Nodes:
    """Return what starts nodes of the test's jobs."""
    return Nodes(job)
