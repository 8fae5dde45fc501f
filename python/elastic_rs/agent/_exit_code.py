"""The exit code of torchrun, which has no say in it: its process ends with 1 after every exception."""

from __future__ import annotations

import sys
from types import TracebackType

from elastic_rs._exit_codes import Run
from elastic_rs.agent._signals import is_torchrun


def set_exit_code(code: int, failure: object) -> None:
    """Let torchrun's process end with this code once it has reported this failure, as it always does.

    The process of a program that calls PyTorch's launcher goes on, and nothing is changed there.

    Args:
        code: the exit code.
        failure: the exception, or the failures of the ``ChildFailedError``, with which the process ends.
    """
    if code == Run.FAILED or not is_torchrun():
        return
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        if failure is error or failure is getattr(error, "failures", None):
            raise SystemExit(code)  # which an exception hook may do

    sys.excepthook = report
