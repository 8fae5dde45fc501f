"""What exceptions mean, when a state is broadcast, and which workers connect to their agent."""

from __future__ import annotations

import pytest
from elastic_rs.elastic import HostsUpdatedInterrupt, HostUpdateResult, PeerFailed
from elastic_rs.elastic._decisions import (
    FAILURE_NEWS_S,
    SETTLE_S,
    Outcome,
    ahead_by_script,
    attendance,
    backend_names,
    judge,
    mismatch,
    must_sync,
    nccl_variables,
    parked_number,
    unequal_checks,
)
from elastic_rs.elastic._exceptions import TensorMismatchError


class WrappedError(Exception):
    pass


def wrapped(cause: Exception) -> Exception:
    """Return an exception as a framework raises it that wraps what a callback raises."""
    try:
        try:
            raise cause
        except Exception as error:
            raise WrappedError from error
    except WrappedError as error:
        return error


def caused(error: Exception) -> Exception:
    """Return an exception that a script has raised because of an error of a collective."""
    try:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as gone:
            raise error from gone
    except type(error) as raised:
        return raised


def dropped(error: Exception) -> Exception:
    """Return an exception of a script that it has raised after it has caught another one."""
    try:
        try:
            raise error
        except type(error):
            raise ValueError("a bug")  # noqa: B904 # as in a script
    except ValueError as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "changing", "failed", "outcome", "asked_s"),
    [
        # The library's own exceptions.
        (HostsUpdatedInterrupt(), True, False, Outcome.KEEP, None),
        (PeerFailed(), False, True, Outcome.RESTORE, SETTLE_S),
        (wrapped(HostsUpdatedInterrupt()), True, False, Outcome.KEEP, None),
        # A change that has reached this worker at its check is a change, though a failure follows.
        (HostsUpdatedInterrupt(), True, True, Outcome.KEEP, None),
        # Raised by the script: nothing is known of it elsewhere.
        (HostsUpdatedInterrupt(), False, False, Outcome.KEEP, SETTLE_S),
        (PeerFailed(), False, False, Outcome.RESTORE, SETTLE_S),
        (wrapped(PeerFailed()), False, False, Outcome.RESTORE, SETTLE_S),
        # Because of an error of a collective, whose cause is still to come.
        (caused(PeerFailed()), False, True, Outcome.RESTORE, FAILURE_NEWS_S),
        # In a world that all leave at this check, the last word of the script counts.
        (PeerFailed(), True, False, Outcome.RESTORE, SETTLE_S),
        # What the script has caught asks for nothing.
        (dropped(PeerFailed()), False, False, Outcome.FAIL, 0.0),
        # Horovod's PR 1849: a peer's death comes as a plain RuntimeError of a collective.
        (RuntimeError("Connection closed by peer"), False, True, Outcome.RESTORE, FAILURE_NEWS_S),
        (RuntimeError("shapes do not match"), False, False, Outcome.FAIL, FAILURE_NEWS_S),
        # All ranks know that the mistake is the script's. Data of an aborted collective may look like it.
        (TensorMismatchError("shapes differ"), False, False, Outcome.FAIL, 0.0),
        (TensorMismatchError("shapes differ"), False, True, Outcome.RESTORE, 0.0),
        # Any other exception is the worker's own: it does not wait. Over garbage it may be a consequence.
        (ValueError("a bug"), False, False, Outcome.FAIL, 0.0),
        (ValueError("garbage"), False, True, Outcome.RESTORE, 0.0),
        # An exception that is not the interrupt, in a world that changes, is this worker's failure.
        (ValueError("a bug"), True, False, Outcome.FAIL, 0.0),
    ],
)
def test_what_an_exception_means(
    error: Exception, changing: bool, failed: bool, outcome: Outcome, asked_s: float | None
) -> None:
    asked: list[float] = []

    def failed_within(limit_s: float) -> bool:
        asked.append(limit_s)
        return failed

    judged = judge(error, changing=changing, failed_within=failed_within)
    assert judged.outcome is outcome
    by_script = outcome in {Outcome.KEEP, Outcome.RESTORE} and not changing and not failed
    assert (judged.by_script is not None) is by_script
    assert asked == ([] if asked_s is None else [asked_s])


@pytest.mark.parametrize(
    ("raises_at", "made", "output"),
    [(None, 0, False), (177, 0, True), (4, 1, True), (3, 1, False), (3, 2, False), (3, 3, False)],
)
def test_ranks_with_different_numbers_of_checks_are_distinguished(
    raises_at: int | None, made: int, output: bool
) -> None:
    text = unequal_checks(raises_at, made)
    assert bool(text) is output
    if output:
        assert f"at their check {raises_at}, this rank has made {made}: all ranks must call commit" in text


