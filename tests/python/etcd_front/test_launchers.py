"""torchrun with both agents, and elastic-run, over a real etcd."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

pytestmark = [pytest.mark.torchrun]
SCRIPTS = Path(__file__).parents[1] / "scripts"
WORKER, FAMILY = SCRIPTS / "worker.py", SCRIPTS / "family.py"
# etcd's shortest lease is 2 s.
LEASE = "keep_alive_interval=1,keep_alive_max_attempt=3"

Start = Callable[..., Process]


@pytest.fixture(params=["rust", "torch", "run"])
def agent(request: pytest.FixtureRequest) -> str:
    """Return the launcher: torchrun with our agent, torchrun with PyTorch's, or elastic-run."""
    return str(request.param)


@pytest.fixture
def start(job: Job, endpoint: str, name: str, agent: str) -> Start:
    def start(
        number: int,
        *worker: str | Path,
        nnodes: str,
        script: Path = WORKER,
        backend: str = "rust-etcd",
        restarts: int = 3,
        nproc: int = 1,
    ) -> Process:
        command = [
            sys.executable,
            *("-m", "elastic_rs.run" if agent == "run" else "torch.distributed.run"),
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--max-restarts={restarts}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={name}",
            f"--rdzv-conf=last_call_timeout=1,{LEASE},agent={'torch' if agent == 'torch' else 'rust'}",
            f"--local-addr=127.0.0.{number}",
            str(script),
            *map(str, worker),
        ]
        return job.start(command, name=f"node{number}", env={"ELASTIC_RS_LOG": "info"})

    return start


def test_nodes_meet_and_their_workers_share_rank_0s_store(start: Start) -> None:
    nodes = [start(number, nnodes="2", nproc=2) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    lines = [line for node in nodes for line in node.lines]
    (master,) = {line.partition("master=")[2].split()[0] for line in lines if line.startswith("SUM ")}
    assert master.startswith(("127.0.0.2:", "127.0.0.3:"))
    assert sum(line.startswith("SUM ") and " world=4 " in line for line in lines) == 4
    assert any(line.startswith("KEYS ") and line.endswith(": 0") for line in lines), "the store was empty"


def test_a_failed_worker_is_reported_everywhere_and_restarted(start: Start, agent: str) -> None:
    nodes = [start(number, "--fail", "1:3", nnodes="2", restarts=1) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [1, 1]
    if agent != "torch":  # PyTorch's agent counts restarts by itself, and tells nobody
        for node in nodes:
            text = "\n".join(node.lines)
            assert sum(line.startswith("WORKER ") for line in node.lines) == 2, "the job's one restart"
            assert "exitcode  : 3" in text


def test_the_job_survives_the_node_with_rank_0(start: Start, job: Job, agent: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = {number: start(number, "--until", done, nnodes="1:2", script=FAMILY) for number in (2, 3)}
    ranks = {place(node, 2)["group_rank"]: number for number, node in nodes.items()}
    lost, other = nodes[ranks["0"]], nodes[ranks["1"]]
    mark = other.mark()
    orphans = job.workers(lost)
    lost.signal(signal.SIGKILL)
    lost.wait()
    assert place(other, 1, since=mark)["group_rank"] == "0"
    if agent != "torch":  # PyTorch's agent leaves its workers behind when it is killed
        job.until_gone(*orphans.values())
    done.touch()
    assert other.wait() == 0


def test_a_node_that_has_finished_waits_for_the_others(start: Start, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = tmp_path / "one_is_early.py"
    script.write_text(
        "import os, sys, time\n"
        "os.write(1, f'READY {os.environ[\"RANK\"]} {os.getpid()}\\n'.encode())\n"
        "while os.environ['RANK'] != '0' and not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.02)\n"
    )
    nodes = [start(number, done, nnodes="2", script=script) for number in (2, 3)]
    ready = {match.group(1): (node, int(match.group(2))) for node in nodes if (match := node.line(r"READY (\d) (\d+)"))}
    early, pid = ready["0"]
    job.until_gone(pid)
    assert early.running
    assert ready["1"][0].running
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    text = "\n".join(line for node in nodes for line in node.lines)
    assert text.count("READY") == 2, "nobody was restarted"
    assert "Error waiting on exit barrier" not in text


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_pytorchs_names_work_in_elastic_run(start: Start, backend: str) -> None:
    assert start(2, nnodes="1", backend=backend).wait() == 0
