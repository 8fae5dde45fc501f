"""What survives a change of the world: ``State`` and ``ObjectState``. Needs no torch until it is broadcast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from elastic_rs.elastic import _decisions
from elastic_rs.elastic._contents import refuse_parted
from elastic_rs.elastic._exceptions import HostUpdateResult, StateMismatchError
from elastic_rs.elastic._membership import MEMBERSHIP


class State:
    """The state of a training job that all workers share. ``run`` keeps it equal on all of them.

    Derived classes say how it is saved, restored and broadcast. Everything in it must be the same on all ranks at a
    commit. The interface is that of ``horovod.common.elastic.State``.

    Args:
        bcast_object: broadcasts an object from rank 0, or from the rank that is given as ``root_rank``. Default:
            ``elastic.broadcast_object``.
        get_rank: not used. It is there because Horovod's classes have it.
    """

    if TYPE_CHECKING:
        # The values of a state are attributes with the names that its script gives.
        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        del get_rank
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], None]] = []
        # Derived classes may use any other name than those with `_elastic`.
        # Number of the last commit or sync. None: there was neither, so nobody needs this state.
        self._elastic_commit: int | None = None
        # Above 0 if a change of the world has found changes made after that, which are kept.
        self._elastic_ahead = 0
        # How often this worker has gone back to its last commit.
        self._elastic_roll_backs = 0
        # Whether the check under way directly follows a save.
        self._elastic_just_saved = False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to be called when a new world has been formed, before the state is broadcast.

        They are called in this order, after :meth:`reset`. They may use ``elastic.rank()`` and ``elastic.size()``, to
        scale a learning rate for example. All of them together may take 300 s.

        Args:
            callbacks: functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by ``run`` when a new world has been formed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapt to a new world. Does nothing; derived classes may override it."""

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Called in a thread as soon as a change of the membership is announced. Does nothing; classes may override it.

        Args:
            timestamp: the number of the change: later ones have larger numbers. In Horovod it is a time.
            update_res: what happens to the number of workers.
        """

    def commit(self) -> None:
        """Save the state in memory, then check for changes of the world.

        A failure of another worker costs the steps since the last commit. All ranks must call it in the same steps.

        Raises:
            PeerFailed: another worker has failed. If that was known before, nothing was saved.
            HostsUpdatedInterrupt: workers join or leave.
        """
        # When a device's collective is aborted, waiting for it ends without an error, over garbage. The failure was
        # known then, so it is looked at after the device has finished and before anything is saved.
        self._elastic_finish_device_work()
        MEMBERSHIP.raise_if_failed()
        self.save()
        self._elastic_count()
        self._elastic_roll_backs = 0
        self._elastic_just_saved = True
        self.check_host_updates()
        self._elastic_just_saved = False

    def check_host_updates(self) -> None:
        """Check for changes of the world, which costs less than a microsecond. Nothing is saved.

        All ranks must call it in the same steps, and equally often.

        Raises:
            PeerFailed: another worker has failed.
            HostsUpdatedInterrupt: workers join or leave. All ranks raise it at the same check.
        """
        MEMBERSHIP.check()

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of the rank ``elastic.source_rank()``, and save it.

        Derived classes may use ``elastic.broadcast_object`` and its like, whose root 0 means that rank meanwhile. The
        save comes last: if the broadcast is interrupted, ``restore`` must go back to the save before it.
        """
        raise NotImplementedError

    def _elastic_finish_device_work(self) -> None:
        """Wait until the work that devices have been given is done."""

    def _elastic_names(self) -> list[str]:
        """Return the names of the state's values, which are the same on all ranks."""
        return []

    def _elastic_count(self) -> None:
        self._elastic_commit = 0 if self._elastic_commit is None else self._elastic_commit + 1
        self._elastic_ahead = 0

    # What `run` calls.

    def _elastic_kept(self, ahead: int | None = None) -> int | None:
        """Note that the world changes and the state stays as it is. Return the number that says how new it is.

        It is newer than the last commit by ``ahead``; by default by one, unless it has just been committed.
        """
        self._elastic_ahead = max(self._elastic_ahead, int(not self._elastic_just_saved) if ahead is None else ahead)
        self._elastic_just_saved = False
        return _decisions.parked_number(self._elastic_commit, ahead=self._elastic_ahead)

    def _elastic_restored(self) -> int | None:
        """Go back to the last commit, and return its number."""
        self._elastic_just_saved, self._elastic_ahead = False, 0
        self._elastic_roll_backs += 1
        self.restore()
        return self._elastic_commit

    def _elastic_synced(self, function: str = "") -> None:
        """Give all ranks the same state and the same number. The function by that name is then called with it."""
        with MEMBERSHIP.syncing():
            ours = (function, self._elastic_names())
            number, theirs = self._elastic_broadcast(
                (_decisions.parked_number(self._elastic_commit, ahead=self._elastic_ahead), ours)
            )
            if why := _decisions.mismatch(ours, theirs, MEMBERSHIP.source):
                raise StateMismatchError(why)
            self.sync()
        # After an interrupted sync this worker goes back to its own last save, and keeps that number and its
        # generation: one that has not had the state of the job must not become the source.
        self._elastic_commit = number
        self._elastic_count()
        MEMBERSHIP.synchronised()

    def _elastic_broadcast(self, value: Any) -> Any:
        if self._bcast_object is None:
            from elastic_rs.elastic._collectives import broadcast_object

            return broadcast_object(value, MEMBERSHIP.source)
        if MEMBERSHIP.source == 0:
            return self._bcast_object(value)
        return self._bcast_object(value, root_rank=MEMBERSHIP.source)


class ObjectState(State):
    """A state of plain Python objects: each keyword argument becomes an attribute.

    Saved values are deep copies. Objects are pickled when they are broadcast. The interface is that of
    ``horovod.common.elastic.ObjectState``.

    Args:
        bcast_object: broadcasts an object from rank 0, or from the rank that is given as ``root_rank``. Default:
            ``elastic.broadcast_object``.
        get_rank: not used. It is there because Horovod's class has it.
        kwargs: the values, by the names of their attributes.

    Raises:
        ValueError: a name begins with ``_`` or is that of a method, or a value belongs into a ``TorchState``.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        check_names(kwargs)
        self._attributes = list(kwargs)
        for name, value in kwargs.items():
            refuse_parted(name, value, State)
            setattr(self, name, value)
        self._saved = self._copies()

    def save(self) -> None:
        """Keep deep copies of the attributes."""
        self._saved = self._copies()

    def restore(self) -> None:
        """Go back to the copies that were kept last."""
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give all ranks the source's present attributes, and save them."""
        received = self._elastic_broadcast({name: getattr(self, name) for name in self._attributes})
        MEMBERSHIP.raise_if_failed()  # an aborted broadcast may end without an error
        for name, value in received.items():
            setattr(self, name, value)
        self.save()

    def _elastic_names(self) -> list[str]:
        return sorted(self._attributes)

    def _copies(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self._attributes}


def check_names(names: Iterable[str]) -> None:
    """Raise if a value would hide a method of the state."""
    if taken := [name for name in names if name.startswith("_") or hasattr(State, name)]:
        raise ValueError(f"a state cannot have the attribute `{taken[0]}`: choose another name, without `_` in front")
