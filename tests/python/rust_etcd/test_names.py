"""Second jobs without a run id on one etcd cluster."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import Cluster
from helpers.etcd import FAMILY, Nodes
from helpers.workers import place

AGENTS = pytest.mark.parametrize("by", ["run", pytest.param("rust", marks=pytest.mark.torchrun)])


@AGENTS
@pytest.mark.parametrize("nnodes", ["1", "1:2"])
def test_a_second_job_without_a_run_id_is_refused(
    own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path, by: str, nnodes: str
) -> None:
    endpoint = own_cluster().endpoint
    done, other = tmp_path / "done", tmp_path / "evaluate.py"
    other.write_text(FAMILY.read_text())
    how: dict[str, Any] = {"nnodes": nnodes, "run_id": "none", "by": by}
    first = nodes.start(2, endpoint, "--until", done, **how)
    place(first, 1)
    second = nodes.start(3, endpoint, "--until", done, script=other, **how)
    assert second.wait() == 1
    line = second.line(r"refused this node: .*").group()
    assert re.search(r"belongs to another job than 127\.0\.0\.2 .*which runs `family\.py`.*--rdzv-id", line)
    done.touch()
    assert first.wait() == 0


def test_a_job_of_one_node_that_was_killed_starts_again_without_a_run_id(
    own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path
) -> None:
    """Over etcd nobody sees that a node has died, before its lease ends: the next one waits for that."""
    endpoint, done = own_cluster().endpoint, tmp_path / "done"
    first = nodes.start(2, endpoint, "--until", done, nnodes="1", run_id="none")
    place(first, 1)
    first.signal(signal.SIGKILL)
    first.wait()
    again = nodes.start(2, endpoint, "--until", done, nnodes="1", run_id="none")
    place(again, 1)
    done.touch()
    assert again.wait() == 0


@AGENTS
@pytest.mark.parametrize("fails", [[], ["--raise=0"]], ids=["after a success", "after a failure"])
def test_a_late_pod_of_a_job_that_is_over_trains_nothing(
    own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path, by: str, fails: list[str]
) -> None:
    """Nobody of the job is left, and etcd alone remembers it."""
    endpoint, done = own_cluster().endpoint, tmp_path / "done"
    done.touch()
    code, how = (1, "failed") if fails else (0, "succeeded")
    worker: list[str | Path] = ["--until", done, *fails]
    first = nodes.start(2, endpoint, *worker, nnodes="1", run_id="named", by=by, restarts=0)
    assert first.wait() == code
    late = nodes.start(3, endpoint, *worker, nnodes="1", run_id="named", by=by, restarts=0)
    assert late.wait() == code
    late.line(rf"the job with the run id `named` has {how} .*another --rdzv-id")
    assert not any(line.startswith("WORKER") for line in late.lines)


def test_two_agents_on_one_machine_are_one_warning_over_etcd_too(
    own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path
) -> None:
    endpoint, done = own_cluster().endpoint, tmp_path / "done"
    done.touch()
    both = [nodes.start(2, endpoint, "--until", done, nproc=2, name=name) for name in ("one", "other")]
    assert [node.wait() for node in both] == [0, 0]
    said = [line for node in both for line in node.lines if "2 agents of this job run on one machine" in line]
    assert len(said) == 1
    assert "WARNING" in said[0]
    assert "with 2 + 2 workers" in said[0]
