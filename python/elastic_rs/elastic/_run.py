"""``run``: calls the user's function in each world, and forms the next one when it has to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from elastic_rs._durations import Duration, as_timedelta
from elastic_rs.elastic import _decisions, _ranks
from elastic_rs.elastic._decisions import Outcome
from elastic_rs.elastic._exceptions import StateMismatchError, name_for_scripts
from elastic_rs.elastic._membership import MEMBERSHIP
from elastic_rs.elastic._state import State

_log = logging.getLogger("elastic_rs.elastic")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


@overload
def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]: ...


@overload
def run(
    *, backend: str | None = None, timeout: Duration | None = None
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]: ...


def run(func: Any = None, *, backend: str | None = None, timeout: Duration | None = None) -> Any:
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
    - Either of these two that the script raises itself: the same, and all other workers follow with their last commit.
      It costs no restart. Without a launcher too: the only worker calls the function again. A script that has gone back
      to the same commit ten times and asks for it again fails.
    - Any other exception is raised: this worker has failed. Under PyTorch's agent, which cannot form another world for
      workers that live, this is so for all exceptions.

    No collective may be called before it, because a worker that joins later would be alone with it. Making the process
    group is the exception.

    On GPUs workers are kept only with ``in_place=nccl``. Otherwise they are restarted, which rank 0 says on its stderr.

    The interface is that of ``horovod.torch.elastic.run``.

    Args:
        func: the function to decorate. Its first argument is a ``State``.
        backend: of the process group, if the script has not made one: one of ``torch.distributed``, such as ``gloo``
            or ``cpu:gloo,cuda:nccl``. Default: NCCL for GPUs if there are any, and gloo for the rest.
        timeout: of the process group's collectives, if the script has not made one: a ``timedelta``, or seconds.
            Default: torch's, which is 30 minutes for gloo and 10 for NCCL.

    Returns:
        The decorated function, or a decorator if ``func`` is not given.

    Raises:
        TypeError: ``func`` is not a function that takes the state, or an option has the wrong type. The decorated
            function raises it too, if its first argument is no ``State``.

    >>> from elastic_rs import elastic
    >>> @elastic.run
    ... def train(state, epochs):
    ...     while state.epoch < epochs:
    ...         state.epoch += 1
    ...         state.commit()
    ...     return state.epoch
    >>> train(elastic.ObjectState(epoch=0), 3)
    3
    """
    limit = checked_timeout(backend, timeout)
    if func is None:
        return functools.partial(run, backend=backend, timeout=timeout)
    name = getattr(func, "__qualname__", type(func).__qualname__)
    if not callable(func):
        raise TypeError(f"elastic.run decorates a function whose first argument is the state, and was given a {name}")
    if not _takes_an_argument(func):
        raise TypeError(f"elastic.run decorates a function whose first argument is the state, and `{name}` takes none")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        _check_state(state, name)
        MEMBERSHIP.begin(backend, limit)
        with _listening(state):
            return _in_each_world(state, functools.partial(func, state, *args, **kwargs), name)

    return wrapper


def checked_timeout(backend: Any, timeout: Any) -> timedelta | None:
    """Return the timeout of the collectives. Raises if an option cannot be what it is, before anything is made."""
    if not isinstance(backend, str | None):
        raise TypeError(
            f"backend is a {type(backend).__qualname__}, must be the name of a backend of torch.distributed, such as "
            "'gloo', or None"
        )
    return None if timeout is None else as_timedelta("timeout", timeout)


def _takes_an_argument(func: Callable[..., Any]) -> bool:
    """Whether a function takes a positional argument, as far as Python knows."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # of C, say
        return True
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    return any(parameter.kind in kinds for parameter in parameters)


@contextlib.contextmanager
def _listening(state: State) -> Iterator[None]:
    """Call the state's ``on_hosts_updated`` inside this block, if its class has one."""
    if type(state).on_hosts_updated is State.on_hosts_updated:
        yield
        return
    MEMBERSHIP.listeners.add(state)
    try:
        yield
    finally:
        MEMBERSHIP.listeners.remove(state)


