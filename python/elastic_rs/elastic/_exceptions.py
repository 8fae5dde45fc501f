"""What ends the user's function so that the world can be formed again. Needs no torch."""

from __future__ import annotations

from enum import IntFlag

from elastic_rs.errors import ElasticError


class HostUpdateResult(IntFlag):
    """What a change does to the number of workers, or of hosts. The values are Horovod's."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class PeerFailed(ElasticError, RuntimeError):  # noqa: N818 # a failure of another worker, not an error of this one
    """Another worker of the job has failed, or its node is lost. ``run`` restores the last commit and goes on.

    The message says what failed. Raised by ``commit`` and ``check_host_updates``. A collective that the failure
    interrupts raises an exception of torch instead, which means the same to ``run``.

    A script may raise it itself, to go back to the last commit: on all ranks, or on one, and the others follow. That
    costs no restart.

    Attributes:
        rank: global rank of the worker that has failed, in the world that ends. None if no worker is to blame, as when
            a node is lost.
        round: number of the round whose world ends.
    """

    __module__ = "elastic_rs.errors"


class HostsUpdatedInterrupt(ElasticError, RuntimeError):  # noqa: N818 # Horovod's name
    """Workers join or leave. All ranks raise it at the same check. ``run`` keeps the state as it is and goes on.

    A script may raise it itself, to have a new world made: on all ranks, or on one. The state of a rank that has raised
    it is kept and broadcast. That costs no restart.

    Args:
        message: why. Horovod's first argument is ``skip_sync``, so a bool is taken for that.
        flags: what happens to the number of workers. Default: nothing.
        skip_sync: Horovod's way to say that all ranks have the same state. Default: whether workers are only removed.
        round: number of the round whose world ends.

    Attributes:
        flags: as given.
        skip_sync: as given. Nothing depends on it: here the new world says whether the state is broadcast.
        round: as given.
    """

    __module__ = "elastic_rs.errors"

    def __init__(
        self,
        message: str | bool = "",
        flags: HostUpdateResult = HostUpdateResult.no_update,
        *,
        skip_sync: bool | None = None,
        round: int | None = None,  # noqa: A002 - as of ElasticError
    ) -> None:
        if isinstance(message, bool):
            skip_sync = message
            message = ""
        super().__init__(message, round=round)
        self.flags = HostUpdateResult(flags)
        self.skip_sync = self.flags == HostUpdateResult.removed if skip_sync is None else skip_sync


class StateMismatchError(ElasticError, ValueError):
    """This worker cannot take the state that the others have: its script makes another state, or runs another function.

    If all workers of its node are new, the node leaves the job, which costs the others no restart.
    """

    __module__ = "elastic_rs.errors"


class TensorMismatchError(ElasticError, RuntimeError):
    """Shapes or types of the tensors of a collective differ between ranks. All ranks raise it: the script is wrong.

    Horovod and torch raise a ``RuntimeError`` too.
    """

    __module__ = "elastic_rs.errors"


HorovodInternalError = PeerFailed
"""Horovod's name of :class:`PeerFailed`."""


def name_for_scripts(error: BaseException) -> str:
    """Return the name under which a script raises this exception itself: no peer has failed then."""
    return "HorovodInternalError" if type(error) is PeerFailed else type(error).__name__
