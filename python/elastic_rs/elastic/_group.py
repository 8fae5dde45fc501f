"""The default process group: found or made, ended, and made again for each world."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from elastic_rs import _torch_private
from elastic_rs._elastic_rs import WorkerChannel
from elastic_rs.elastic import _decisions

# How often the thread that aborts NCCL's groups looks whether this process ends.
_LOOK_S = 0.5
# How long torch tries to connect to a store before this worker asks again whether a peer has failed. torch repeats
# refused connections itself, and nothing else can interrupt it.
_CONNECT_S = 2.0
# Pause between tries, some of which fail at once.
_PAUSE_S = 0.05

_worlds_left = 0
"""How many worlds this process has left."""


def _left_a_world() -> None:
    global _worlds_left  # noqa: PLW0603 - meshes are compared in the whole process
    _worlds_left += 1
    if _worlds_left == 1:
        _torch_private.tell_meshes_apart(lambda: _worlds_left)


class Group:
    """The default process group of this process. Subgroups that the user has made end with it."""

    def __init__(self, backend: str | None, timeout: timedelta | None) -> None:
        """Take the existing group as it is, or say how it will be made."""
        self.exists = dist.is_initialized()
        """Whether there is a group for the present world."""
        if self.exists:
            name = dist.get_backend()
            self._backend = None if name == "undefined" else str(name)
            self._timeout = _torch_private.timeout_of_default_group()
            self.backends = _decisions.backend_names(dist.get_backend_config())
        else:
            self._backend, self._timeout = backend or default_backend(), timeout
            self.backends = _decisions.backend_names(self._backend)
            os.environ.update(_decisions.nccl_variables(os.environ, self.backends))
        if self.backends == {"gloo"}:  # destroying NCCL's may wait for a peer that has failed
            atexit.register(_destroy_at_exit)
        self._destroyed = 0
        """How many groups of the present world the script has destroyed."""
        self._hooks: tuple[Any, Any] | None = None
        self._aborter: _Aborter | None = None

    def make(self, raise_if_failed: Callable[[], None]) -> None:
        """Make the group of the world that the environment describes: of one worker without a launcher.

        Args:
            raise_if_failed: raises if a peer is known to have failed. It is asked while the store cannot be reached.
        """
        before = sys.excepthook
        self._destroyed += self.exists
        if "RANK" in os.environ:
            store, rank, world_size = self._connected(raise_if_failed)
            # With the prefixes that a script's `init_process_group` has: a new worker may run such a script.
            store = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined] # public, as documented
            if self._destroyed:
                # The addresses of the groups before are still in the store.
                store = dist.PrefixStore(f"after_{self._destroyed}", store)  # type: ignore[attr-defined]
        else:
            store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined] # public, as documented
        dist.init_process_group(self._backend, timeout=self._timeout, store=store, rank=rank, world_size=world_size)
        self._hooks = (before, sys.excepthook)
        self.exists = True

    @property
    def store_port(self) -> int | None:
        """The port of the store, whose connection is shut down when a peer fails. None for NCCL: its threads use it."""
        return _torch_private.port_of_default_store() if self.backends == {"gloo"} else None

    @property
    def has_subgroups(self) -> bool:
        """Whether the script has made process groups beside the default one."""
        return _torch_private.has_subgroups()

    def _connected(self, raise_if_failed: Callable[[], None]) -> tuple[Any, int, int]:
        """Return the store of the world, this worker's rank, and the number of workers, by the environment."""
        limit = self._timeout or default_pg_timeout
        one_try = min(limit, timedelta(seconds=_CONNECT_S))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            one_try = limit  # a worker hosts the store, and waits for the others with the same limit
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            raise_if_failed()
            try:
                store, rank, world_size = next(rendezvous("env://", timeout=one_try))
            except RuntimeError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
                continue
            store.set_timeout(limit)
            return store, rank, world_size

    def watch(self, channel: WorkerChannel) -> None:
        """Abort NCCL's collectives as soon as a failure is known. They would block for ever."""
        if "nccl" not in self.backends:
            return
        if self._aborter is None:
            self._aborter = _Aborter(channel)
        self._aborter.arm()

    def end(self, *, failed: bool) -> None:
        """Destroy the group, so that another one can be made.

        Args:
            failed: whether a peer has failed. NCCL's groups can only be aborted then: ``ncclCommDestroy`` would wait
                for the dead.
        """
        self.exists, self._destroyed = False, 0
        if self._aborter is not None:
            self._aborter.disarm(abort=failed)
        if dist.is_initialized():
            _destroy()
        # A group that could not be made has taken a number. Groups are named by it, and the names must be the same on
        # all ranks, also on new workers. Destroying a group resets the numbers.
        _torch_private.forget_group_numbers()
        _left_a_world()
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            # Each group wraps the hook of the one before, to print the rank before each line of a traceback.
            sys.excepthook = self._hooks[0]


def default_backend() -> str:
    """Return NCCL for GPUs if there are any, and gloo for the rest."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


class Wraps:
    """The ``DistributedDataParallel`` wraps that the user's function has made.

    A wrap has hooks on the gradients of the module. When its process group is gone they would still run at the next
    backward pass, if anything keeps the wrap alive.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the wraps that are made inside this block."""
        handle = register_module_module_registration_hook(self._registered)
        try:
            yield
        finally:
            handle.remove()

    def release(self) -> None:
        """Take the hooks off the gradients."""
        for wrap in list(self._made):
            _torch_private.take_hooks_off(wrap)
        self._made.clear()

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Called whenever a module is made part of another one, and so when a wrap takes the bare module."""
        del name, child
        if isinstance(parent, DistributedDataParallel):
            self._made.add(parent)


class _Aborter:
    """A thread that aborts the process groups when a failure is known, while the main thread waits for a device."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._armed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="elastic_rs-abort", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def arm(self) -> None:
        """There is a group again."""
        self._armed.set()

    def disarm(self, *, abort: bool) -> None:
        """Leave the group alone from now on, after it has been aborted if it shall be."""
        with self._lock:
            self._armed.clear()
            if abort:
                _abort()

    def _run(self) -> None:
        while not self._stopping:
            if not self._armed.wait(_LOOK_S) or not self._failed(_LOOK_S):
                continue
            with self._lock:
                # The main thread may have entered the next world since, and made a group that must not be aborted.
                if self._armed.is_set() and self._failed(0.0):
                    self._armed.clear()
                    _abort()

    def _failed(self, limit_s: float) -> bool:
        try:
            return self._channel.failed_within(limit_s)
        except (OSError, RuntimeError):  # the connection is closed: the guard ends this process
            self._armed.clear()
            return False

    def _stop(self) -> None:
        self._stopping = True
        self._thread.join(2 * _LOOK_S)


def _abort() -> None:
    if dist.is_initialized():
        _torch_private.abort_groups()


def _destroy_at_exit() -> None:
    # A group with threads that is still there when the process ends may abort it.
    if dist.is_initialized():
        _destroy()


def _destroy() -> None:
    # In torch 2.6 a group joins the threads of its backend with the GIL held, which one of them may wait for. A backend
    # that has a reference of its own ends by that, without the GIL.
    backends = _torch_private.backends_of_groups()
    dist.destroy_process_group()
    backends.clear()
