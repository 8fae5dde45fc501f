"""Over etcd each node judges its own workers, and says which of them hangs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.stores import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from etcd_cluster import Cluster
    from helpers.procs import Job, Process

TRAINS = Path(__file__).parents[1] / "scripts" / "hangs_in_training.py"
SOURCE = TRAINS.read_text().splitlines()
STOPS = next(number for number, line in enumerate(SOURCE, 1) if "SIGSTOP" in line)

pytestmark = [pytest.mark.torchrun]


@pytest.fixture
def train(job: Job, cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., list[Process]]:
    """Return what starts two nodes of two ranks, of which rank 1 stops itself."""

    def start(*options: str, launcher: str = "elastic_rs.run") -> list[Process]:
        command = [
            *(sys.executable, "-m", launcher, "--nnodes=2", "--nproc-per-node=2", "--tee=3"),
            *("--rdzv-backend=rust-etcd", f"--rdzv-endpoint={cluster.endpoint}"),
            *(f"--rdzv-id={request.node.name}-{os.getpid()}", *options, str(TRAINS), "stop", "1"),
        ]
        env = {"GO": str(tmp_path / "go")}
        nodes = [
            job.start([*command[:3], f"--log-dir={tmp_path / name}", *command[3:]], name=name, env=env)
            for name in ("a", "b")
        ]
        for node in nodes:
            node.line(r"LAST \d")
        # Any of them may have the first rank.
        return sorted(nodes, key=lambda node: not any("READY 0 " in line for line in node.lines))

    return start


@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_each_node_names_its_own_rank_or_says_that_another_nodes_is_awaited(
    train: Callable[..., list[Process]], tmp_path: Path, launcher: str
) -> None:
    first, second = train("--rdzv-conf=hang_timeout=8", launcher=launcher)
    first.line(r"training stands still for .*: 1 of 4 ranks wait for rank 1 \(pid \d+\)$")
    first.line(r"rank 1 was stopped by a signal \(state T\)$")
    first.line(rf"at hang {TRAINS.name}:{STOPS} < main ")
    first.line(r"dumps of all ranks of this node: .*/hang-\*\.txt")
    second.line(r"all ranks of this node are inside all_reduce #\d+ of default_pg: a rank of another node, ")
    (tmp_path / "go").touch()
    pid = int(first.line(r"READY 1 (\d+)")[1])
    os.kill(pid, signal.SIGCONT)
    for node in (first, second):
        node.line("training goes on, after")
    assert [node.wait() for node in (first, second)] == [0, 0]


def test_workers_are_restarted_if_that_is_wanted(train: Callable[..., list[Process]]) -> None:
    first, second = train("--hang=restart")
    marks = [(node, node.mark()) for node in (first, second)]
    first.line(r"the workers are restarted \(--hang=restart\)")
    first.line(r"ended with a hang: rank 1 was stopped by a signal \(state T\)")
    for node, mark in marks:
        node.line(r"READY \d", since=mark)
    for node in (first, second):
        node.signal(signal.SIGTERM)
    for node in (first, second):
        node.wait()


@pytest.mark.long
def test_nobody_looks_if_that_is_wanted(train: Callable[..., list[Process]], tmp_path: Path) -> None:
    first, second = train("--hang=off")
    pid = int(first.line(r"READY 1 (\d+)")[1])
    until("the worker is stopped", lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text())
    (tmp_path / "go").touch()
    os.kill(pid, signal.SIGCONT)
    assert [node.wait() for node in (first, second)] == [0, 0]
    assert not any("stands still" in line for line in first.lines + second.lines)
