"""Conversion of the core's failures to PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_rs._elastic_rs import Failure

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
    exits: Sequence[tuple[int, int, int]],
    first_rank: int,
    error_files: Mapping[int, str],
    reason: str | None,
    *,
    make: Callable[[int, int, int, str], F],
) -> dict[int, F]:
    """Return failures by global rank: first the root cause, on whatever node, then this node's other failures.

    PyTorch takes the one with the smallest timestamp for the root cause, and the first of several with the same.

    Args:
        cause: the first failure of the job, if a node has reported one.
        exits: this node's workers that have ended: local rank, process id, return code.
        first_rank: global rank of this node's local rank 0.
        error_files: where each of them may have recorded an exception.
        reason: why the job has failed, in words; for the case that no worker did.
        make: makes one of local rank, process id, return code and error file.
    """
    failures: dict[int, F] = {}
    own = {first_rank + local_rank: (pid, code) for local_rank, pid, code in exits}
    if cause is not None:
        here = own.get(cause.global_rank, (None, 0))[0] == cause.pid
        file = error_files.get(cause.local_rank, NOT_AVAILABLE) if here else NOT_AVAILABLE
        failure = make(cause.local_rank, cause.pid, cause.returncode, file)
        if failure.error_file == NOT_AVAILABLE:
            said = cause.message or (NO_TRACEBACK if cause.returncode >= 0 else "")
            text = f"{cause.exit} on {cause.node or 'this node'}\n{said}".rstrip()
            failure.message = text.replace("\n", "\n  ")
        failures[cause.global_rank] = failure
    for local_rank, pid, code in exits:
        rank = first_rank + local_rank
        if code != 0 and rank not in failures:
            failures[rank] = make(local_rank, pid, code, error_files.get(local_rank, NOT_AVAILABLE))
    if not failures:
        failures[first_rank] = make(0, 0, 1, NOT_AVAILABLE)
        failures[first_rank].message = reason or "the job has failed"
    began = next(iter(failures.values())).timestamp
    for failure in failures.values():
        failure.timestamp = max(failure.timestamp, began)
    return failures
