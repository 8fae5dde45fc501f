"""Fixtures and helpers for the tests of ``LocalElasticAgent``."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import elastic_rs
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.metrics import api as metrics
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

NODE = "127.0.0.1"
STARTS = ["spawn", "fork", "forkserver"]
LIMIT_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Import torch once in the fork server of ``multiprocessing``, instead of in each of its children."""
    multiprocessing.set_forkserver_preload(["torch.distributed.elastic.multiprocessing"])


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restore the signal handlers that an agent replaces."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def agent_of(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., Any]]:
    """Return a function that makes an agent. The agents' rendezvous handlers are shut down at the end."""
    made: list[RendezvousHandler] = []

    def agent_of(
        entrypoint: Any,
        *args: Any,
        nproc: int = 1,
        restarts: int = 0,
        backend: str = "rust-c10d",
        port: int | None = None,
        nodes: str = "1",
        cls: Any = elastic_rs.LocalElasticAgent,
        logs: LogsSpecs | None = None,
        spec: dict[str, Any] | None = None,
        conf: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        low, _, high = nodes.partition(":")
        if port is None:
            port = 0 if backend == "rust-c10d" else free_port()
        config: dict[str, Any] = (
            {"last_call_timeout": 1, "drain_timeout": 0} if backend == "rust-c10d" else {"is_host": "1"}
        )
        if backend == "static":
            config = {"rank": 0}
        params = RendezvousParameters(
            backend, f"{NODE}:{port}", "job", int(low), int(high or low), local_addr=NODE, **config | (conf or {})
        )
        made.append(get_rendezvous_handler(params))
        given: dict[str, Any] = {
            "role": "trainer",
            "local_world_size": nproc,
            "max_restarts": restarts,
            "monitor_interval": 0.05,
        }
        worker = WorkerSpec(entrypoint=entrypoint, args=args, rdzv_handler=made[-1], **given | (spec or {}))
        logs = logs or DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
        return cls(spec=worker, logs_specs=logs, **options)

    yield agent_of
    for handler in reversed(made):
        handler.shutdown()


def until(found: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def metrics_of_torch() -> Iterator[set[str]]:
    """Yield the set of names of the metrics that PyTorch's handler gets meanwhile."""

    class Metrics(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            names.add(metric_data.name)

    names: set[str] = set()
    metrics.configure(Metrics(), group="torchelastic")
    try:
        yield names
    finally:
        metrics.configure(metrics.NullMetricHandler(), group="torchelastic")
