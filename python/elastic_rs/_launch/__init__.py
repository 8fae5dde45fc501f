"""``launch``: what ``elastic-run`` does, from a program. ``docs/launch.md`` is for users.

Does not import torch, which functions as workers and exceptions of PyTorch's need.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from elastic_rs._launch._config import LaunchConfig, flags_of, given_in, in_names_of_fields
from elastic_rs._logging import show_logs_if_asked
from elastic_rs.run import _cpus, _node, _options
from elastic_rs.run._flags import parse, parser
from elastic_rs.run._usage import UsageError

if TYPE_CHECKING:
    import argparse

    from elastic_rs.run._node import CannotError, End

__all__ = ["LaunchConfig", "launch"]

logger = logging.getLogger("elastic_rs.run")

R = TypeVar("R")

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Set in all workers, by this package and by PyTorch."""
FOR_PROGRAMS = (
    *("module", "no_python", "run_path", "in_place", "warm_start", "warm_modules", "ranks_filter", "omp_threads"),
    *("on_hang", "progress_log", "health_check", "standby"),
    *("forward_signals", "preempt_notice", "preempt_deadline", "preempt_signal"),
)
"""Fields that have no meaning for functions."""
FOR_FUNCTIONS = ("start_method",)


@overload
def launch(
    entrypoint: str | os.PathLike[str], config: LaunchConfig | None = None, args: Sequence[object] = ()
) -> dict[int, None]: ...
@overload
def launch(
    entrypoint: Callable[..., R], config: LaunchConfig | None = None, args: Sequence[object] = ()
) -> dict[int, R]: ...
def launch(
    entrypoint: str | os.PathLike[str] | Callable[..., R],
    config: LaunchConfig | None = None,
    args: Sequence[object] = (),
) -> dict[int, R] | dict[int, None]:
    """Run the workers of this node until the job has ended, as ``elastic-run`` does, and return their results.

    It may be called again, and by several threads at once. In the main thread the signals of ``signals_to_handle`` end
    the workers meanwhile. The program's own handlers stand again afterwards. In any other thread signals stay the
    program's.

    Args:
        entrypoint: the path of a script, the name of a module (``module=True``) or program (``no_python=True``), or a
            function.
        config: how it is run. None: one worker, on this node alone.
        args: arguments of the script or program, or of the function. The function gets no keyword arguments.

    Returns:
        What the workers of this node returned, by their global ranks. None for a script, a program, and a function that
        has called ``sys.exit(0)``. It is empty if the job did not need this node.

    Raises:
        TypeError: an argument has another type. Nothing has been started, as for ``ValueError``.
        ValueError: an argument is not valid, or does not go with the entry point; the message names it, what was given,
            and what is allowed.
        ChildFailedError: PyTorch's. A worker failed, on whatever node, and no restart was left.
        SignalException: PyTorch's. A signal has ended this node's part. Its workers have ended.
        RuntimeError: it was called in a worker, or this node cannot go on.
        The exceptions of the rendezvous, in ``elastic_rs.errors``.

    Example:
        >>> import elastic_rs
        >>> elastic_rs.launch("true", elastic_rs.LaunchConfig(nproc_per_node=2, no_python=True, omp_threads=1))
        {0: None, 1: None}
    """
    if config is None:
        config = LaunchConfig()
    if not isinstance(config, LaunchConfig):
        raise TypeError(f"config is `{config!r}`, of type {type(config).__name__}, must be an elastic_rs.LaunchConfig")
    _refuse_here()
    _check_args(args)
    show_logs_if_asked()
    if callable(entrypoint):
        from elastic_rs._launch import _functions

        _refuse_fields(config, FOR_PROGRAMS, "a function")
        start_method = config.start_method or "spawn"
        _functions.check(entrypoint, args, start_method)
        parsed = _parsed([*flags_of(config), "--", entrypoint.__name__])
        try:
            return _functions.run(entrypoint, args, parsed, start_method)
        except UsageError as error:
            raise in_names_of_fields(error) from None
    _refuse_fields(config, FOR_FUNCTIONS, "a script, module or program")
    parsed = _parsed([*flags_of(config), "--", _script(entrypoint), *map(_word, args)])
    return _results(_run(parsed))


