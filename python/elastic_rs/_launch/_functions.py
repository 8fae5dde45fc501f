"""Functions as workers of :func:`elastic_rs.launch`: by PyTorch's launcher, with our rendezvous and our agent in it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elastic_rs.rendezvous._config import RUST_C10D, endpoint_of, parse_conf
from elastic_rs.run import _options
from elastic_rs.run._node import SIGNALS, warn_of_node_rank
from elastic_rs.run._options import Rendezvous

if TYPE_CHECKING:
    from elastic_rs.rendezvous._launcher_handler import LauncherHandler

logger = logging.getLogger("elastic_rs.run")

StartMethod = Literal["spawn", "fork", "forkserver"]

FORK = 'give start_method="fork"'


def check(function: Callable[..., Any], args: Sequence[object], start_method: StartMethod) -> None:
    """Check what can be known of a function before a worker is started.

    Raises:
        TypeError: it is no function.
        ValueError: a new process could not have it, or its arguments.
    """
    if not hasattr(function, "__name__") or not hasattr(function, "__qualname__"):
        raise TypeError(f"entrypoint is `{function!r}`, must be a function; args passes arguments")
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"entrypoint is the coroutine function `{_name(function)}`, must be a function: let one call asyncio.run"
        )
    if start_method == "fork":
        return
    if function.__module__ == "__main__" and not _main_can_be_imported():
        raise ValueError(
            f"entrypoint is `{_name(function)}` of a `__main__` that is no file, as in a notebook, where a new process "
            f"cannot find it: put it in a module, or {FORK}"
        )
    for what, value in (("entrypoint", function), *((f"args[{i}]", arg) for i, arg in enumerate(args))):
        if why := _why_not_pickled(value):
            shown = _name(value) if value is function else repr(value)[:100]
            place = f"define it at the top of a module, or {FORK}" if value is function else FORK
            raise ValueError(f"{what} is `{shown}`, which cannot be sent to a new process ({why}): {place}")


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _main_can_be_imported() -> bool:
    """Whether a process of ``multiprocessing`` can import this program's main module (``get_preparation_data``)."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).is_file()


class _Pickler(pickle.Pickler):
    """Pickles to nowhere. Tensors are not copied: ``torch.multiprocessing`` shares their memory."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        return (int, ()) if torch is not None and isinstance(obj, torch.Tensor) else NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _why_not_pickled(value: object) -> str:
    try:
        _Pickler(_Nowhere()).dump(value)
    except RuntimeError:
        return ""  # a lock or a queue of `multiprocessing`, which goes to a process that is being started alone
    except Exception as error:  # noqa: BLE001 - whatever a class raises
        return f"{type(error).__name__}: {error}"
    return ""


def run(
    function: Callable[..., Any], args: Sequence[object], parsed: argparse.Namespace, start_method: StartMethod
) -> dict[int, Any]:
    """Run the function in this node's workers, and return what they returned, by global rank.

    Raises:
        UsageError: the command line is not valid.
        ValueError: this version of torch does not have what it asks for.
        ChildFailedError, SignalException: PyTorch's, as :func:`elastic_rs.launch`.
        The exceptions of the rendezvous.
    """
    meeting = _options.rendezvous_of(parsed)
    options = _options.launch_options_of(parsed, meeting.config)
    warn_of_node_rank(parsed)

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from elastic_rs._integration._plugin import check_torch
    from elastic_rs.agent import LocalElasticAgent

    check_torch()
    further = _further(parsed, {known.name for known in dataclasses.fields(WorkerSpec)})
    logs = _logs(parsed)
    handler = _handler(meeting, parsed)
    try:
        spec = WorkerSpec(
            role=parsed.role,
            local_world_size=options.workers.local_world_size,
            rdzv_handler=handler,
            entrypoint=function,
            args=tuple(args),
            max_restarts=options.workers.max_restarts,
            master_addr=meeting.host if meeting.fixed else None,
            master_port=meeting.port if meeting.fixed else None,
            local_addr=_options.local_addr_of(parsed),
            **further,
        )
        with _signals(parsed):
            agent = LocalElasticAgent(
                spec,
                logs,
                start_method=start_method,
                log_line_prefix_template=_options.log_line_prefix_of(parsed),
                shutdown_timeout=_options.grace_of(parsed),
            )
            result = agent.run()
        if result.is_failed():
            raise ChildFailedError(function.__name__, result.failures)
    except BaseException as error:
        _end(handler, error)
        raise
    _end(handler, None)
    return result.return_values


def _end(handler: LauncherHandler, error: BaseException | None) -> None:
    """Leave the job, or end it. No other error must replace the one that the agent met."""
    try:
        handler.end(error)
    except Exception:
        logger.exception("[%s] this node could not leave the job", handler.get_run_id())


@contextlib.contextmanager
def _signals(parsed: argparse.Namespace) -> Iterator[None]:
    """Have the agent handle these, and workers know them. The program's handlers and its environment are restored.

    In another than the main thread the agent handles none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = os.environ.get(SIGNALS)
    handlers = {number: signal.getsignal(number) for number in _options.ending_signals_of(parsed)}
    os.environ[SIGNALS] = parsed.signals_to_handle
    try:
        yield
    finally:
        # The agent keeps some for a process that ends with the job.
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        if before is None:
            os.environ.pop(SIGNALS, None)
        else:
            os.environ[SIGNALS] = before


