"""This process's membership in the job: the channel to its agent, and the world it is in. Needs no torch until used."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from elastic_rs._elastic_rs import WorkerChannel, World
from elastic_rs._logging import show_logs_if_asked
from elastic_rs._step import step
from elastic_rs.elastic import _decisions, _ranks
from elastic_rs.elastic._exceptions import HostsUpdatedInterrupt, HostUpdateResult, PeerFailed, name_for_scripts
from elastic_rs.elastic._listeners import Listeners
from elastic_rs.elastic._standby import READS

if TYPE_CHECKING:
    from elastic_rs.elastic._group import Group

_log = logging.getLogger("elastic_rs.elastic")

# How long the user's code may take in a new world before all members have the same state: all reset callbacks together,
# and a `sync` of the user's own.
STEP_LIMIT_S = 300.0
# How long a part of the state may take, of 256 MB at most, while it is broadcast.
PART_LIMIT_S = 30.0
# How long a worker tries to connect to its agent, which listens before it starts workers. Its machine may be busy.
CONNECT_LIMIT_S = 30.0


def _refuse_an_import_by_multiprocessing() -> None:
    """Raise if this is no worker, but a process that `multiprocessing` has started and that imports the script.

    Such a process has the worker's environment, so it would take the worker's place at the agent.
    """
    processes = sys.modules.get("multiprocessing.process")
    # The mark by which `multiprocessing.spawn` refuses a new process meanwhile.
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a process of multiprocessing imports the script, and must not train: put the lines that train under "
            '`if __name__ == "__main__":`, since the start methods `spawn` and `forkserver`, which is the default from '
            "Python 3.14 on, import the script in each process (of a DataLoader, for example)"
        )


class Membership:
    """What is one per process. Without a channel (no launcher, PyTorch's agent) there are no news, and one world."""

    def __init__(self) -> None:
        self.channel: WorkerChannel | None = None
        self.listeners = Listeners()
        self.changing = False
        """Whether a check has said that the world changes."""
        self.saves = False
        """Whether the script has called ``should_checkpoint``, whose connection to the agent is another one."""
        self._group: Group | None = None
        self._world: World | None = None
        self._syncing = False
        self._forming = False
        self.unattended = ""
        """Why this worker has no connection to its agent, if that is known."""

    @property
    def has_begun(self) -> bool:
        """Whether the script has come to `init` or `run`."""
        return self._group is not None

    @property
    def source(self) -> int:
        """The rank whose state is the newest."""
        return self._world.source if self._world is not None else 0

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Let root 0 mean the source inside this block, in which the state is broadcast."""
        before, self._syncing = self._syncing, True
        try:
            yield
        finally:
            self._syncing = before

    def root(self, root_rank: int) -> int:
        """Return the rank that broadcasts if the user's code names ``root_rank``.

        Code written for Horovod broadcasts a state from rank 0, which is always the oldest worker there. Here rank 0
        may be new.
        """
        return self.source if self._syncing and root_rank == 0 else root_rank

    @property
    def says_sync(self) -> bool:
        """Whether the coordinator wants the state to be broadcast in this world."""
        return self._world is not None and self._world.sync

    @property
    def can_leave(self) -> bool:
        """Whether this worker can leave its world and enter another one: it has an agent, or is alone."""
        return self.channel is not None or not _decisions.is_launched(os.environ)

    def begin(self, backend: str | None = None, timeout: timedelta | None = None) -> None:
        """Connect to the agent, and say how process groups are made. Only the first call does that.

        The connection comes before the first group: if a peer fails while it is made, the agent can say so.
        """
        first = self._group is None
        if first:
            self._begin(backend, timeout)
        assert self._group is not None
        if self.channel is not None and self.has_group:
            if first or self._group.has_subgroups:  # the script has made them
                self._warn_unless(self.channel.guard_loops(self._group.store_port))
            if first:
                self._group.watch(self.channel)

    def _begin(self, backend: str | None, timeout: timedelta | None) -> None:
        READS.end()
        _refuse_an_import_by_multiprocessing()
        if self.saves:
            raise RuntimeError(
                "this process has called should_checkpoint(), by which its script is started anew when the world "
                "changes, and elastic.init and elastic.run keep it: use one of the two"
            )
        from elastic_rs.elastic._group import Group

        if os.environ.get("ELASTIC_RS_LOG"):
            show_logs_if_asked()
        group = Group(backend, timeout)
        attendance = _decisions.attendance(os.environ, group.backends)
        if attendance.restarts_for_nccl:
            _say_that_workers_restart()
        elif attendance.reason:
            _log.warning("this worker will be restarted when the world changes: %s", attendance.reason)
        self.unattended = attendance.reason
        step._restarts_for_nccl(attendance.restarts_for_nccl)  # noqa: SLF001 - `elastic-rs status` shows it
        if attendance.path is not None:
            self._connect(attendance.path, no_process_group=not group.exists)
        self._group = group

    @property
    def has_group(self) -> bool:
        """Whether the process group of this world has been made, by the script or by :meth:`enter`."""
        # The script may have destroyed it.
        return self._group is not None and self._group.exists and _ranks.is_initialized()

    @property
    def may_abort(self) -> bool:
        """Whether the process group's collectives are aborted when a peer fails. Devices may end with an error then."""
        return self._group is not None and "nccl" in self._group.backends

    def raise_if_failed(self) -> None:
        if self.failed_within(0.0):
            assert self.channel is not None
            raise self._peer_failed(self.channel)

    def unequal_checks(self) -> str:
        """Say that the ranks have not made equally many checks, if that is known to be why a collective has failed."""
        if self.channel is None:
            return ""
        return _decisions.unequal_checks(*self.channel.raises_at())

    def unfit(self, error: Exception) -> None:
        """Report that this worker cannot take the state that the others have."""
        if self.channel is not None:
            self.channel.unfit(str(error))

    def check(self) -> None:
        """Raise ``PeerFailed`` or ``HostsUpdatedInterrupt`` if this worker has to stop at this check."""
        channel = self.channel
        if channel is None:
            return
        try:
            news = channel.check()
        except OSError as error:
            self._disconnected(error)
            return
        if not news:
            return
        if news != _decisions.CHANGED:
            raise self._peer_failed(channel)
        self.changing = True
        raise HostsUpdatedInterrupt(channel.reason, HostUpdateResult(channel.flags), round=self.round)

    @property
    def round(self) -> int | None:
        """The number of the round that has made this worker's world. None without an agent."""
        return None if self._world is None else self._world.generation

    def _peer_failed(self, channel: WorkerChannel) -> PeerFailed:
        return PeerFailed(channel.reason, round=self.round, rank=channel.failed_rank)

    def failed_within(self, limit_s: float) -> bool:
        """Wait at most so long, and say whether a failure of another worker is known."""
        if self.channel is None:
            return False
        try:
            return self.channel.failed_within(limit_s)
        except OSError as error:
            self._disconnected(error)
            return False

    def forms(self) -> None:
        """Begin to limit the time until all members have the same state.

        If a step takes longer than its limit, all members leave this world. A worker that hangs does not, and is
        replaced.
        """
        self._forming = True
        self._limit_step(STEP_LIMIT_S)

    def part_done(self) -> None:
        """A part of the state was broadcast. The next one follows at once."""
        self._limit_step(PART_LIMIT_S)

    def parts_done(self) -> None:
        self._limit_step(STEP_LIMIT_S)

    def synchronised(self) -> None:
        """Note that this worker has the state of its world, and wait until all members have theirs.

        Nobody makes a step before that. So a worker that has not got so far knows that no step of this world is lost,
        even if all those have ended that had.
        """
        step._synchronised()  # noqa: SLF001 - for the phases of a recovery
        if self.channel is not None:
            self.channel.synchronised()
        if self.has_group:
            from elastic_rs.elastic._wire import barrier

            barrier()

    def formed(self) -> None:
        """End the limit: this world is formed, or this worker has to leave it."""
        self._forming = False
        if self.channel is not None:
            self.channel.formed()

    def _limit_step(self, limit_s: float) -> None:
        if self._forming and self.channel is not None:
            self.channel.forms_within(limit_s)

    def stuck(self) -> None:
        """This world cannot be formed: all members have to leave it."""
        if self.channel is not None:
            self.channel.stuck()

    def raised(self, error: BaseException) -> None:
        """Report that the script has raised an exception of this package itself: all members leave this world."""
        if self.channel is not None:
            self.channel.raised(name_for_scripts(error), str(error))

    def leave(self, *, failed: bool) -> None:
        """Leave the world: end its process group. If it has failed, a peer may still be in one of its collectives."""
        assert self._group is not None
        if failed and self.channel is not None:
            self.channel.until_quiet()
        self._group.end(failed=failed)
        if self.channel is not None:
            self.channel.release_sockets()

    def park(self, commit: int | None) -> None:
        """Wait for the next world, and take this worker's place in it.

        Without a launcher the next one is as the last.
        """
        if self.channel is None:
            return
        world = self.channel.park(commit)
        self.changing = False
        self._enter(world)

    def enter(self) -> None:
        """Make the process group of this world."""
        assert self._group is not None
        started = time.monotonic()
        channel, guarded = self.channel, 0
        mark = channel.mark_sockets() if channel is not None else 0
        try:
            self._group.make(self.raise_if_failed)
        finally:
            if channel is not None:
                guarded = channel.guard_sockets(mark, self._group.store_port)
        if self.channel is not None:
            self._warn_unless(guarded)
            self._group.watch(self.channel)
        step._grouped()  # noqa: SLF001 - for the phases of a recovery
        elapsed_s = time.monotonic() - started
        _log.info("rank %d of %d: process group made in %.3f s", _ranks.rank(), _ranks.size(), elapsed_s)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard the connections of the process group that is made inside this block."""
        channel, mark = self.channel, None
        if channel is not None:
            with suppress(RuntimeError):  # a process that was forked from the worker has no channel
                mark = channel.mark_sockets()
        try:
            yield
        finally:
            if channel is not None and mark is not None:
                channel.guard_sockets(mark)

    def _warn_unless(self, guarded: int) -> None:
        """Warn if nothing can free this worker's collectives when a peer fails."""
        assert self._group is not None
        if not guarded and _ranks.size() > 1 and "gloo" in self._group.backends:
            _log.warning(
                "no TCP connection of gloo was found for the process group of %d workers: when another worker fails, a "
                "collective that waits for it is not freed, and this worker is replaced after 30 s. If that is too "
                "long, let gloo use plain TCP",
                _ranks.size(),
            )

    def _connect(self, path: str, *, no_process_group: bool) -> None:
        ahead = os.environ.pop(_decisions.AHEAD, None)
        try:
            self.channel = WorkerChannel.connect(path, CONNECT_LIMIT_S)
            if no_process_group:
                self.channel.no_process_group()
            world = self.channel.world()
        except OSError as error:
            if ahead is not None:
                raise RuntimeError(
                    f"this worker was started ahead and has no rank yet; only its agent can give it one: {error}"
                ) from None
            self._disconnected(error)
            return
        if wrong := READS.other_than(world.variables):
            _log.warning(_decisions.READ_AS_STANDBY, ", ".join(wrong))
        self._enter(world)
        self.listeners.connected(self.channel)

    def _disconnected(self, error: OSError) -> None:
        """Go on without the agent: whoever has closed the connection also knows that this worker cannot be reached."""
        self.channel = None
        self.unattended = f"no connection to its agent: {error}"
        _log.warning("this worker will be restarted when the world changes: %s", self.unattended)

    def _enter(self, world: World) -> None:
        self._world = world
        os.environ.update(world.variables)
        _log.info(
            "world of generation %d: rank %s of %s, %s (%s)",
            world.generation,
            os.environ.get("RANK"),
            os.environ.get("WORLD_SIZE"),
            f"state of rank {world.source}" if world.sync else "all states are equal",
            world.reason,
        )


def _say_that_workers_restart() -> None:
    """Say on rank 0's terminal that workers with NCCL are restarted. Once for a job: a restart does not repeat it."""
    if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        # Whatever the script does with logs, it must not be missed.
        print(f"elastic_rs: {_decisions.RESTARTED_FOR_NCCL}", file=sys.stderr, flush=True)
    else:
        _log.info("%s", _decisions.RESTARTED_FOR_NCCL)


MEMBERSHIP = Membership()
