"""``TCPStore``: PyTorch's client, our server.

A subclass of ``torch.distributed.TCPStore``, so that C++ (process groups, ``PrefixStore``, RPC) sees the real thing in
every operation: C++ has no way to call a Python subclass of ``TCPStore``, and only half of one to call a subclass of
``Store`` (no queues, no ``list_keys``, and nothing at all once the last Python reference is gone).
"""

from __future__ import annotations

import errno
import functools
import inspect
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from elastic_rs import _elastic_rs
from elastic_rs._durations import Duration, as_timedelta
from elastic_rs._torch_private import TCPStore as _TheirStore
from elastic_rs.errors import StoreNetworkError, StoreTimeoutError

__all__ = ["TCPStore"]


class _StandIn(type(_TheirStore)):  # type: ignore[misc] # the type of pybind11's classes
    """The type of a class that, once installed, also stands for the stores that C++ returns.

    C++ keeps a store without its Python object; the next object that it makes for the store is of torch's class.
    Programs that ask whether what is below a ``PrefixStore`` is a ``dist.TCPStore`` get the answer that PyTorch gives.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        installed = vars(dist)["TCPStore"] is cls
        return super().__instancecheck__(instance) or (installed and isinstance(instance, _TheirStore))


class TCPStore(_TheirStore, metaclass=_StandIn):
    """A store served by ``elastic_rs``; otherwise ``torch.distributed.TCPStore``, as it is in PyTorch 2.15.

    Args:
        host_name: where the clients connect to; the server, as PyTorch's, listens on all addresses.
        port: 0 to 65535; with ``is_master``, 0 lets the system choose.
        world_size: number of store users including the server, None if not fixed.
        is_master: whether this object starts the server. It lives as long as this object, or, if C++ still uses the
            store after the last Python reference has gone, as long as that.
        timeout: for connecting, and for operations that wait: a ``timedelta``, or a number of seconds. Default 300 s.
        wait_for_workers: whether the owner of the server waits until ``world_size`` users have connected.
        multi_tenant: share the server of this port within this process. It lives until the last store that shares it
            has gone.
        master_listen_fd: a bound socket for the server to take over, and to close at its end.
        use_libuv: kept for compatibility; there is one server here. Clients use it to know whether queues exist.

    Raises:
        DistNetworkError: the port is taken (the message names the process, if the system does) or cannot be reached, or
            ``master_listen_fd`` is no socket that can listen.
        DistStoreError: workers are missing when ``timeout`` ends, or ``master_listen_fd`` has another port.
        TypeError: an argument has the wrong type, or ``port`` does not exist.
        ValueError: ``world_size`` is 0.

    >>> from elastic_rs import TCPStore
    >>> store = TCPStore("127.0.0.1", 0, is_master=True)
    >>> store.set("key", "value")
    >>> store.get("key")
    b'value'
    """

    def __init__(  # noqa: PLR0917 - PyTorch's parameters, all of which may be positional
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Duration = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if not isinstance(is_master, bool):
            raise TypeError(f"is_master is `{is_master!r}`, must be a bool")
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0")  # as PyTorch, but before anything is started
        limit = as_timedelta("timeout", timeout, signed=True)
        server = _start_server(port, multi_tenant, master_listen_fd) if is_master else None
        try:
            super().__init__(
                host_name,
                port if server is None else server.port,
                world_size,
                is_master=False,
                timeout=limit,
                wait_for_workers=wait_for_workers,
                use_libuv=use_libuv,
            )
            self._server = server
            own, self._peer = _ends(super().__repr__())
            if server is not None:
                # This object's own connection keeps the server: when C++ closes it, this owner has gone.
                server.stop_when_closed(*own)
        except BaseException:
            if server is not None:
                server.give_up_owner()
            raise
        if server is not None and world_size is not None and world_size > 0 and wait_for_workers:
            _wait_for_workers(server, world_size, limit)

    def set_timeout(self, timeout: Duration) -> None:
        """Change the timeout of operations that are called later: a ``timedelta``, or a number of seconds."""
        super().set_timeout(as_timedelta("timeout", timeout, signed=True))

    if TYPE_CHECKING:  # `_named` makes the operations

        def wait(self, keys: list[str], timeout: Duration = ...) -> None:
            """Wait until all keys exist, at most ``timeout`` or the store's own."""

    @property
    def is_server(self) -> bool:
        """Whether this object started the server."""
        return self._server is not None

    def __repr__(self) -> str:
        text: str = super().__repr__()
        if self._server is not None:
            text = text.replace("server=<nullptr>", f"server=TCPServer(port={self._server.port})")
        return text


class _Signatures(Protocol):
    """The parameters of PyTorch's operations, which C++ does not tell Python. Those without a name there are ``/``."""

    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str | bytes, /) -> None: ...
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def list_keys(self) -> list[str]: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str | bytes], /) -> None: ...
    def num_keys(self) -> int: ...
    def queue_len(self, key: str, /) -> int: ...
    def queue_pop(self, key: str, block: bool = True) -> bytes: ...
    def queue_push(self, key: str, value: str | bytes, /) -> None: ...
    def set(self, key: str, value: str | bytes, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta | None = None, /) -> None: ...


