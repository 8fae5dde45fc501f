"""Over etcd each node writes its own events, and its decisions. Together they tell what happened."""

import json
import os
import signal
from pathlib import Path

import pytest
from elastic_rs import _cli
from etcd_cluster import Cluster
from helpers.etcd import Nodes, place
from helpers.procs import Job


def test_the_files_of_nodes_tell_which_worker_was_killed(
    cluster: Cluster, nodes: Nodes, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, run_id = tmp_path / "done", "recorded"
    both = [
        nodes.start(number, cluster.endpoint, "--until", done, run_id=run_id, options=[f"--log-dir={tmp_path / name}"])
        for number, name in ((2, "a"), (3, "b"))
    ]
    for node in both:
        place(node, 2)
    marks = [node.mark() for node in both]
    ((rank, pid),) = job.workers(both[1]).items()
    os.kill(pid, signal.SIGKILL)
    for node, mark in zip(both, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in both] == [0, 0]
    files = [next((tmp_path / name).glob("*/events.jsonl")) for name in ("a", "b")]
    kinds = [json.loads(line)["type"] for file in files for line in file.read_text().splitlines()]
    assert (kinds.count("round.completed"), kinds.count("round.broken"), kinds.count("received.completed")) == (2, 1, 4)
    for chosen in (files, files[::-1], files[:1], files[1:]):
        assert _cli.main(["why", "--events", *map(str, chosen)]) == 0
        title, root, broken, *rest = capsys.readouterr().out.splitlines()
        assert title.startswith("recovery 1 of 1, round 1 to 2: "), chosen
        assert f" rank {rank} SIGKILL" in root, chosen
        assert broken.startswith(" +- round 1 broken, all nodes notified"), chosen
        assert any("round 2 complete with 2 nodes" in line for line in rest), chosen
