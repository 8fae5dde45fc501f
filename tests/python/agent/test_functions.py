"""Functions as workers."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import pytest
from elastic_rs.agent._functions import Functions
from helpers import functions
from torch.distributed.elastic.agent.server.api import WorkerState

# A spawned process imports torch, which takes 3 s of a core. One test does that always, the others in the long run.
STARTS = [pytest.param("spawn", marks=pytest.mark.long), "fork", "forkserver"]


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_a_function_returns_its_values_by_global_rank(agent_of: Any, start_method: str) -> None:
    result = agent_of(functions.large, nproc=2, start_method=start_method).run()
    assert result.state == WorkerState.SUCCEEDED
    assert {rank: (len(value), value[0]) for rank, value in result.return_values.items()} == {
        0: (1_000_000, 0),
        1: (1_000_000, 1),
    }
    assert result.failures == {}
    assert not result.is_failed()


@pytest.mark.parametrize("start_method", STARTS)
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7), ("kill", -signal.SIGKILL)])
def test_a_function_that_fails_is_the_cause(agent_of: Any, start_method: str, how: str, code: int) -> None:
    result = agent_of(functions.fails, 1, how, nproc=2, start_method=start_method).run()
    assert result.is_failed()
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    assert (first.local_rank, first.exitcode) == (1, code)
    assert first is result.failures[1]
    if how == "raise":
        assert first.error_file_data["message"]["message"] == "ValueError: no such luck"
        assert "Traceback" in first.error_file_data["message"]["extraInfo"]["py_callstack"]
    if how == "kill":
        assert "OOM" in first.message or "SIGKILL" in first.message


@pytest.mark.parametrize("backend", ["rust-c10d", "static"])
@pytest.mark.parametrize("start_method", STARTS)
def test_functions_are_restarted(agent_of: Any, start_method: str, backend: str) -> None:
    agent = agent_of(
        functions.fails_at_first,
        nproc=2,
        restarts=2,
        start_method=start_method,
        backend=backend,
    )
    result = agent.run()
    assert result.return_values == {0: 1, 1: 1}
    assert agent._remaining_restarts == 1


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_function_that_exits_with_0_has_succeeded_with_none(agent_of: Any, nproc: int) -> None:
    # PyTorch's agent would wait for its value for ever (`MultiprocessContext._poll`).
    result = agent_of(functions.leaves_without_returning, 0, nproc=nproc, start_method="fork").run()
    assert result.return_values == {0: None, 1: 1} if nproc == 2 else {0: None}


def test_a_job_does_not_wait_for_the_value_of_a_function_that_exits(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread that collects return values may be slower than the end of the job.
    monkeypatch.setattr(Functions, "_collect", lambda _: None)
    result = agent_of(functions.leaves_at_once, nproc=2, start_method="fork").run()
    assert result.return_values == {0: None, 1: None}


def test_a_value_that_cannot_be_unpickled_does_not_hang_the_job(
    agent_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    result = agent_of(functions.unreadable, nproc=2, start_method="fork").run()
    assert result.return_values == {0: None, 1: 1}
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("start_method", STARTS)
def test_a_value_that_cannot_be_pickled_is_named_as_the_cause(agent_of: Any, start_method: str) -> None:
    result = agent_of(functions.unpicklable, nproc=2, start_method=start_method).run()
    assert result.is_failed()
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    assert first.exitcode == 1
    assert "AttributeError: " in first.message or "PicklingError: " in first.message
    assert "unpicklable.<locals>.<lambda>" in first.message
    assert "ret_val_.put(ret)" in first.message, "the traceback is in the message"


def test_a_failure_with_a_message_that_is_not_utf_8_is_reported(agent_of: Any) -> None:
    result = agent_of(functions.fails_over_a_name_that_is_no_text, start_method="fork").run()
    assert result.is_failed()
    (failure,) = result.failures.values()
    assert failure.message["message"] == "ValueError: no file \udcff"


def test_a_function_that_cannot_be_pickled_is_an_error_and_leaves_nothing(agent_of: Any) -> None:
    agent = agent_of(lambda: None, start_method="spawn")
    # The exception class depends on Python's version.
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"Can't (pickle|get) local object"):
        agent.run()
    assert agent._functions is None
