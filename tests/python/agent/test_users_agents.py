"""Agents that users have derived from PyTorch's classes, and attributes that other programs read from an agent."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import elastic_rs
import pytest
from elastic_rs.rendezvous import create_rust_c10d_handler
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

NODE = "127.0.0.1"
LIMIT_S = 90.0


class UsersAgent(SimpleElasticAgent):
    """An agent as PyTorch's documentation describes it: only the abstract methods."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        for worker in worker_group.workers:
            env = {
                "RANK": worker.global_rank,
                "WORLD_SIZE": worker.world_size,
                "ADDRESS": f"{worker_group.master_addr}:{worker_group.master_port}",
            }
            command = [str(spec.entrypoint), *map(str, spec.args)]
            process = subprocess.Popen(command, env=os.environ | {name: str(value) for name, value in env.items()})
            self.processes[worker.local_rank] = process
        return {local_rank: process.pid for local_rank, process in self.processes.items()}

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._stop_workers()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {local_rank: process.poll() for local_rank, process in self.processes.items()}
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if failed := {i: code for i, code in codes.items() if code}:
            failures = {ranks[i]: ProcessFailure(i, self.processes[i].pid, code, "") for i, code in failed.items()}
            return RunResult(WorkerState.FAILED, failures=failures)
        if None in codes.values():
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ranks.values()))


def spec_of(handler: RendezvousHandler, script: str, *, restarts: int = 0) -> WorkerSpec:
    program: dict[str, Any] = {"entrypoint": "sh", "args": ("-c", script)}
    return WorkerSpec("trainer", 1, handler, **program, max_restarts=restarts, monitor_interval=0.05)


def dynamic(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = elastic_rs.create_backend(params)
    return elastic_rs.create_handler(store, backend, params)


Made = Callable[..., RendezvousHandler]


@pytest.fixture(params=["rust-c10d", "DynamicRendezvousHandler"])
def handler_of(request: pytest.FixtureRequest, port: int) -> Iterator[Made]:
    """Return a function that makes a node's handler. All handlers are shut down at the end."""
    made: list[RendezvousHandler] = []

    def handler_of(nodes: int) -> RendezvousHandler:
        ours = request.param == "rust-c10d"
        conf = {"drain_timeout": 0} if ours else {"is_host": str(int(not made))}
        params = RendezvousParameters(
            request.param if ours else "c10d",
            f"{NODE}:{port}",
            "job",
            nodes,
            nodes,
            local_addr=f"127.0.0.{len(made) + 2}",
            last_call_timeout=1,
            **conf,
        )
        made.append(create_rust_c10d_handler(params) if ours else dynamic(params))
        return made[-1]

    yield handler_of
    for handler in reversed(made):
        handler.shutdown()


def test_a_user_s_agent_runs_over_our_handlers(handler_of: Made, tmp_path: Path) -> None:
    script = """
    cd FOLDER
    if [ $RANK = 1 ]; then touch runs; until [ -e again ]; do sleep 0.05; done; exit 0; fi
    if [ -e failed ]; then touch again; exit 0; fi
    until [ -e runs ]; do sleep 0.05; done
    touch failed; exit 3
    """.replace("FOLDER", str(tmp_path))

    def run(handler: RendezvousHandler) -> RunResult:
        return UsersAgent(spec_of(handler, script, restarts=1)).run()

    handlers = [handler_of(2) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        results = [future.result(LIMIT_S) for future in [pool.submit(run, handler) for handler in handlers]]
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert sorted(rank for result in results for rank in result.return_values) == [0, 1]
    assert (tmp_path / "again").exists()


def test_the_worker_group_has_the_store_that_the_agents_share(tmp_path: Path) -> None:
    params = RendezvousParameters("rust-c10d", f"{NODE}:0", "job", 1, 1, local_addr=NODE, drain_timeout=0)
    handler = create_rust_c10d_handler(params)
    script = f"touch {tmp_path}/runs; while [ ! -e {tmp_path}/done ]; do sleep 0.05; done"
    spec = WorkerSpec(
        "trainer", 1, handler, entrypoint="sh", args=("-c", script), max_restarts=0, monitor_interval=0.05
    )
    agent = elastic_rs.LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path / "logs")))
    assert agent.get_worker_group().store is None, "as in PyTorch, before the first round"
    result: Future[RunResult] = Future()
    thread = threading.Thread(target=lambda: result.set_result(agent.run()))
    thread.start()
    try:
        pause = threading.Event()
        while not (tmp_path / "runs").exists():
            assert thread.is_alive()
            pause.wait(0.02)
        store: Any = agent.get_worker_group().store
        store.set("mine", "1")
        assert store.get("mine") == b"1"
        assert agent.get_worker_group().store is store
    finally:
        (tmp_path / "done").touch()
        thread.join()
        handler.shutdown()
    assert result.result(0).state == WorkerState.SUCCEEDED