def _refuse_here() -> None:
    """Refuse to launch where that has no meaning.

    Raises:
        RuntimeError: this process is a worker, or a worker that imports the program that has started it.
    """
    if RUN_ID in os.environ:
        raise RuntimeError(
            f"launch was called in a worker (rank {os.environ.get('RANK', '?')} of run `{os.environ[RUN_ID]}`), which "
            "cannot launch workers: call it in a process that no launcher has started"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch was called while a new process imports this program's main module, which would launch again and "
            'again: call it behind `if __name__ == "__main__":`'
        )


def _check_args(args: object) -> None:
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(f"args is `{args!r}`, of type {type(args).__name__}, must be a list or tuple of arguments")


def _refuse_fields(config: LaunchConfig, refused: Sequence[str], what: str) -> None:
    given = given_in(config)
    if name := next((name for name in refused if name in given), None):
        others = "functions" if refused is FOR_FUNCTIONS else "scripts, modules and programs"
        raise ValueError(f"{name} is `{given[name]}`, and the entry point is {what}: {name} is for {others} alone")


def _script(entrypoint: object) -> str:
    given = os.fspath(entrypoint) if isinstance(entrypoint, os.PathLike) else entrypoint
    if not isinstance(given, str):
        raise TypeError(
            f"entrypoint is `{entrypoint!r}`, of type {type(entrypoint).__name__}, must be a path, a name or a function"
        )
    if not given:
        raise ValueError("entrypoint is empty, must be a path, a name or a function")
    return given


def _word(arg: object) -> str:
    """Return an argument of a program as one word."""
    if isinstance(arg, str | int | float):
        return str(arg)
    if isinstance(arg, os.PathLike) and isinstance(path := os.fspath(arg), str):
        return path
    raise TypeError(f"args has `{arg!r}`, of type {type(arg).__name__}, must have texts, numbers and paths")


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Parse a command line, whatever ``PET_*`` variables say."""
    try:
        parsed = parse(argv, parser(env={}))
        _cpus.check_omp_threads(parsed.omp_threads)
    except UsageError as error:
        raise in_names_of_fields(error) from None
    return parsed


def _run(parsed: argparse.Namespace) -> End:
    takes_signals = threading.current_thread() is threading.main_thread()
    if why := _options.why_torch(parsed):
        raise ValueError(f"{why} is set, which needs PyTorch's launcher: unset it, or use PyTorch's elastic_launch")
    try:
        return _node.run(parsed, lambda _: None, takes_signals=takes_signals)
    except UsageError as error:
        raise in_names_of_fields(error) from None
    except _node.CannotError as error:
        raise _error_of(error) from None


def _results(end: End) -> dict[int, None]:
    launched = end.launched
    match launched.outcome:
        case "succeeded":
            return {launched.first_rank + exited.local_rank: None for exited in _by_rank(launched.exits)}
        case "not_needed":
            logger.info("this node was a spare, and the job ended without needing it")
            return {}
        case "succeeded_before":
            logger.warning("%s; this node has nothing to do", launched.reason)
            return {}
        case "signal" | "taken_away" | "failed" | "unfit":
            from elastic_rs._launch import _raised

            raise _raised.exception_of(end)
        case _:
            raise _error_of(end.why_no_placement)


def _by_rank(exits: Sequence[Any]) -> list[Any]:
    return sorted(exits, key=lambda exited: int(exited.local_rank))


def _error_of(why: CannotError) -> Exception:
    """Return the exception that PyTorch's launcher would raise."""
    known: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "OSError": OSError}
    if why.kind not in known:
        from elastic_rs import errors

        known[why.kind] = getattr(errors, why.kind)
    return known[why.kind](why.text)