def _named(operation: str) -> Callable[..., Any]:
    """PyTorch's operation, with an error that names the operation, its keys, the store and the elapsed time."""
    of_pytorch = getattr(TCPStore.__base__, operation)

    @functools.wraps(of_pytorch)
    def call(self: TCPStore, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        timeout_at = _TIMEOUT_AT.get(operation)
        if timeout_at is not None and len(args) > timeout_at:
            args = (*args[:timeout_at], as_timedelta("timeout", args[timeout_at], signed=True))
        if "timeout" in kwargs:
            kwargs["timeout"] = as_timedelta("timeout", kwargs["timeout"], signed=True)
        try:
            return of_pytorch(self, *args, **kwargs)
        except dist.DistNetworkError as error:
            keys, elapsed_s = _keys([*args, *kwargs.values()]), time.monotonic() - began
            cause = str(error).partition("\n")[0]
            lost = f"connection to the store at {self._peer} lost: {cause}"
            text = f"{operation}{keys} failed after {elapsed_s:.3f} s: {lost}"
            raise StoreNetworkError(text, endpoint=self._peer, elapsed=elapsed_s) from None

    call.__signature__ = inspect.signature(getattr(_Signatures, operation))  # type: ignore[attr-defined]
    return call


_TIMEOUT_AT = {"barrier": 2, "wait": 1}
"""Position of the timeout among the arguments of an operation that may have one of its own."""

# PyTorch has had queues since 2.8, `list_keys` and `barrier` later.
_OPERATIONS = (
    "add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get", "multi_set",
    "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait",
)  # fmt: skip

for _operation in _OPERATIONS:
    if hasattr(TCPStore, _operation):
        setattr(TCPStore, _operation, _named(_operation))


def _keys(arguments: Sequence[Any]) -> str:
    """Return the keys of an operation, in words: its first argument, a key or a list of keys."""
    if not arguments:
        return ""
    keys = arguments[0] if isinstance(arguments[0], list) else arguments[:1]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f" of {', '.join(f'`{key}`' for key in keys[:3])}{more}"


# The servers of this process's multi-tenant stores, by port. Those that have ended are dropped at the next use.
_shared: dict[int, _elastic_rs.StoreServer] = {}
_shared_lock = threading.Lock()


def _start_server(port: int, multi_tenant: bool, listen_fd: int | None) -> _elastic_rs.StoreServer | None:
    """Find or start the server and promise it an owner. None: the store is a client of the agent's store."""
    if not 0 <= port <= 65535:
        raise TypeError(f"port is `{port}`, must be from 0 to 65535")
    with _shared_lock:
        for ended in [shared_port for shared_port, server in _shared.items() if server.stopped]:
            del _shared[ended]
        shared = _shared.get(port) if multi_tenant else None
        if shared is not None:
            if shared.expect_owner():
                return shared
            shared.stop()  # its last owner has just gone; this waits until the port is free
        server = _new_server(port, listen_fd)
        if server is not None:
            promised = server.expect_owner()
            assert promised  # nobody could have stopped it yet
            if multi_tenant:
                _shared[server.port] = server
        return server


def _new_server(port: int, listen_fd: int | None) -> _elastic_rs.StoreServer | None:
    if listen_fd is not None:
        try:
            return _elastic_rs.StoreServer.adopt(listen_fd, port)
        except OSError as error:
            raise StoreNetworkError(f"Failed to open existing socket. socket: {listen_fd}, {_reason(error)}") from error
    try:
        return _elastic_rs.StoreServer.listen(None, port)
    except OSError as error:
        if _is_agents_store(port):
            return None
        text = "The server socket has failed to listen on any local network address."
        reason = f"port: {port}, useIpv6: false, {_reason(error)} ({error.strerror})"
        raise StoreNetworkError(f"{text} {reason}") from error


def _reason(error: OSError) -> str:
    # In libuv's words: PyTorch's elastic code searches for `address already in use`, in lower case.
    number = error.errno or 0
    return f"code: -{number}, name: {errno.errorcode.get(number, 'UNKNOWN')}, message: {os.strerror(number).lower()}"


def _is_agents_store(port: int) -> bool:
    """Whether the port is in use by the agent's store. This process is then a client of it."""
    uses = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "false")
    if uses.lower() not in {"y", "yes", "1", "t", "true", "0", "n", "no", "f", "false"}:
        raise RuntimeError("Invalid value for environment variable: TORCHELASTIC_USE_AGENT_STORE")
    agents_port = os.environ.get("MASTER_PORT")
    if agents_port is None or uses.lower() in {"0", "n", "no", "f", "false"}:
        return False
    digits = re.match(r"\s*[+-]?\d+", agents_port)  # the rest is ignored, as C++ does
    if digits is None:
        raise RuntimeError("Invalid value for environment variable: MASTER_PORT")
    return int(digits[0]) == port


def _ends(text: str) -> tuple[tuple[str, int], str]:
    """Return both addresses of a store's own connection. Its repr names the descriptor."""
    found = re.search(r"SocketImpl\(fd=(\d+)", text)
    if found is None:
        raise RuntimeError(f"cannot read the connection of a store from its repr `{text}`")
    with socket.socket(fileno=os.dup(int(found[1]))) as connection:
        host, port = connection.getsockname()[:2]
        peer_host, peer_port = connection.getpeername()[:2]
    peer_host = peer_host.removeprefix("::ffff:")
    return (host, port), f"[{peer_host}]:{peer_port}" if ":" in peer_host else f"{peer_host}:{peer_port}"


def _wait_for_workers(server: _elastic_rs.StoreServer, world_size: int, timeout: timedelta) -> None:
    began, limit_s = time.monotonic(), timeout.total_seconds()
    joined = server.wait_for_workers(world_size, timeout_s=limit_s)
    if joined < world_size:
        # Whole seconds, as in PyTorch's message. PyTorch itself waits up to a second longer than its timeout.
        raise StoreTimeoutError(
            f"Timed out after {math.ceil(limit_s)} seconds waiting for clients. {joined}/{world_size} clients joined.",
            elapsed=time.monotonic() - began,
        )


def __dir__() -> list[str]:
    return list(__all__)