def test_a_worker_that_runs_another_function_cannot_take_the_state() -> None:
    ours, theirs = ("train", ["epoch", "model"]), ("finetune", ["epoch", "head"])
    assert mismatch(ours, ours, 2) == ""
    text = mismatch(ours, theirs, 2)
    assert text.startswith(
        "rank 2 runs `finetune` with a state of epoch, head; this worker runs `train` with a state of"
    )
    assert "begins with the first one" in text
    text = mismatch(("train", []), ("train", ["head"]), 0)
    assert text.endswith("with a state of no names: all ranks must make the same state")


def test_errors_of_torch_distributed_are_runtime_errors() -> None:
    """``judge`` waits for news after a RuntimeError only."""
    import torch.distributed as dist

    for name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"):
        assert issubclass(getattr(dist, name), RuntimeError), name


@pytest.mark.parametrize(
    ("world_says", "commit", "broadcast"),
    [
        (True, None, True),
        (True, 3, True),
        (False, 3, False),
        # Nobody has ever broadcast: the first world failed before it could.
        (False, None, True),
    ],
)
def test_when_a_state_is_broadcast(world_says: bool, commit: int | None, broadcast: bool) -> None:
    assert must_sync(world_says, commit) is broadcast


def test_the_lowest_rank_that_asks_for_a_world_has_the_newest_state() -> None:
    numbers = [parked_number(4, ahead=ahead_by_script(rank, 3)) for rank in range(3)]
    assert numbers == [8, 7, 6]  # a commit made meanwhile is 5


@pytest.mark.parametrize(
    ("commit", "ahead", "number"), [(None, False, None), (None, True, None), (0, False, 0), (4, False, 4), (4, True, 5)]
)
def test_the_number_that_says_how_new_a_state_is(commit: int | None, ahead: bool, number: int | None) -> None:
    assert parked_number(commit, ahead=ahead) == number


@pytest.mark.parametrize(
    ("environment", "backends", "path", "reason"),
    [
        ({}, "gloo", None, ""),
        ({"ELASTIC_RS_AGENT": "/a"}, "gloo", None, ""),  # in_place is off
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "gloo", None, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "gloo", None, ""),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "off"}, "gloo", None, ""),
        ({"ELASTIC_RS_IN_PLACE": "gloo"}, "gloo", None, ""),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "gloo", "/a", ""),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "cpu:gloo,cuda:gloo", "/a", ""),
        (
            {"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo", "TORCH_GLOO_LAZY_INIT": "TRUE"},
            "gloo",
            None,
            "with TORCH_GLOO_LAZY_INIT=TRUE gloo connects in the middle of collectives",
        ),
        (
            {"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo", "TORCH_GLOO_LAZY_INIT": "0"},
            "gloo",
            "/a",
            "",
        ),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "cpu:gloo,cuda:nccl", None, "in_place=nccl"),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "cuda:nccl-legacy", None, "in_place=nccl"),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "mpi", None, "backend mpi"),
        (
            {"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl"},
            "cuda:nccl-lazy",
            None,
            "backend nccl-lazy are not",
        ),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "maybe"}, "gloo", None, "`maybe`, must be one of"),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl"}, "gloo", "/a", ""),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl"}, "nccl", None, "watchdog"),
        (
            {
                "ELASTIC_RS_AGENT": "/a",
                "ELASTIC_RS_IN_PLACE": "nccl",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            },
            "cpu:gloo,cuda:nccl",
            "/a",
            "",
        ),
    ],
)
def test_when_a_worker_connects_to_its_agent(
    environment: dict[str, str], backends: str, path: str | None, reason: str
) -> None:
    found = attendance(environment, backend_names(backends))
    assert found.path == path
    assert reason in found.reason
    assert bool(reason) == bool(found.reason)
    assert found.restarts_for_nccl == ("in_place=nccl" in reason)


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "cpu:gloo,cuda:NCCL2"])
def test_nccl_has_three_names_in_torch(name: str) -> None:
    assert "nccl" in backend_names(name)
    assert backend_names(name) <= {"gloo", "nccl"}


@pytest.mark.parametrize(
    ("environment", "backends", "variables"),
    [
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl"}, "gloo", {}),
        # Without an agent that tells of failures, the watchdog is needed.
        ({}, "nccl", {}),
        ({"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "gloo"}, "nccl", {}),
        (
            {"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl"},
            "cpu:gloo,cuda:nccl",
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        ),
        (
            {"ELASTIC_RS_AGENT": "/a", "ELASTIC_RS_IN_PLACE": "nccl", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
            "nccl",
            {"TORCH_NCCL_ENABLE_MONITORING": "0"},
        ),
    ],
)
def test_what_is_set_for_nccl(environment: dict[str, str], backends: str, variables: dict[str, str]) -> None:
    assert nccl_variables(environment, backend_names(backends)) == variables


def test_skip_sync_is_horovods() -> None:
    assert HostsUpdatedInterrupt("", HostUpdateResult.removed).skip_sync
    assert not HostsUpdatedInterrupt("", HostUpdateResult.mixed).skip_sync
    assert HostUpdateResult.added | HostUpdateResult.removed == HostUpdateResult.mixed
