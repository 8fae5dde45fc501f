"""The end of a job of programs as PyTorch's exceptions."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from elastic_rs.agent._failures import NOT_AVAILABLE
from elastic_rs.agent._signals import Ended
from elastic_rs.run import _report
from elastic_rs.run._node import End


def exception_of(end: End) -> ChildFailedError | Ended:
    """Return PyTorch's exception for a job that has failed, or that a signal has ended here."""
    launched = end.launched
    if launched.outcome in {"signal", "taken_away"}:
        number = signal.Signals(launched.signal or 0)
        return Ended(f"Process {os.getpid()} got signal: {number}", number)
    return ChildFailedError(end.entrypoint, _report.failures(launched, _failure))


def _failure(local_rank: int, pid: int, exitcode: int, error_file: str) -> ProcessFailure:
    """Return PyTorch's failure, for an error file that need not be well formed: PyTorch's own reading of it raises."""
    read = _report.Failure(local_rank, pid, exitcode, error_file)
    failure: Any = ProcessFailure(local_rank, pid, exitcode, NOT_AVAILABLE)
    failure.timestamp, failure.message = read.timestamp, read.message
    if read.error_file != NOT_AVAILABLE:
        failure.error_file, failure.error_file_data = read.error_file, read.error_file_data
        if not _is_record(read.message):
            failure.message = read.text
    return failure  # type: ignore[no-any-return]


def _is_record(message: Any) -> bool:
    """Whether PyTorch can print this message: that of ``@record``."""
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return isinstance(extra, dict) and isinstance(extra.get("py_callstack"), str)
