"""Messages of failures, in PyTorch's classes and in those of ``elastic-run``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_rs.agent._failures import NOT_AVAILABLE, failures_of
from elastic_rs.run._report import Failure as OurFailure
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MAKERS = pytest.mark.parametrize("make", [ProcessFailure, OurFailure], ids=["PyTorch's", "ours"])


class _Cause:
    node, role, local_rank, global_rank, pid, message = "node1:7", "trainer", 0, 2, 70, "x\ny"
    exit, returncode = "exit code 3", 3


def _ended(local_rank: int, pid: int, returncode: int, *, at: float = 1000.7, stopped: bool = False) -> Any:
    return SimpleNamespace(local_rank=local_rank, pid=pid, returncode=returncode, at=at, stopped=stopped)


@MAKERS
def test_workers_that_were_stopped_have_not_failed_and_others_failed_when_they_ended(make: Any) -> None:
    cause: Any = _Cause()
    cause.pid = 7
    exits = [_ended(2, 7, 3), _ended(0, 5, -15, stopped=True), _ended(1, 6, -6, at=1002), _ended(3, 8, 0)]
    failures = failures_of(cause, exits, 0, {}, None, failed_at=1000.9, make=make)
    assert {rank: failure.timestamp for rank, failure in failures.items()} == {2: 1000, 1: 1002}


@MAKERS
def test_another_node_s_failure_names_its_node(make: Any) -> None:
    cause: Any = _Cause()
    exits = [_ended(0, 5, 1), _ended(1, 6, -6)]
    failures = failures_of(cause, exits, 0, {}, "no restart is left", failed_at=999.5, make=make)
    assert list(failures) == [2, 0, 1]
    assert [failure.timestamp for failure in failures.values()] == [999, 1000, 1000]
    assert failures[2].message == "exit code 3 on node1:7\n  x\n  y"
    assert failures[2].exitcode == 3
    assert min(failures.values(), key=lambda failure: failure.timestamp) is failures[2]


@MAKERS
def test_a_failure_without_a_message_has_a_hint(make: Any) -> None:
    # The worker's stderr is a terminal, so its end is not known.
    cause: Any = _Cause()
    cause.message = ""
    (elsewhere,) = failures_of(cause, [], 0, {}, None, failed_at=None, make=make).values()
    hint = make(0, 70, 3, NOT_AVAILABLE).message
    assert "https://pytorch.org/docs/stable/elastic/errors.html" in hint
    assert elsewhere.message == f"exit code 3 on node1:7\n  {hint}"
    cause.exit, cause.returncode = "SIGKILL", -9
    (killed,) = failures_of(cause, [], 0, {}, None, failed_at=None, make=make).values()
    assert killed.message == "SIGKILL on node1:7", "a killed worker records nothing, with or without a decorator"


@MAKERS
def test_a_start_that_failed_on_another_node_is_not_taken_for_a_local_worker(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "ours", "extraInfo": {"timestamp": "1"}}}))
    cause: Any = _Cause()
    cause.pid, cause.exit, cause.returncode = 0, "a failure to start", 1
    assert (
        "ours"
        not in failures_of(cause, [_ended(0, 5, 1)], 0, {0: str(file)}, None, failed_at=None, make=make)[2].message
    )


@MAKERS
def test_a_job_that_failed_without_a_worker_names_the_reason(make: Any) -> None:
    assert failures_of(None, [], 4, {}, "the run is over", failed_at=None, make=make)[4].message == "the run is over"
