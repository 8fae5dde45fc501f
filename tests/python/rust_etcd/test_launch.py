"""``elastic_rs.launch`` over an etcd cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from etcd_cluster import Cluster
    from helpers.procs import Job

FOLDER = Path(__file__).parents[1]

PROGRAM = """
import os, sys
import elastic_rs
from helpers import functions

config = elastic_rs.LaunchConfig(
    nnodes=2,
    nproc_per_node=2,
    rdzv_backend="etcd",
    rdzv_endpoint=sys.argv[1],
    rdzv_id=sys.argv[2],
    no_python=sys.argv[3] == "script",
    start_method="fork" if sys.argv[3] == "function" else None,
)
entrypoint = functions.rank if sys.argv[3] == "function" else "true"
before = dict(os.environ)
print(f"ENDED {elastic_rs.launch(entrypoint, config)} {before == os.environ}", flush=True)
"""


@pytest.mark.parametrize("kind", ["script", "function"])
def test_nodes_meet_over_etcd(job: Job, cluster: Cluster, kind: str) -> None:
    command = [sys.executable, "-c", PROGRAM, cluster.endpoint, f"launch-{kind}-{os.getpid()}", kind]
    nodes = [job.start(command, name=name, env={"PYTHONPATH": str(FOLDER)}) for name in ("a", "b")]
    found = sorted(node.line("^ENDED (.*)$")[1] for node in nodes)
    assert [node.wait() for node in nodes] == [0, 0]
    values = [range(4), [None] * 4][kind == "script"]
    assert found == [f"{{0: {values[0]}, 1: {values[1]}}} True", f"{{2: {values[2]}, 3: {values[3]}}} True"]
