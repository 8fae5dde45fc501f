"""``run``: calls the user's function in each world, and forms the next one when it has to."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from elastic_rs.elastic import _decisions
from elastic_rs.elastic._decisions import Outcome
from elastic_rs.elastic._membership import MEMBERSHIP

if TYPE_CHECKING:
    from elastic_rs.elastic._state import State

__all__ = ["run"]

_log = logging.getLogger("elastic_rs.elastic")

P = ParamSpec("P")
R = TypeVar("R")


@overload
def run(func: Callable[P, R]) -> Callable[P, R]: ...


@overload
def run(
    *, backend: str | None = None, timeout: timedelta | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def run(func: Any = None, *, backend: str | None = None, timeout: timedelta | None = None) -> Any:
    """Decorate the function that trains, so that it survives changes of the world.

    ::

        @elastic.run
        def train(state, ...):
            model = DistributedDataParallel(state.model)
            ...

        train(state, ...)

    The function's first argument is the ``State``. Before it is called there is a process group, and all ranks have the
    same state. It is called again, on the same rank or another one, when the world has changed. It must take up the
    work where the state says. What it has wrapped around a process group (``DistributedDataParallel``, subgroups) it
    must make anew in each call. It returns when the work is done.

    - ``PeerFailed``, or an error of torch's collectives after another worker has failed: the state goes back to the
      last commit.
    - ``HostsUpdatedInterrupt``: workers join or leave. The state stays as it is.
    - Any other exception is raised: this worker has failed. Without an agent that can tell (no launcher, PyTorch's
      agent) this is so for all exceptions.

    No collective may be called before it, because a worker that joins later would be alone with it. Making the process
    group is the exception.

    Args:
        func: the function to decorate.
        backend: of the process group, if the script has not made one. Default: NCCL for GPUs if there are any, and
            gloo for the rest.
        timeout: of the process group's collectives, if the script has not made one.
    """
    if func is None:
        return functools.partial(run, backend=backend, timeout=timeout)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        MEMBERSHIP.begin(backend, timeout)
        return _in_each_world(state, functools.partial(func, state, *args, **kwargs))

    return wrapper


def _in_each_world(state: State, func: Callable[[], Any]) -> Any:
    from elastic_rs.elastic._group import Wraps

    wraps = Wraps()
    first = True
    with wraps.noted():
        while True:
            # Forming a world may meet the next failure, as the function may.
            try:
                if not MEMBERSHIP.has_group:
                    MEMBERSHIP.enter()
                if not first:
                    state.on_reset()
                if _decisions.must_sync(MEMBERSHIP.says_sync or first, state._commit):  # noqa: SLF001
                    state._synced()  # noqa: SLF001
                return func()
            except Exception as error:
                outcome = _decisions.judge(error, changing=MEMBERSHIP.changing, failed_within=MEMBERSHIP.failed_within)
                if outcome is Outcome.FAIL:
                    raise
                _log.info("%s, because of %s: %s", outcome.value, type(error).__name__, error)
                _drop_frames(error)
            # The exception is gone, and with it what the function's variables held.
            wraps.release()
            failed = outcome is Outcome.RESTORE
            MEMBERSHIP.leave(failed=failed)
            if failed:
                _finish_device_work(state)
            MEMBERSHIP.park(state._restored() if failed else state._kept())  # noqa: SLF001
            first = False


def _finish_device_work(state: State) -> None:
    """Wait for the devices, which may still write what a restore is about to overwrite.

    Their collectives have ended: those of gloo with an error, and those of NCCL because they were aborted.
    """
    try:
        state._finish_device_work()  # noqa: SLF001
    except RuntimeError as error:
        if not MEMBERSHIP.may_abort:
            raise
        _log.info("the device has ended its work with an error, since collectives were aborted: %s", error)


def _drop_frames(error: BaseException | None) -> None:
    """Clear the variables of the frames that the exception has passed, which hold the wraps of the last world."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
