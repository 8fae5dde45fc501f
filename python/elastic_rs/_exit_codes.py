"""The exit codes of all programs: each table once, for the code, for ``--help`` and for the reference.

A signal ends a program with 128 + its number.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["BugReport", "Doctor", "ExitCode", "Look", "Run", "Serve", "Stacks", "Token", "in_help", "of_end"]


class ExitCode(enum.IntEnum):
    """An exit code, and when a program ends with it."""

    meaning: str

    def __new__(cls, number: int, meaning: str) -> ExitCode:
        """Make a code of its number and its meaning."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code


class Run(ExitCode):
    """Of ``elastic-run``, and of ``torchrun`` with our agent."""

    SUCCEEDED = 0, "all workers succeeded, or this node was a spare that was not needed"
    FAILED = 1, "the job failed, or this node could not join it; the message names the first failure"
    NOT_VALID = 2, "the command line is not valid, or names a script that does not exist"
    MACHINE = 90, "--exit-code=class: a machine, or the connection with it, was lost: run it again"
    PREEMPTED = 91, "--exit-code=class: SIGTERM ended this node: run it again"
    PROGRAM = 92, "--exit-code=class: the program failed, and would again: do not run it again"
    NO_PROGRESS = (
        93,
        "--exit-code=class, and always with restart_window: restarts have brought no progress: do not run it again",
    )


_OF_CLASSES = {
    "machine": Run.MACHINE,
    "preempted": Run.PREEMPTED,
    "program": Run.PROGRAM,
    "no progress": Run.NO_PROGRESS,
}
_LARGEST = 255


def of_end(
    conf: Mapping[str, object], end_class: str | None, *, returncode: int | None = None, otherwise: int = Run.FAILED
) -> int:
    """Return the exit code of a node whose part in a job has ended in another way than well.

    Args:
        conf: the values of ``--rdzv-conf``: ``exit_code`` says which code is wanted.
        end_class: whose fault it was, if that is known.
        returncode: how the first failed worker ended, as ``subprocess.Popen.returncode``. None: no worker has failed.
        otherwise: the code if none was asked for, or the one that was is not known.
    """
    asked = conf["exit_code"]
    if asked == "worker" and returncode is not None:
        code = 128 - returncode if returncode < 0 else returncode
        return code if 0 < code <= _LARGEST else otherwise
    is_vain = end_class == "no progress" and asked is None and conf["restart_window"] is not None
    if end_class is not None and (asked == "class" or is_vain):
        return _OF_CLASSES[end_class]
    return otherwise


class Doctor(ExitCode):
    """Of ``elastic-run doctor`` and ``elastic-rs doctor``."""

    HEALTHY = 0, "nothing has to be mended"
    TO_MEND = 1, "something has to be mended"
    NOT_VALID = 2, "the command line is not valid"


class Look(ExitCode):
    """Of ``elastic-rs status``. ``why``, ``events``, ``top`` and ``page`` have all but 1."""

    HEALTHY = 0, "the job runs, or has succeeded"
    NOT_HEALTHY = 1, "the job waits for nodes, forms its next round, or has failed"
    NOT_VALID = 2, "the command line is not valid, or a file cannot be used"
    UNREACHABLE = 3, "nothing answers at the endpoint, or it refuses the connection"


class Stacks(ExitCode):
    """Of ``elastic-rs stacks``."""

    WHOLE = 0, "every node has answered"
    NOT_WHOLE = 1, "a node has not answered, or cannot read its workers' frames; the last lines name it"
    NOT_VALID = 2, "the command line is not valid"
    UNREACHABLE = 3, "nothing answers at the endpoint, it refuses the connection, or there is no such rank"


class Serve(ExitCode):
    """Of ``elastic-rs store serve``."""

    ENDED_AS_ASKED = 0, "ended as asked"
    CANNOT_LISTEN = 1, "cannot listen on the address; the message names the process that has the port, where known"
    NOT_VALID = 2, "the command line is not valid, or the token file cannot be used"
    ENDED_BY_ITSELF = 3, "the server ended by itself, which is a bug"


class Token(ExitCode):
    """Of ``elastic-rs token``."""

    WRITTEN = 0, "the token is written or printed"
    CANNOT_WRITE = 1, "the file cannot be written, or exists: tokens are never overwritten"
    NOT_VALID = 2, "the command line is not valid, or the token file cannot be used"


class BugReport(ExitCode):
    """Of ``elastic-rs bug-report``."""

    WRITTEN = 0, "the file is written; a part that could not be had says why"
    CANNOT_WRITE = 1, "the file cannot be written"
    NOT_VALID = 2, "the command line is not valid"


def in_help(codes: type[ExitCode], **others: str) -> str:
    """Return the section of a ``--help``. ``others`` are codes that are no constants, such as those of signals."""
    rows = [(str(code.value), code.meaning) for code in codes] + list(others.items())
    return "exit codes:\n" + "".join(f"  {number:<8} {meaning}\n" for number, meaning in rows)
