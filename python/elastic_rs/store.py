"""``TCPStore``: PyTorch's client, our server.

A subclass of ``torch.distributed.TCPStore``, so that C++ (process groups, ``PrefixStore``, RPC) sees the real thing in every
operation: C++ has no way to call a Python subclass of ``TCPStore``, and only half of one to call a subclass of ``Store``
(no queues, no ``list_keys``, and nothing at all once the last Python reference is gone).
"""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta

import torch.distributed as dist

from elastic_rs import _elastic_rs
from elastic_rs.errors import StoreNetworkError, StoreTimeoutError

__all__ = ["TCPStore"]


class TCPStore(dist.TCPStore):
    """A store served by ``elastic_rs``; constructor, methods and exceptions are those of ``torch.distributed.TCPStore`` 2.15.

    Args:
        host_name: where the clients connect to; the server, as PyTorch's, listens on all addresses.
        port: 0 to 65535; with ``is_master``, 0 lets the system choose.
        world_size: number of store users including the server, None if not fixed.
        is_master: whether this object starts the server. It lives as long as this object, or, if C++ still uses the store
            after the last Python reference has gone, as long as that.
        timeout: for connecting, and for operations that wait. Default 300 s.
        wait_for_workers: whether the owner of the server waits until ``world_size`` users have connected.
        multi_tenant: share the server of this port within this process.
        master_listen_fd: a bound socket for the server to take over.
        use_libuv: kept for compatibility; there is one server here. Clients use it to know whether queues exist.

    Raises:
        DistNetworkError: the port is taken (the message says by whom, where the system tells) or cannot be reached.
        DistStoreError: workers are missing when ``timeout`` ends.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),  # noqa: B008 - immutable
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        server = _start_server(port, multi_tenant, master_listen_fd) if is_master else None
        if server is not None:
            port = server.port
        super().__init__(
            host_name,
            port,
            world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            use_libuv=use_libuv,
        )
        self._server = server
        if server is not None:
            # Held by this object's own connection: when C++ closes that, the server has nobody left to serve.
            server.stop_when_closed(*_own_address(super().__repr__()))
            if world_size is not None and world_size >= 0 and wait_for_workers:
                _wait_for_workers(server, world_size, timeout)

    def __repr__(self) -> str:
        text = super().__repr__()
        if self._server is not None:
            text = text.replace("server=<nullptr>", f"server=TCPServer(port={self._server.port})")
        return text


# Servers that multi-tenant stores of this process share, by port. The stores hold them; this table only finds them.
_shared: dict[int, _elastic_rs.StoreServer] = {}


def _start_server(port: int, multi_tenant: bool, listen_fd: int | None) -> _elastic_rs.StoreServer | None:
    if not 0 <= port <= 65535:
        raise TypeError(f"port is `{port}`, must be from 0 to 65535")
    shared = _shared.get(port)
    if multi_tenant and shared is not None and not shared.stopped:
        return shared
    try:
        if listen_fd is None:
            server = _elastic_rs.StoreServer.listen(None, port)
        else:
            server = _elastic_rs.StoreServer.adopt(listen_fd, port)
    except OSError as error:
        if _is_agents_store(port):
            return None
        raise StoreNetworkError(_bind_text(port, error)) from error
    if multi_tenant:
        _shared[server.port] = server
    return server


def _bind_text(port: int, error: OSError) -> str:
    # PyTorch's words, which its elastic code searches for `address already in use`; then who has the port.
    name = "EADDRINUSE, message: address already in use" if error.errno == 98 else f"{error.strerror}"
    return (
        "The server socket has failed to listen on any local network address. "
        f"port: {port}, useIpv6: false, code: -{error.errno}, name: {name} ({error.strerror})"
    )


def _is_agents_store(port: int) -> bool:
    """Whether the taken port is that of the agent's store, which this process is then a plain client of."""
    uses = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "false").lower()
    return uses in {"y", "yes", "1", "t", "true"} and os.environ.get("MASTER_PORT") == str(port)


def _own_address(text: str) -> tuple[str, int]:
    """Read the address of a store's own connection, found by the descriptor that its repr names."""
    found = re.search(r"SocketImpl\(fd=(\d+)", text)
    if found is None:
        raise RuntimeError(f"cannot read the connection of a store from its repr `{text}`")
    with socket.socket(fileno=os.dup(int(found[1]))) as connection:
        host, port = connection.getsockname()[:2]
    return host, port


def _wait_for_workers(server: _elastic_rs.StoreServer, world_size: int, timeout: timedelta) -> None:
    joined = server.wait_for_workers(world_size, timeout_s=timeout.total_seconds())
    if joined < world_size:
        seconds = int(timeout.total_seconds())
        raise StoreTimeoutError(
            f"Timed out after {seconds} seconds waiting for clients. {joined}/{world_size} clients joined."
        )
