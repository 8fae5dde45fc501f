"""``LocalElasticAgent``, called directly, as by PyTorch's launcher and PyTorch's tests."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import elastic_rs
import pytest
from helpers import functions
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TheirAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from .conftest import LIMIT_S, metrics_of_torch


def test_a_program_returns_none_for_each_rank(agent_of: Any) -> None:
    result = agent_of("true", nproc=2).run()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: None, 1: None}, {})


def test_a_missing_program_costs_restarts_and_is_named(agent_of: Any) -> None:
    agent = agent_of("/no/such/program", nproc=2, restarts=2)
    result = agent.run()
    assert result.is_failed()
    assert agent._remaining_restarts == 0
    assert "/no/such/program" in result.failures[0].message
    assert list(result.failures) == [0]


def test_the_end_of_a_program_s_stderr_is_its_message(agent_of: Any) -> None:
    result = agent_of("sh", "-c", "echo for this reason >&2; exit 9").run()
    assert result.failures[0].exitcode == 9
    assert "for this reason" in result.failures[0].message


def test_the_local_rank_is_substituted_in_arguments(agent_of: Any, tmp_path: Path) -> None:
    agent_of("touch", f"{tmp_path}/${{local_rank}}.seen", nproc=2).run()
    assert sorted(path.name for path in tmp_path.glob("*.seen")) == ["0.seen", "1.seen"]


def test_it_is_an_agent_of_torch_by_type(agent_of: Any) -> None:
    agent = agent_of("true", nproc=2)
    assert isinstance(agent, TheirAgent)
    assert isinstance(agent, SimpleElasticAgent)
    group = agent.get_worker_group()
    assert group.state == WorkerState.INIT
    agent.run()
    assert group.state == WorkerState.SUCCEEDED
    assert (group.group_rank, group.group_world_size) == (0, 1)
    assert [worker.global_rank for worker in group.workers] == [0, 1]
    assert all(worker.id > 0 for worker in group.workers)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_workers_have_the_environment_that_torch_gives(
    agent_of: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    seen = []
    for cls in (TheirAgent, elastic_rs.LocalElasticAgent):
        agent = agent_of(
            functions.environment,
            nproc=2,
            restarts=3,
            cls=cls,
            start_method="fork",
            backend=backend,
        )
        seen.append(agent.run().return_values)
    theirs, ours = seen
    for rank in (0, 1):
        differ = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST"}
        assert ours[rank].pop("TORCHELASTIC_GENERATION") == "1"
        assert {**ours[rank], **dict.fromkeys(differ)} == {**theirs[rank], **dict.fromkeys(differ)}


def told_by(
    agent: Any, destination: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, str, int | None]], set[str]]:
    """Run an agent, and return the events that it has recorded and the names of its metrics."""
    handlers = pytest.importorskip("torch.distributed.elastic.events.handlers")

    class Events(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event = json.loads(record.getMessage())
            about = event["metadata"]
            assert about["hostname"] == socket.getfqdn()
            events.append((event["name"].rpartition(".")[2], event["source"], about["global_rank"]))

    events: list[tuple[str, str, int | None]] = []
    monkeypatch.setitem(handlers._log_handlers, destination, Events())
    with metrics_of_torch() as names:
        agent.run()
        assert agent.get_event_succeeded().metadata["state"] == "SUCCEEDED"
    return events, names


def test_events_and_metrics_are_those_of_torch(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "event_log_handler" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no choice of event handlers")
    script = "exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    seen = []
    for number, (cls, backend) in enumerate(
        [
            (TheirAgent, "static"),
            (elastic_rs.LocalElasticAgent, "static"),
            (elastic_rs.LocalElasticAgent, "rust-c10d"),
        ]
    ):
        destination = f"collect{number}"  # torch makes a logger for each, once
        options = {"spec": {"event_log_handler": destination}, "cls": cls, "backend": backend}
        agent = agent_of("sh", "-c", script, nproc=2, restarts=1, **options)
        seen.append(told_by(agent, destination, monkeypatch))
    events = [sorted(events) for events, _ in seen]
    assert events[0] == events[1] == events[2]
    assert ("RENDEZVOUS", "AGENT", None) in events[0]
    # Metrics of steps that our agent does not have: docs/agent.md.
    steps = ("_monitor_workers", "_stop_workers", "_initialize_workers", "_restart_workers")
    theirs = {name for name in seen[0][1] if not name.partition(".")[2].startswith(steps)}
    assert theirs <= seen[1][1]
    assert theirs <= seen[2][1]
    assert "LocalElasticAgent._start_workers.duration.ms" in theirs


@pytest.mark.parametrize("cls", [TheirAgent, elastic_rs.LocalElasticAgent])
@pytest.mark.parametrize("backend", ["static", "rust-c10d"])
def test_the_master_s_address_may_be_given(agent_of: Any, cls: Any, backend: str) -> None:
    given = {"master_addr": "elsewhere", "master_port": 42}
    agent = agent_of(
        functions.environment,
        start_method="fork",
        cls=cls,
        backend=backend,
        spec=given,
    )
    environment = agent.run().return_values[0]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("elsewhere", "42")


def test_the_exit_barrier_over_pytorch_s_handler_waits_for_the_other_node(agent_of: Any, port: int) -> None:
    results: list[RunResult] = []
    with contextlib.ExitStack() as stack:
        for host in ("1", "0"):
            agent = agent_of(
                "true",
                backend="c10d",
                port=port,
                nodes="2",
                conf={"is_host": host},
            )
            thread = threading.Thread(target=lambda agent=agent: results.append(agent.run()))
            thread.start()
            stack.callback(thread.join, LIMIT_S)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert sorted(rank for result in results for rank in result.return_values) == [0, 1]


def test_a_waiting_node_restarts_the_workers(agent_of: Any, tmp_path: Path) -> None:
    # Over a handler that is not ours, the agent has to poll `num_nodes_waiting`.
    marks = tmp_path / "marks"
    marks.mkdir()
    script = f'touch {marks}/$TORCHELASTIC_GENERATION; [ "$TORCHELASTIC_GENERATION" = 2 ] || sleep 300'
    agent = agent_of("sh", "-c", script, backend="static")
    handler = agent.get_worker_group().spec.rdzv_handler
    handler.num_nodes_waiting = lambda: int({path.name for path in marks.iterdir()} == {"1"})
    assert agent.run().return_values == {0: None}
    assert agent._remaining_restarts == 0
    assert sorted(path.name for path in marks.iterdir()) == ["1", "2"]


def test_a_join_that_fails_leaves_nothing_behind(agent_of: Any) -> None:
    agent = agent_of("sleep", "300")
    agent.get_worker_group().spec.rdzv_handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        agent.run()
    assert agent._agent is None


def test_run_may_be_called_again(agent_of: Any) -> None:
    agent = agent_of(functions.rank, start_method="fork", backend="static")
    assert [agent.run().return_values for _ in range(2)] == [{0: 0}, {0: 0}]


def test_it_runs_outside_of_the_main_thread(agent_of: Any) -> None:
    agent = agent_of(functions.rank, nproc=2, start_method="forkserver")
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    thread.join(LIMIT_S)
    assert [result.return_values for result in results] == [{0: 0, 1: 1}]


def test_restart_budget_node_counts_restarts_by_node(agent_of: Any) -> None:
    agent = agent_of("sh", "-c", "exit 3", restarts=1, conf={"restart_budget": "node"})
    result = agent.run()
    assert result.failures[0].exitcode == 3
    assert agent._remaining_restarts == 0
