"""The final report of ``elastic-run`` about a failed job, and the error file that it leaves to its caller.

Text and files are those of torchrun, which come from ``ChildFailedError``, ``ProcessFailure`` and ``@record`` in
``torch/distributed/elastic/multiprocessing/errors`` (2.15). Loaded after a failure alone.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from elastic_rs._elastic_rs import Launched
from elastic_rs._host_name import host_name
from elastic_rs._terminal import RED, paint
from elastic_rs.agent._failures import NO_TRACEBACK, NOT_AVAILABLE, ProcessFailure, failures_of
from elastic_rs.run._path import write_error_file

WIDEST = 60

F = TypeVar("F", bound=ProcessFailure)


class Failure:
    """A failed worker: PyTorch's ``ProcessFailure``."""

    def __init__(self, local_rank: int, pid: int, exitcode: int, error_file: str) -> None:
        self.local_rank = local_rank
        self.pid = pid
        self.exitcode = exitcode
        self.error_file = error_file
        self.timestamp = int(time.time())
        self.message: Any = ""
        self.error_file_data: Any = None
        # A worker's file is not trusted: whatever it holds, the report is printed. Reading a pipe could block.
        try:
            path = Path(error_file)
            if not path.is_file():
                raise FileNotFoundError(error_file)
            self.error_file_data = data = json.loads(path.read_text(encoding="utf-8"))
            self.message = data["message"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.error_file = NOT_AVAILABLE
        else:
            self.timestamp = _recorded_at(data, self.timestamp)
        if not self.message and exitcode < 0:
            self.message = f"Signal {-exitcode} ({self.signal_name}) received by PID {pid}"
        self.message = self.message or NO_TRACEBACK

    @property
    def signal_name(self) -> str:
        """The name of the signal that ended the worker, if one did."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return NOT_AVAILABLE

    @property
    def text(self) -> str:
        """The worker's last words, with its traceback if it has recorded one."""
        message = self.message
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            stack = extra.get("py_callstack") if isinstance(extra, dict) else None
            message = stack if isinstance(stack, str) else message.get("message", NOT_AVAILABLE)
            return _in_words(message).replace("\n", "\n  ")
        return _in_words(message)


def _in_words(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        return NOT_AVAILABLE


def _recorded_at(data: Any, otherwise: int) -> int:
    """Return when the failure was recorded, if the report can show that time."""
    message = data["message"]
    try:
        seconds = int(data.get("timestamp", 0) if isinstance(message, str) else message["extraInfo"]["timestamp"])
        datetime.fromtimestamp(seconds)  # noqa: DTZ006 - as the report has it
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return otherwise
    return seconds


def failures(launched: Launched, make: Callable[[int, int, int, str], F]) -> dict[int, F]:
    """Return all failures by global rank, the root cause first. ``make`` is :class:`Failure`, or makes PyTorch's."""
    return failures_of(
        launched.failure,
        launched.exits,
        launched.first_rank,
        launched.error_files,
        launched.reason,
        failed_at=launched.failed_at,
        make=make,
    )


def root_cause(found: Mapping[int, Failure]) -> int:
    """Return the global rank of the root cause."""
    return min(found, key=lambda rank: found[rank].timestamp)


def report(entrypoint: str, found: Mapping[int, Failure], *, colours: bool = False) -> str:
    """Return the final report. ``colours``: for a terminal that shows them."""
    host, root = host_name(wait=True), root_cause(found)
    title = f"{entrypoint} FAILED"
    texts = {rank: _one(number, rank, failure, host) for number, (rank, failure) in enumerate(found.items())}
    lines = [line for text in texts.values() for line in text.split("\n")]
    width = min(max(map(len, [title, *lines])), WIDEST)
    others = "\n".join(text for rank, text in texts.items() if rank != root) or "  <NO_OTHER_FAILURES>"
    edge, section = "=" * width, "-" * width
    first = "Root Cause (first observed failure):"
    # Begins with the name of torchrun's exception, for people who search logs for it.
    error = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    title, first = (paint(line, RED, on=colours) for line in (title, first))
    return "\n".join([error, edge, title, section, "Failures:", others, section, first, texts[root], edge])


def _one(number: int, rank: int, failure: Failure, host: str) -> str:
    ended_by = f"({failure.signal_name})" if failure.signal_name != NOT_AVAILABLE else ""
    ended_by = f" {ended_by}" if ended_by else ""
    return (
        f"[{number}]:\n"
        f"  time      : {datetime.fromtimestamp(failure.timestamp).isoformat(sep='_')}\n"  # noqa: DTZ006 - as torch's
        f"  host      : {host}\n"
        f"  rank      : {rank} (local_rank: {failure.local_rank})\n"
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {ended_by}\n"
        f"  error_file: {failure.error_file}\n"
        f"  traceback : {failure.text}"
    )


def hand_up(failure: Failure) -> None:
    """Copy a failure's error file to this process's own, if the caller has named one (``TORCHELASTIC_ERROR_FILE``)."""
    if failure.error_file == NOT_AVAILABLE:
        return
    data = failure.error_file_data
    # A worker that a signal ended could not write how it ended.
    if failure.exitcode and isinstance(data.get("message"), dict):
        data["message"]["errorCode"] = failure.exitcode
    write_error_file(data)