def _check_state(state: Any, name: str) -> None:
    """Raise if this is not a state, as the first argument of the function by that name."""
    kind = type(state).__qualname__
    if not isinstance(state, State):
        hint = "such as elastic.TorchState(…) or ObjectState(…)"
        if name.endswith(f"{kind}.{name.rpartition('.')[2]}"):
            hint = "so decorate a function, not a method: elastic.run(self.train)(state) calls a method in each world"
        raise TypeError(f"the first argument of `{name}` is a {kind}, must be an elastic.State, {hint}")
    if not hasattr(state, "_reset_callbacks"):
        raise TypeError(f"the __init__ of `{kind}` has not called super().__init__(), which every elastic.State needs")


def _in_each_world(state: State, func: Callable[[], Any], name: str) -> Any:
    from elastic_rs import _torch_private
    from elastic_rs.elastic._group import Wraps

    wraps = Wraps()
    first = True
    with wraps.noted(), _torch_private.gloo_connects_inside(MEMBERSHIP.guarding):
        while True:
            # Forming a world may meet the next failure, as the function may.
            meeting = False  # whether this worker waits for the others
            try:
                if not MEMBERSHIP.has_group:
                    meeting = True
                    MEMBERSHIP.enter()
                    meeting = False
                MEMBERSHIP.forms()
                if not first:
                    state.on_reset()
                if _decisions.must_sync(MEMBERSHIP.says_sync or first, state._elastic_commit):  # noqa: SLF001
                    meeting = True
                    state._elastic_synced(name)  # noqa: SLF001
                    meeting = False
                MEMBERSHIP.formed()
                return func()
            except Exception as error:
                MEMBERSHIP.formed()
                outcome, asked = _what_follows(error, state)
                if outcome is Outcome.FAIL and _decisions.is_stuck(error, meeting=meeting, first=first):
                    MEMBERSHIP.stuck()
                    outcome, asked = _what_follows(error, state)
                if outcome is Outcome.FAIL:
                    if isinstance(error, StateMismatchError):
                        MEMBERSHIP.unfit(error)
                    if why := MEMBERSHIP.unequal_checks():
                        if _decisions.may_be_collectives(error):
                            raise RuntimeError(why) from error
                        error.add_note(f"elastic_rs: {why}")
                    raise
                _log.info("%s, because of %s: %s", outcome.value, type(error).__name__, error)
                _drop_frames(error)
            # The exception is gone, and with it what the function's variables held.
            wraps.release()
            restores = outcome is Outcome.RESTORE
            # If the script has asked for a new world, the others leave this one as after a failure.
            ahead = _decisions.ahead_by_script(_ranks.rank(), _ranks.size()) if asked else None
            MEMBERSHIP.leave(failed=restores or asked)
            if restores:
                _finish_device_work(state)
            MEMBERSHIP.park(state._elastic_restored() if restores else state._elastic_kept(ahead))  # noqa: SLF001
            first = False


def _what_follows(error: Exception, state: State) -> tuple[Outcome, bool]:
    """Return what follows from an exception, and whether the script has asked for a new world by it.

    If it has, the others are sent the news.

    Raises:
        RuntimeError: the script has asked too often to go back to the same commit.
    """
    outcome, raised = _decisions.judge(error, changing=MEMBERSHIP.changing, failed_within=MEMBERSHIP.failed_within)
    if raised is None:
        return outcome, False
    name = name_for_scripts(raised)
    if not MEMBERSHIP.can_leave:
        error.add_note(f"elastic_rs: {_decisions.cannot_leave(name, MEMBERSHIP.unattended)}")
        return Outcome.FAIL, False
    if MEMBERSHIP.may_abort:  # the others abort collectives that a device may still work on
        outcome = Outcome.RESTORE
    if outcome is Outcome.RESTORE and (why := _decisions.rolls_back_in_vain(name, state._elastic_roll_backs)):  # noqa: SLF001
        raise RuntimeError(why) from error
    _log.warning("the script has raised %s itself: all workers leave this world, at no restart: %s", name, raised)
    MEMBERSHIP.raised(raised)
    return outcome, True


def _finish_device_work(state: State) -> None:
    """Wait for the devices, which may still write what a restore is about to overwrite.

    Their collectives have ended: those of gloo with an error, and those of NCCL because they were aborted.
    """
    try:
        state._elastic_finish_device_work()  # noqa: SLF001
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
