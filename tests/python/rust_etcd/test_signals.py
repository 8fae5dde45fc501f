"""An agent gets SIGTERM while etcd does not answer. A scheduler kills one that takes long: Kubernetes after 30 s."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_cluster import Cluster
from helpers.etcd import SHORT_CONF, Nodes
from helpers.procs import Job

LIMIT_S = 12.0
"""For a loaded machine: the goodbye takes 1 s, and a Python that has imported torch some more to end."""


@pytest.mark.parametrize("by", ["run", "rust", "torch"])
def test_sigterm_while_etcd_hangs_ends_the_agent_within_seconds(
    *, own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path, by: str
) -> None:
    cluster = own_cluster()
    both = nodes.world((2, 3), cluster.endpoint, "--until", tmp_path / "done", by=by)
    workers = [pid for node in both for pid in job.workers(node).values()]
    for member in cluster.members:
        member.pause()
    began = time.monotonic()
    for node in both:
        node.signal(signal.SIGTERM)
    codes = [node.wait() for node in both]
    took_s = time.monotonic() - began
    print(f"{by}: {codes} {took_s:.1f} s after SIGTERM")
    job.until_gone(*workers)
    assert codes == [143, 143] or by == "torch"
    assert took_s < LIMIT_S


@pytest.mark.parametrize("by", ["run", "rust"])
def test_sigterm_while_a_node_waits_and_etcd_hangs_ends_it_within_seconds(
    *, own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path, by: str
) -> None:
    cluster = own_cluster()
    node = nodes.start(2, cluster.endpoint, "--until", tmp_path / "done", by=by, conf=SHORT_CONF)
    node.line("waiting for")
    for member in cluster.members:
        member.pause()
    began = time.monotonic()
    node.signal(signal.SIGTERM)
    code = node.wait()
    took_s = time.monotonic() - began
    print(f"{by}: {code} {took_s:.1f} s after SIGTERM")
    assert code == 143
    assert took_s < LIMIT_S
