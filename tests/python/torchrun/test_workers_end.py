"""Our agent under stock torchrun: ends of workers and their descendants, counted restarts, and logs."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.procs import Job
from helpers.workers import place

from .conftest import FAMILY, Start, shutdown_timeout

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.parametrize("agent", ["rust", "run"], indirect=True),
]


def test_nothing_outlives_a_killed_agent(start: Start, job: Job, tmp_path: Path) -> None:
    # pytorch #150916: PyTorch leaves the worker and its descendants behind. One of them leads another session.
    node = start(2, "--children", tmp_path, nnodes="1", script=FAMILY)
    place(node, 1)
    family = [*map(int, (tmp_path / "rank0").read_text().split()), *job.workers().values()]
    assert len(family) == 3
    began = time.monotonic()
    node.signal(signal.SIGKILL)
    job.until_gone(*family)
    assert time.monotonic() - began < 30, "2 s on an idle machine"
    node.wait()


def test_descendants_of_a_failed_worker_are_gone_before_the_next_attempt(
    start: Start, agent: str, tmp_path: Path
) -> None:
    # pytorch #8805: PyTorch never signals the group of a worker that has died.
    done = tmp_path / "done"
    args = ["--children", tmp_path, "--exit", "0:3", "--until", done]
    node = start(2, *args, nnodes="1", script=FAMILY, options=shutdown_timeout(1, agent))
    assert node.line(r"LEFT rank=0 (.*)")[1] == "[]"
    done.touch()
    assert node.wait() == 0


def test_the_grace_of_stubborn_workers_is_shutdown_timeout(start: Start, agent: str) -> None:
    # pytorch #119856: PyTorch takes 30 s at a restart, whatever --shutdown-timeout says.
    options = shutdown_timeout(3, agent)
    if not options:
        pytest.skip("this torchrun has no --shutdown-timeout")
    nodes = [start(n, "--stubborn", nnodes="2", script=FAMILY, options=options) for n in (2, 3)]
    pid = int(place(nodes[1], 2)["pid"])
    place(nodes[0], 2)
    mark = nodes[0].mark()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    place(nodes[0], 2, since=mark)
    assert 3 <= time.monotonic() - began < 28
    place(nodes[1], 2, since=nodes[1].lines.index(next(x for x in nodes[1].lines if x.startswith("WORKER"))) + 1)
    for node in nodes:
        node.signal(signal.SIGTERM)
    began = time.monotonic()
    assert [node.wait() for node in nodes] == [143, 143]
    assert 2 < time.monotonic() - began < 28, "the same grace after a signal to the agent"


def test_every_attempt_keeps_its_logs_on_every_node(start: Start, tmp_path: Path) -> None:
    # PyTorch empties the folder of the nodes that did not fail.
    nodes = [
        start(n, "--fail=0:7", nnodes="2", restarts=2, options=[f"--log-dir={tmp_path / str(n)}", "--redirects=3"])
        for n in (2, 3)
    ]
    assert [node.wait() for node in nodes] == [1, 1]
    for number in (2, 3):
        logs = sorted((tmp_path / str(number)).glob("*/attempt_*/0/stdout.log"))
        assert [log.parts[-3] for log in logs] == ["attempt_0", "attempt_1", "attempt_2"]
        assert all("WORKER" in log.read_text() for log in logs)


def test_restarts_are_counted_for_the_whole_job(start: Start) -> None:
    # pytorch #108158: PyTorch counts by node, so two failures on two nodes are one for each.
    nodes = [start(n, nnodes="2", restarts=1, script=FAMILY) for n in (2, 3)]
    first = [place(node, 2) for node in nodes]
    assert [worker["restarts"] for worker in first] == ["0", "0"]
    os.kill(int(first[1]["pid"]), signal.SIGKILL)
    again = [node.line(r"WORKER .* restarts=1 pid=(\d+)") for node in nodes]
    os.kill(int(again[0][1]), signal.SIGKILL)
    assert [node.wait() for node in nodes] == [1, 1]


def test_no_temporary_folder_is_left(start: Start, tmp_path: Path) -> None:
    # PyTorch leaves /tmp/torchelastic_* behind.
    node = start(2, nnodes="1", env={"TMPDIR": str(tmp_path)})
    assert node.wait() == 0
    assert [path.name for path in tmp_path.glob("torchelastic_*")] == []
