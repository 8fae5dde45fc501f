"""What answers at an address: our coordinator, a c10d store, something else, or nothing.

A store is asked for a ping, as by a c10d client: PyTorch's store requires the first five bytes in one segment. A
coordinator is asked for its version, which begins no session.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass

from elastic_rs._elastic_rs import coordinator_is_protected, coordinator_question, coordinator_version, store_question

# PyTorch's store ignores a greeting until more bytes follow. Then it closes the connection.
NUDGE_AFTER_S = 1.0
READ_BYTES = 4096


@dataclass(frozen=True)
class Reached:
    """The result of connecting."""

    who: str
    """``coordinator``, ``protected`` (a coordinator that requires a token), ``store``, ``other``, ``silent``; or,
    for nobody, ``refused``, ``timeout``, ``unreachable``."""
    address: str
    """The address that was connected to, or that the error is about."""
    text: str = ""
    """Of ``other`` and ``unreachable``: the answer, or the error."""
    version: int = 0
    """Of ``coordinator``: the version of its protocol."""
    elapsed_s: float = 0.0
    """Time from connecting to the answer."""

    @property
    def listens(self) -> bool:
        """Whether a process accepts connections."""
        return self.who in {"coordinator", "protected", "store", "other", "silent"}


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def reach(addresses: list[str], port: int, limit_s: float) -> Reached:
    """Find out what answers. Connecting and answering may take ``limit_s`` each."""
    began = time.monotonic()
    connected = _connect(addresses, port, limit_s)
    if isinstance(connected, Reached):
        return connected
    connection, address = connected
    with connection:
        pid = os.getpid()
        nonce = pid.to_bytes(4, "little")
        got, ended = _ask(connection, store_question(pid), len(nonce), limit_s)
    elapsed_s = time.monotonic() - began
    if got != nonce:
        if not got and ended:
            return _protected(address, port, limit_s)
        if not got:
            return Reached("silent", address)
        line = got.strip().partition(b"\n")[0][:40].strip()
        return Reached("other", address, f"it says `{line.decode('ascii', 'backslashreplace')}`")
    again = _connect([address], port, limit_s)
    if isinstance(again, Reached):
        return again
    with again[0] as connection:
        got, ended = _ask(connection, coordinator_question(), READ_BYTES, min(limit_s, NUDGE_AFTER_S))
        if not got and not ended:
            got, _ = _ask(connection, coordinator_question(), READ_BYTES, limit_s)
    version = coordinator_version(got)
    if version is None:
        return Reached("store", address, elapsed_s=elapsed_s)
    return Reached("coordinator", address, version=version, elapsed_s=elapsed_s)


def _protected(address: str, port: int, limit_s: float) -> Reached:
    """Find out whether a server that closes the connection of a c10d client is a coordinator that requires a token."""
    began = time.monotonic()
    connected = _connect([address], port, limit_s)
    if isinstance(connected, Reached):
        return connected
    with connected[0] as connection:
        got, _ = _ask(connection, coordinator_question(), READ_BYTES, limit_s)
    if coordinator_is_protected(got):
        return Reached("protected", address, elapsed_s=time.monotonic() - began)
    return Reached("other", address, "it closes the connection")


def _connect(addresses: list[str], port: int, limit_s: float) -> tuple[socket.socket, str] | Reached:
    """Connect to all addresses at once and use the first: one that swallows packets must not hide another."""
    deadline = time.monotonic() + limit_s
    failed: dict[str, int] = {}
    waiting = {}
    with selectors.DefaultSelector() as selector:
        try:
            for address in addresses:
                try:
                    made = socket.socket(family_of(address), socket.SOCK_STREAM)
                except OSError as error:  # no such family here
                    failed[address] = error.errno or 0
                    continue
                made.setblocking(False)
                code = made.connect_ex((address, port))
                if code in {0, errno.EINPROGRESS}:
                    waiting[address] = made
                    selector.register(made, selectors.EVENT_WRITE, address)
                else:
                    made.close()
                    failed[address] = code
            while waiting and (rest_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(rest_s):
                    made = waiting.pop(key.data)
                    selector.unregister(made)
                    code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        return made, str(key.data)
                    made.close()
                    failed[key.data] = code
            return _nobody(failed, list(waiting))
        finally:
            for made in waiting.values():
                made.close()


def _nobody(failed: dict[str, int], silent: list[str]) -> Reached:
    for address, code in failed.items():
        if code == errno.ECONNREFUSED:
            return Reached("refused", address)
    if silent:
        return Reached("timeout", silent[0])
    for address, code in failed.items():
        if code == errno.ETIMEDOUT:
            return Reached("timeout", address)
        return Reached("unreachable", address, os.strerror(code))
    return Reached("unreachable", "", "it has no address")


def _ask(connection: socket.socket, question: bytes, length: int, limit_s: float) -> tuple[bytes, bool]:
    """Send, and read up to ``length`` bytes within the time limit. The second value: whether the connection ended."""
    deadline = time.monotonic() + limit_s
    got = b""
    try:
        connection.settimeout(limit_s)
        connection.sendall(question)
        while len(got) < length and (rest_s := deadline - time.monotonic()) > 0:
            connection.settimeout(rest_s)
            part = connection.recv(READ_BYTES)
            if not part:
                return got, True
            got += part
    except TimeoutError:
        return got, False
    except OSError:
        return got, True
    return got, False
