"""What ends the user's function so that the world can be formed again. Needs no torch."""

from __future__ import annotations

from enum import IntFlag

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "PeerFailed"]


class HostUpdateResult(IntFlag):
    """What a change of the membership does to the number of workers. The values are Horovod's."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class PeerFailed(RuntimeError):  # noqa: N818 # a failure of another worker, not an error of this one
    """Another worker of the job has failed, or its node is lost. ``run`` restores the last commit and goes on.

    The message says what failed. Raised by ``commit`` and ``check_host_updates``. A collective that the failure
    interrupts raises an exception of torch instead, which means the same to ``run``.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 # Horovod's name
    """Workers join or leave. All ranks raise it at the same check. ``run`` keeps the state as it is and goes on.

    Attributes:
        flags: what happens to the number of workers.
        skip_sync: whether workers are only removed, as in Horovod. Here the new world says whether the state is
            broadcast, so nothing depends on it.
    """

    def __init__(self, message: str = "", flags: HostUpdateResult = HostUpdateResult.no_update) -> None:
        super().__init__(message)
        self.flags = HostUpdateResult(flags)

    @property
    def skip_sync(self) -> bool:
        return self.flags == HostUpdateResult.removed


HorovodInternalError = PeerFailed
"""Horovod's name of :class:`PeerFailed`."""
