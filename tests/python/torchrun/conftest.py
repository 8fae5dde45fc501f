"""What the tests with real torchrun processes share."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.procs import Job, Process

WORKER = Path(__file__).parents[1] / "scripts" / "worker.py"


@pytest.fixture
def port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Start = Callable[..., Process]


@pytest.fixture(params=["rust", "torch"])
def agent(request: pytest.FixtureRequest) -> str:
    """Return whose agent runs the workers: ours, or PyTorch's own on our rendezvous."""
    return str(request.param)


@pytest.fixture
def start(job: Job, port: int, agent: str) -> Start:
    """Return a function that starts one node: ``start(last octet of its address, worker arguments, nnodes=...)``."""

    def start(
        number: int,
        *worker: str | Path,
        nnodes: str,
        nproc: int = 1,
        restarts: int = 3,
        conf: str = "last_call_timeout=1",
    ) -> Process:
        return job.torchrun(
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--max-restarts={restarts}",
            "--rdzv-backend=rust-c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=job",
            f"--rdzv-conf={conf},agent={agent}",
            f"--local-addr=127.0.0.{number}",
            WORKER,
            *worker,
            name=f"node{number}",
            env={"ELASTIC_RS_LOG": "info"},
        )

    return start
