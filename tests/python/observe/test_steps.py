"""A training that tells its steps: what a recovery costs up to the first step, and the steps that are made again."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs._observe._source import Live
from helpers.first_steps import first_steps
from helpers.stores import until

if TYPE_CHECKING:
    from helpers.procs import Job

SCRIPT = Path(__file__).parents[1] / "scripts" / "stepping.py"


def ask(*words: str) -> str:
    command = [sys.executable, "-m", "elastic_rs", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.torchrun
@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_the_phases_of_one_node_sum_to_the_recovery(job: Job, port: int, tmp_path: Path, launcher: str) -> None:
    options = [
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--rdzv-backend=rust-c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=job",
    ]
    node = job.start([sys.executable, "-m", launcher, *options, str(SCRIPT), str(tmp_path)], name="node")
    for rank in range(2):
        node.line(f"^REACHED {rank} 25")
    until("the status tells the step", lambda: "\nstep    25, " in ask("status", f"127.0.0.1:{port}"))
    assert "\ngoodput 100.0 %\n" in ask("status", f"127.0.0.1:{port}")

    worker = job.workers(node)[1]
    pidfd = os.pidfd_open(worker)
    killed_ns = time.monotonic_ns()
    os.kill(worker, signal.SIGKILL)
    select.select([pidfd], [], [])  # the kernel takes its memory back first
    ended_ns = time.monotonic_ns()
    os.close(pidfd)
    first_steps(port, 2)
    first_ns = min(int(node.line(rf"^FIRST {rank} 21 (\d+)")[1]) for rank in range(2))

    facts = json.loads(ask("why", f"127.0.0.1:{port}", "--json"))
    phases = {phase: part["longest_s"] for phase, part in facts["phases"].items()}
    assert list(phases) == ["detect", "stop", "rendezvous", "start", "import", "first_step"], phases
    assert sum(phases.values()) == pytest.approx(facts["lasted_s"], rel=0.01)
    # By the clock of this process, which sees the end of the worker a little later than its guard does.
    assert 0.99 * (first_ns - ended_ns) <= 1e9 * sum(phases.values()) <= first_ns - killed_ns
    # The checkpoint was at step 20.
    assert facts["redo"]["steps"] == 5
    assert 0 < facts["redo"]["seconds"] < 5

    why = ask("why", f"127.0.0.1:{port}")
    assert "       redo       5 steps redone (" in why, why
    status = ask("status", f"127.0.0.1:{port}").splitlines()[1]
    assert status.startswith("goodput "), status
    assert "at most" not in status
    assert "1 recovery lost " in status
    for rank in range(2):
        node.line(f"^REACHED {rank} 30")
    # The node is asked at most twice a second.
    until("the status tells the last step", lambda: "\nstep    30, " in ask("status", f"127.0.0.1:{port}"))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert 'elastic_rs_redone_steps_total{run="job"} 5\n' in metrics
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert 0 < float(values['elastic_rs_goodput_ratio{run="job"}']) < 1
    for phase, seconds in phases.items():
        series = f'elastic_rs_lost_seconds_total{{run="job",phase="{phase}"}}'
        assert float(values[series]) == pytest.approx(seconds, abs=1e-6)
    assert values['elastic_rs_step{run="job"}'] == "30"
    (tmp_path / "done").touch()
    assert node.wait() == 0


NCCL = """
import os, pathlib, sys, time
import torch.distributed as dist
from elastic_rs import elastic

dist.init_process_group("gloo")
dist.get_backend_config = lambda: "cpu:gloo,cuda:nccl"  # as on a machine with GPUs

@elastic.run
def train(_):
    os.write(1, b"TRAINS\\n")
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)

train(elastic.ObjectState(step=0))
"""


def test_status_says_that_workers_whose_groups_use_nccl_are_restarted(job: Job, port: int, tmp_path: Path) -> None:
    done, script = tmp_path / "done", tmp_path / "nccl.py"
    script.write_text(NCCL)
    options = ["--nproc-per-node=2", "--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    node = job.start([sys.executable, "-m", "elastic_rs.run", *options, str(script), str(done)])
    node.line("TRAINS")
    text = "workers of this job are restarted, not kept, when the world changes: their process group uses NCCL, and "
    until("the status says it", lambda: f"\n{text}" in ask("status", f"127.0.0.1:{port}"))
    done.touch()
    assert node.wait() == 0
    assert len([line for line in node.lines if f"elastic_rs: {text}" in line]) == 1


AT = """
import os, pathlib, sys, time, elastic_rs
rank = int(os.environ["RANK"])
for number in range(50 - 10 * rank):
    elastic_rs.step(number + 1)
os.write(1, f"AT {rank}\\n".encode())
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


def test_top_shows_which_node_is_behind(job: Job, port: int, tmp_path: Path) -> None:
    done, script = tmp_path / "done", tmp_path / "at.py"
    script.write_text(AT)
    options = ["--nnodes=2", "--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    command = [sys.executable, "-m", "elastic_rs.run", *options]
    nodes = [job.start([*command, str(script), str(done)]) for _ in range(2)]
    # Whoever joins first has rank 0.
    slow = next(node for node in nodes if node.line(r"^AT (\d)")[1] == "1")
    assert all(node.line(r"^AT \d") for node in nodes)
    watcher = Live([("127.0.0.1", port)], "job")
    behind: list[tuple[str, int]] = []

    def found() -> bool:
        _, state = watcher.read()
        behind[:] = [] if state is None else state["behind"]
        return bool(behind)

    until("a node is behind", found)
    name, steps = behind[0]
    assert (len(behind), steps) == (1, 10)
    assert name.endswith(f":{slow.pid}")
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
