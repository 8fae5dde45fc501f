"""Pairings of a client and a server that play the steps of :mod:`helpers.store_steps`.

Steps are ordered without waiting for time to pass: each is played after the one before it has been carried out. A
reply shows that. For a call that blocks, the kernel shows that its request has left; on loopback the bytes have then
arrived at the server. Round trips on another connection show that the server has read them, because it serves all
connections from one thread.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from elastic_rs import _elastic_rs

from helpers.store_steps import (
    CLIENTS,
    HASTY,
    Action,
    Do,
    Finish,
    Join,
    Lose,
    Start,
    Step,
    parts,
    plain,
)
from helpers.stores import HOST, LIMIT, Adapter, servers_of, until

# Time-out of a wait that is not released. It may end before or after the next step.
SHORT = timedelta(seconds=0.03)
# Time limit of a call that does not block.
HANG_S = 40.0

PAIRINGS = [("stock", "libuv"), ("stock", "ours"), ("core", "libuv"), ("core", "ours")]

Outcome = Any


class _Worker:
    """A thread for the calls of one client. It is a daemon, because a call that hangs must not keep the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Outcome], Callable[[], Outcome]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, call: Callable[[], Outcome]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            future.set_result(call())


class _Client:
    """One connection, with the thread that uses it and a view of its socket."""

    def __init__(self, kind: str, port: int, timeout: timedelta) -> None:
        # One at a time, because the sockets of another party's connection would be counted too.
        with _connecting:
            before = _sockets_to(port)
            self.store = _connected(kind, port, timeout)
            # An attempt that timed out may not have closed its socket yet.
            until("one socket is there", lambda: len(_sockets_to(port) - before) == 1)
            (fd,) = _sockets_to(port) - before
            self._socket = socket.socket(fileno=os.dup(fd))
        self.worker = _Worker()
        self.waiting: Future[Outcome] | None = None

    def bytes_sent(self) -> int:
        """Return the number of bytes sent: ``tcpi_bytes_sent`` of ``struct tcp_info``."""
        (sent,) = struct.unpack_from("Q", self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
        return int(sent)

    def close(self) -> None:
        self._socket.close()
        self.worker.end()
        self.store = None


_connecting = threading.Lock()


def _connected(kind: str, port: int, timeout: timedelta) -> Any:
    if kind == "stock":
        store = dist.TCPStore(HOST, port, timeout=LIMIT)
        store.set_timeout(timeout)
        return store
    deadline = time.monotonic() + LIMIT.total_seconds()
    while True:
        try:
            return Adapter(_elastic_rs.StoreClient(HOST, port, timeout_s=timeout.total_seconds()))
        except dist.DistNetworkError:
            # The time-out bounds connecting as well, and a short one may be too short for that.
            if time.monotonic() > deadline:
                raise


def _sockets_to(port: int) -> set[int]:
    """Return the descriptors of this process that are connected to this port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        try:
            if not str(Path("/proc/self/fd", name).readlink()).startswith("socket:"):
                continue
            # A duplicate, because another thread may close the descriptor meanwhile, and its number may be used again.
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.getpeername()[1] == port:
                    found.add(int(name))
        except (OSError, IndexError):
            continue
    return found


class Party:
    """One kind of client with one kind of server. It is used for many sequences, and the store is left empty."""

    def __init__(self, client: str, server: str) -> None:
        self.kind, self.server_kind = client, server
        self.server, self.port = servers_of(server)
        self.probe = _elastic_rs.StoreClient(HOST, self.port, timeout_s=LIMIT.total_seconds())
        self.clients = [self._connect(number) for number in range(CLIENTS)]

    def __str__(self) -> str:
        return f"{self.kind} client, {self.server_kind} server"

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.server_kind == "ours":
            self.server.stop()
        self.server = None

    def play(self, actions: list[Action]) -> list[Outcome]:
        """Return the outcome of each action, and finally the content of the store."""
        outcomes = [self._play(action) for action in actions]
        return [*outcomes, self._contents(actions)]

    def _connect(self, number: int) -> _Client:
        return _Client(self.kind, self.port, SHORT if number == HASTY else LIMIT)

    def _play(self, action: Action) -> Outcome:
        match action:
            case Do(step, fence):
                seen = self._call(step)
                return (seen, self._fence(step.client)) if fence else seen
            case Lose(step):
                # A call without a reply may return before the connection is closed. The next call shows the close.
                seen = self._call(step), self._fence(step.client)
                self.clients[step.client].close()
                self.clients[step.client] = self._connect(step.client)
                return "lost" if seen[0] in (None, "network") and seen[1] == "network" else seen
            case Start(step):
                client = self.clients[step.client]
                goal = client.bytes_sent() + _request_bytes(step)
                client.waiting = client.worker.submit(lambda: self._outcome(step, client.store))
                until(f"{step} has been sent", lambda: client.bytes_sent() >= goal or client.waiting.done())  # type: ignore[union-attr, unused-ignore]
                for _ in range(3):
                    self.probe.num_keys()
                # It may have timed out already. Any other result is reported.
                return "blocks" if not client.waiting.done() or step.gives_up else client.waiting.result()
            case Join(numbers):
                # Released clients run concurrently, so two that pop from one queue may do so in either order.
                return sorted((self._joined(number) for number in numbers), key=repr)
            case Finish(keys):
                self.probe.multi_set(list(keys), [b"released at the end"] * len(keys))
                return self.probe.num_keys()

    def _call(self, step: Step) -> Outcome:
        client = self.clients[step.client]
        return _result(client.worker.submit(lambda: self._outcome(step, client.store)))

    def _fence(self, number: int) -> Outcome:
        return self._call(Step(number, "num_keys"))

    def _joined(self, number: int) -> Outcome:
        client = self.clients[number]
        assert client.waiting is not None
        future, client.waiting = client.waiting, None
        return _result(future)

    def _contents(self, actions: list[Action]) -> Outcome:
        """Return the content of the store, and remove it."""
        keys = sorted(self.probe.list_keys())
        values = list(zip(keys, self.probe.multi_get(keys), strict=True))
        for key in keys:
            self.probe.delete_key(key)
        steps = [action.step for action in actions if isinstance(action, Do)]
        queues = []
        for key in sorted({plain(step.args)[0] for step in steps if step.call == "queue_push"}):
            length = self.probe.queue_len(key)
            queues.append((key, [self.probe.queue_pop(key, False) for _ in range(length)]))
        assert self.probe.num_keys() == 0
        return values, queues

    def _outcome(self, step: Step, store: Any) -> Outcome:
        args = plain(step.args)
        if step.call in ("wait", "barrier") and step.client != HASTY:
            args.append(SHORT if step.gives_up else LIMIT)
        try:
            result = getattr(store, step.call)(*args)
        except Exception as error:  # noqa: BLE001 - whatever comes is compared
            return _error_class(error, step)
        return sorted(result) if step.call == "list_keys" else result


def _result(future: Future[Outcome]) -> Outcome:
    try:
        return future.result(HANG_S)
    except FutureTimeoutError:
        return "hangs"


def _request_bytes(step: Step) -> int:
    """Return the length of the first request of a call that blocks."""
    keys, _ = parts(step)
    named = sum(8 + 1 + len(key) for key in keys)
    return 1 + named + 8  # the number of keys of a WAIT, the world size of a BARRIER


def _error_class(error: Exception, step: Step) -> str:
    if isinstance(error, dist.QueueEmptyError):
        return "queue empty"
    if isinstance(error, dist.DistNetworkError):
        return "network"
    if isinstance(error, TimeoutError) or (isinstance(error, dist.DistStoreError) and "timeout after" in str(error)):
        return "timeout"
    if isinstance(error, UnicodeDecodeError) and step.gives_up and not all(_is_utf8(key) for key in parts(step)[0]):
        # PyTorch fails to make the message, which names the keys. Ours escapes them.
        return "timeout"
    builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return f"other: {builtin.__name__}"


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


class Parties:
    """All pairings. They are replaced after an error in a sequence."""

    def __init__(self) -> None:
        self._parties: list[Party] = []

    def play(self, actions: list[Action]) -> list[tuple[str, list[Outcome]]]:
        """Play one sequence with all of them at once."""
        if not self._parties:
            self._parties = [Party(client, server) for client, server in PAIRINGS]
        workers = [_Worker() for _ in self._parties]
        futures = [
            worker.submit(functools.partial(_or_error, functools.partial(party.play, actions)))
            for worker, party in zip(workers, self._parties, strict=True)
        ]
        results = [future.result() for future in futures]
        for worker in workers:
            worker.end()
        for result in results:
            if isinstance(result, Exception):
                self.close()
                raise result
        return [(str(party), result) for party, result in zip(self._parties, results, strict=True)]

    def close(self) -> None:
        for party in self._parties:
            party.close()
        self._parties = []


def _or_error(call: Callable[[], Outcome]) -> Outcome:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller that takes the result raises it
        return error
