"""Every private name of PyTorch's that this package uses, since PyTorch has no public one for it. Each has a test.

What ``agent._local`` inherits from PyTorch's agent, and overrides, is not here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

# The public names are `install()`'s to replace, and have no types.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import MultiprocessContext

__all__ = [
    "FileStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "abort_groups",
    "event_handlers",
    "forget_group_numbers",
    "gloo_connects_inside",
    "handler_factories",
    "has_subgroups",
    "is_this_host",
    "keep_versions",
    "let_workers_end",
    "members_of_groups",
    "port_of_default_store",
    "processes_of",
    "recorded_collectives",
    "return_queues",
    "signal_handler",
    "store_of",
    "take_hooks_off",
    "tell_meshes_apart",
    "timeout_of_default_group",
    "worker_group_of",
]


def handler_factories() -> dict[str, Any]:
    """Return PyTorch's registry of rendezvous handlers by backend, which refuses a second registration."""
    from torch.distributed.elastic.rendezvous import registry  # noqa: F401 - fills it
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    factories: dict[str, Any] = rendezvous_handler_registry._registry  # noqa: SLF001
    return factories


def event_handlers() -> dict[str, Any]:
    """Return the handlers of events by name."""
    from torch.distributed.elastic.events import handlers

    return handlers._log_handlers  # noqa: SLF001


def signal_handler() -> Callable[..., None]:
    """Return the handler that raises ``SignalException``."""
    from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

    return _terminate_process_handler


def is_this_host(host: str) -> bool:
    """Whether PyTorch takes an endpoint's host for this machine."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


def store_of(backend: Any) -> Any:
    """Return the store of a ``C10dRendezvousBackend``, PyTorch's or ours; None for other backends."""
    return getattr(backend, "_store", None)


def worker_group_of(agent: Any) -> Any:
    """Return the worker group of an agent; None for other objects."""
    return getattr(agent, "_worker_group", None)


def processes_of(context: MultiprocessContext) -> Any:
    """Return the ``ProcessContext`` of workers that are functions: their processes, and their files of exceptions."""
    return context._pc  # noqa: SLF001


def return_queues(context: MultiprocessContext) -> dict[int, Any]:
    """Return the queues by local rank through which workers return values."""
    queues: dict[int, Any] = context._ret_vals  # noqa: SLF001
    return queues


def let_workers_end(context: MultiprocessContext) -> None:
    """Let workers end that have returned. They wait for that until their values were read."""
    context._worker_finished_event.set()  # noqa: SLF001


def forget_group_numbers() -> None:
    """Begin the numbers of process groups anew, as destroying the default group does."""
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001


def has_subgroups() -> bool:
    """Return whether there are other process groups than the default one."""
    return len(dist.distributed_c10d._world.pg_map) > 1  # noqa: SLF001


def port_of_default_store() -> int | None:
    """Return the port of the server of the default group's store. None: there is no group, or the store has none."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


@contextlib.contextmanager
def gloo_connects_inside(block: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Whenever gloo connects the members of a process group, let it do so inside this block.

    Whoever makes the group, it does so in one of these methods: ``new_group``, meshes, ``split_group``, a library of
    its own. They are looked up in their class at each call, so it does not matter what a program has imported before.
    """
    from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

    with contextlib.ExitStack() as stack:
        for kind, name in (
            (ProcessGroupGloo, "__init__"),
            (ProcessGroup, "split_group"),
            (ProcessGroup, "merge_remote_group"),
        ):
            if name in vars(kind):  # torch 2.6 has none of the last two
                stack.enter_context(_wrapped(kind, name, block))
        yield


@contextlib.contextmanager
def _wrapped(kind: type, name: str, block: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    original = vars(kind)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with block():
            return original(*args, **kwargs)

    setattr(kind, name, wrapper)
    try:
        yield
    finally:
        if vars(kind)[name] is wrapper:  # nobody has wrapped it since
            setattr(kind, name, original)


def tell_meshes_apart(world: Callable[[], int]) -> None:
    """From now on, let meshes that are made in different worlds be unequal, also if they have the same ranks.

    PyTorch compares meshes by the ranks in them, and keeps what it has worked out for a mesh, with the mesh itself. If
    this process has another rank than in an earlier world, it would work on with its place of then: ``redistribute``
    and checkpoints of DTensors would take the wrong part of the data, without an error. ``_thread_id`` is PyTorch's own
    mark for meshes that look the same and belong to different ranks.

    Args:
        world: returns the number of the world in which this process is, from 1.
    """
    from torch.distributed.device_mesh import DeviceMesh

    original = DeviceMesh.__init__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._thread_id is None:
            self._thread_id = -world()  # a thread's is positive
            self._hash = None  # it is worked out when it is first asked for

    DeviceMesh.__init__ = wrapper  # type: ignore[method-assign]


RECORDED_LIMIT_BYTES = 4 << 20
"""Longest recorder that agents read."""


def recorded_collectives() -> list[bytes]:
    """Return the flight recorders of the backends in use as JSON, NCCL's before gloo's. Without any group, gloo's.

    One that is too long has only the numbers of begun and ended collectives, and one that PyTorch lacks is left out.
    """
    from torch._C import _distributed_c10d as c10d

    # One name for all of a group's backends, such as `cpu:gloo,cuda:nccl`.
    names = map(str, [*dist.distributed_c10d._world.pg_backend_config.values()])  # noqa: SLF001
    backends = ",".join(names) or "gloo"
    found: list[bytes] = []
    for backend, name, arguments in (
        ("nccl", "_dump_nccl_trace_json", ()),
        ("nccl", "_dump_fr_trace_json", (None, "nccl")),  # 2.15
        ("gloo", "_dump_fr_trace_json", ()),  # 2.8
    ):
        dump = getattr(c10d, name, None)
        if dump is None or backend not in backends:
            continue
        with contextlib.suppress(TypeError):  # it has no argument for a backend
            recorded = dump(True, *arguments)
            found.append(recorded if len(recorded) <= RECORDED_LIMIT_BYTES else dump(False, *arguments))
    return found


def members_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of each process group of this process, by PyTorch's name of the group."""
    world = dist.distributed_c10d._world  # noqa: SLF001
    return {name: [*world.pg_group_ranks.get(group, ())] for group, name in [*world.pg_names.items()]}


def backends_of_groups() -> list[Any]:
    """Return the backends of all process groups."""
    found = []
    for group in [*dist.distributed_c10d._world.pg_map]:  # noqa: SLF001
        for device in group._device_types:  # noqa: SLF001
            with contextlib.suppress(AttributeError, RuntimeError):
                found.append(group._get_backend(device))  # noqa: SLF001
    return found


def abort_groups() -> None:
    """Abort all process groups as one."""
    dist.distributed_c10d._abort_process_group()  # noqa: SLF001


def timeout_of_default_group() -> timedelta | None:
    """Return the timeout of the default group's collectives. None: no backend of it shows its options."""
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    for device in group._device_types:  # noqa: SLF001
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(device).options._timeout  # noqa: SLF001
    return None


def take_hooks_off(wrap: Any) -> None:
    """Take the hooks of a ``DistributedDataParallel`` wrap off the gradients."""
    with contextlib.suppress(AttributeError):  # its constructor has failed
        wrap._remove_autograd_hooks()  # noqa: SLF001


def keep_versions(state_dict: Any, copy: Any) -> None:
    """Give a copy of a module's ``state_dict`` the versions of its modules, which nobody changes."""
    if hasattr(state_dict, "_metadata"):
        copy._metadata = state_dict._metadata  # noqa: SLF001