def _further(parsed: argparse.Namespace, known: set[str]) -> dict[str, Any]:
    """Return what not every version of torch has in its ``WorkerSpec``.

    Raises:
        ValueError: this one does not, and it is asked for.
    """
    import torch

    fields = {"numa_binding": "numa_options"}
    names = ("numa_binding", "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank")
    further = {name: value for name in names if (value := getattr(parsed, name))}
    for name, value in further.items():
        if fields.get(name, name) not in known:
            raise ValueError(
                f"{name} is `{value}`, which functions cannot have with torch {torch.__version__}: leave it out, or "
                "launch a script"
            )
    if binding := further.pop("numa_binding", None):
        from torch.numa.binding import AffinityMode, NumaOptions

        further["numa_options"] = NumaOptions(affinity_mode=AffinityMode(binding))
    return further


def _logs(parsed: argparse.Namespace) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    ranks = parsed.local_ranks_filter
    return DefaultLogsSpecs(
        log_dir=parsed.log_dir,
        redirects=Std.from_str(parsed.redirects),
        tee=Std.from_str(parsed.tee),
        local_ranks_filter={int(rank) for rank in ranks.split(",")} if ranks else None,
    )


def _handler(meeting: Rendezvous, parsed: argparse.Namespace) -> LauncherHandler:
    """Return the rendezvous handler that elastic-run's flags mean."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from elastic_rs import _elastic_rs
    from elastic_rs.rendezvous import RustC10dRendezvousHandler, RustEtcdRendezvousHandler
    from elastic_rs.rendezvous._launcher_handler import created
    from elastic_rs.rendezvous._static_handler import StaticRendezvousHandler

    class Alone(RustC10dRendezvousHandler):
        """Of a node that nobody else is to find: other users of this machine could."""

        def _protection(self) -> _elastic_rs.Protection | None:
            return _elastic_rs.Protection.by_token(_elastic_rs.new_token())

    conf: dict[str, Any] = dict(parse_conf(parsed.rdzv_conf))
    if parsed.store_tunnel:
        conf["store_tunnel"] = "1"
    conf |= _options.keys_by_flags(parsed)
    make: Callable[[RendezvousParameters], LauncherHandler] = RustC10dRendezvousHandler
    backend, endpoint = RUST_C10D, ",".join(endpoint_of(*each) for each in meeting.endpoints)
    if meeting.etcd is not None:
        make, backend, endpoint = RustEtcdRendezvousHandler, parsed.rdzv_backend, parsed.rdzv_endpoint
    elif meeting.fixed:
        make, backend = StaticRendezvousHandler, "static"
        conf |= {"node_rank": meeting.config.node_rank, "is_host": int(meeting.config.is_host or False)}
        if not {"timeout", "join_timeout"} & conf.keys():
            conf["join_timeout"] = _options.STATIC_TIMEOUT_S
    elif _options.is_alone(parsed, meeting.nodes) or (meeting.port == 0 and meeting.nodes[1] == 1):
        make = Alone
    elif not parsed.rdzv_endpoint:
        endpoint = ""  # for a warning that none was given
    params = RendezvousParameters(
        backend, endpoint, meeting.run_id, *meeting.nodes, local_addr=_options.local_addr_of(parsed), **conf
    )
    return created(make, params)
