"""Conversion of the core's failures to PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from elastic_rs._elastic_rs import Failure, WorkerExit

NOT_AVAILABLE = "<N/A>"
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
"""PyTorch's hint for a worker that ended by itself and left no traceback."""


class ProcessFailure(Protocol):
    """PyTorch's class of that name, or ours, which does not need torch."""

    error_file: str
    message: Any
    timestamp: int


F = TypeVar("F", bound=ProcessFailure)


def failures_of(
    cause: Failure | None,
    exits: Sequence[WorkerExit],
    first_rank: int,
    error_files: Mapping[int, str],
    reason: str | None,
    *,
    failed_at: float | None,
    make: Callable[[int, int, int, str], F],
) -> dict[int, F]:
    """Return failures by global rank: first the root cause, on whatever node, then this node's other failures.

    Workers that their agent has stopped because of the first failure have not failed, and are left out, where PyTorch
    lists them.

    PyTorch takes the one with the smallest timestamp for the root cause, and the first of several with the same.

    Args:
        cause: the first failure of the job, if a node has reported one.
        exits: this node's workers that have ended.
        first_rank: global rank of this node's local rank 0.
        error_files: where each of them may have recorded an exception.
        reason: why the job has failed, as text; for the case that no worker did.
        failed_at: when the first failure happened, as far as this node knows, in seconds since 1970.
        make: makes one of local rank, process id, return code and error file.
    """
    failures: dict[int, F] = {}
    own = {first_rank + exited.local_rank: exited for exited in exits}
    if cause is not None:
        known = own.get(cause.global_rank)
        here = known is not None and known.pid == cause.pid
        file = error_files.get(cause.local_rank, NOT_AVAILABLE) if here else NOT_AVAILABLE
        failure = make(cause.local_rank, cause.pid, cause.returncode, file)
        if failure.error_file == NOT_AVAILABLE:
            failure.timestamp = failure.timestamp if failed_at is None else int(failed_at)
            said = cause.message or (NO_TRACEBACK if cause.returncode >= 0 else "")
            text = f"{cause.exit} on {cause.node or 'this node'}\n{said}".rstrip()
            failure.message = text.replace("\n", "\n  ")
        failures[cause.global_rank] = failure
    for exited in exits:
        rank = first_rank + exited.local_rank
        if exited.returncode != 0 and not exited.stopped and rank not in failures:
            file = error_files.get(exited.local_rank, NOT_AVAILABLE)
            failures[rank] = failure = make(exited.local_rank, exited.pid, exited.returncode, file)
            if failure.error_file == NOT_AVAILABLE:
                failure.timestamp = int(exited.at)
    if not failures:
        failures[first_rank] = make(0, 0, 1, NOT_AVAILABLE)
        failures[first_rank].message = reason or "the job has failed"
        failures[first_rank].timestamp = failures[first_rank].timestamp if failed_at is None else int(failed_at)
    began = next(iter(failures.values())).timestamp
    for failure in failures.values():
        failure.timestamp = max(failure.timestamp, began)
    return failures
