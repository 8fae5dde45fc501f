"""The worker's end of the channel to its agent. The channel itself is in the core (``src/channel``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from elastic_rs._elastic_rs import WorkerChannel

# What `Channel.check` answers when the worker has to stop what it does. Anything else than 0 and this is a failure.
CHANGED = 1


class World(Protocol):
    """A world that this worker is a member of."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of a worker with this place: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, and so on."""

    @property
    def generation(self) -> int:
        """The number of the round."""

    @property
    def source(self) -> int:
        """The rank whose state is the newest."""

    @property
    def sync(self) -> bool:
        """Whether that state is broadcast."""

    @property
    def reason(self) -> str:
        """Why this world was formed."""


class Channel(Protocol):
    """What the core's ``WorkerChannel`` offers. Methods that wait release the GIL and let signal handlers run.

    All raise ``OSError`` once the connection has ended.
    """

    def groupless(self) -> None:
        """Say that this worker has no process group yet, and that the library makes it."""

    def forms_within(self, limit_s: float) -> None:
        """Say that a step towards the world follows. If it takes longer than so many seconds, all members leave."""

    def formed(self) -> None:
        """Say that the world is formed."""

    def stuck(self) -> None:
        """Say that the world cannot be formed. All members leave it."""

    def synchronised(self) -> None:
        """Note that this worker has the state of its world, which :meth:`park` tells the agent."""

    def raised(self, error: str, message: str) -> None:
        """Report that the script has raised an exception of this package itself. All members leave this world."""

    def unfit(self, message: str) -> None:
        """Report that the script cannot take the state that the others have. A node that has just come leaves then."""

    def raises_at(self) -> tuple[int | None, int]:
        """Return the check at which the world changes, if that is known, and how many this worker has made in it."""

    def check(self) -> int:
        """Count one check, and return 0 to go on, 1 if the world changes at this check, 2 if a peer has failed."""

    def failed_within(self, limit_s: float) -> bool:
        """Wait at most so long, and say whether a failure of another worker is known."""

    @property
    def reason(self) -> str:
        """Why the world changes, or what failed."""

    @property
    def flags(self) -> int:
        """The ``HostUpdateResult`` of the change."""

    def park(self, commit: int | None) -> World:
        """Say that this worker has left its world, and wait for the next one."""

    def world(self) -> World:
        """Return the present world. Waits for the first one."""

    def mark_sockets(self) -> None:
        """Remember which sockets there are, before a process group is made."""

    def guard_sockets(self) -> int:
        """Shut the sockets made since then down as soon as a peer fails, which ends blocked collectives."""

    def guard_loops(self) -> int:
        """Do the same for the sockets of process groups that exist already."""

    def release_sockets(self) -> None:
        """Forget them: the process group is gone."""

    def wait_change(self) -> tuple[int, int]:
        """Wait for the next announced change, and return its number and its ``HostUpdateResult``."""


def connect(address: str, limit_s: float) -> Channel:
    """Connect to the agent's socket.

    Raises:
        OSError: nobody listens there. An agent that refuses this process says so in the next call.
        RuntimeError: another process of the same worker trains.
    """
    return WorkerChannel.connect(address, limit_s)
