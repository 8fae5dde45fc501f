"""Relays before the ports of an etcd cluster, for faults of the network: silence, delay, refusal, partition."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

HOST = "127.0.0.1"
CHUNK = 1 << 16
# The line by which an etcd member says who it is when it connects to another.
SENDER = re.compile(rb"^X-Server-From: ([0-9a-f]+)\r$", re.MULTILINE)
LIMIT_S = 10.0


class Relays:
    """Relays, and the thread that serves all of them.

    A relay listens where no other process does. A process that has ended behind its relay is *closed* to clients, and
    not *refused*; :meth:`Relay.refuse` makes that difference.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")
        self._thread.start()
        self._relays: list[Relay] = []

    def before(self, port: int) -> Relay:
        """Put a relay before that port."""
        relay = Relay(self, port)
        self._relays.append(relay)
        self.call(relay._listen())
        return relay

    def at(self, port: int) -> Relay:
        """Return the relay that listens on that port."""
        return next(relay for relay in self._relays if relay.port == port)

    def call(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(LIMIT_S)

    def close(self) -> None:
        """End everything. Members whose relays have gone are cut off from one another."""
        for relay in self._relays:
            self.call(relay._close())
        self.call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        """End the connections that were just being accepted, which no relay knew yet."""
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for relay in self._relays:
                await relay._abort()
            await asyncio.wait(others, timeout=0.1)


class _Way:
    """One connection: both directions, and which member it comes from, if a member has said so."""

    def __init__(self, relay: Relay, client: asyncio.StreamWriter) -> None:
        self.relay, self.client = relay, client
        self.server: asyncio.StreamWriter | None = None
        self.sender: str | None = None
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def silent(self) -> bool:
        return self.relay._silent or self.sender in self.relay._shunned

    async def pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delayed: Callable[[], float]
    ) -> None:
        """Pass bytes on, each chunk after its delay and in order."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def write() -> None:
            while True:
                due, data = await queue.get()
                if (rest_s := due - loop.time()) > 0:
                    await asyncio.sleep(rest_s)
                await self.relay._until_open(self)
                if not data:
                    sink.write_eof()
                    return
                sink.write(data)
                await sink.drain()

        writer = asyncio.create_task(write())
        try:
            while data := await source.read(CHUNK):
                if self.sender is None and (found := SENDER.search(data)):
                    self.sender = found[1].decode()
                self.relay.passed += len(data)
                queue.put_nowait((loop.time() + delayed(), data))
            queue.put_nowait((loop.time() + delayed(), b""))
            await writer
        finally:
            writer.cancel()

    def abort(self) -> None:
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for end in (self.client, self.server):
            if end is not None:
                end.transport.abort()


class Relay:
    """Passes bytes between clients and one port."""

    def __init__(self, relays: Relays, to: int) -> None:
        self._relays, self._to = relays, to
        # Holds the port while nobody listens on it.
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind((HOST, 0))
        self.port = int(self._holder.getsockname()[1])
        self.passed = 0
        """Bytes in both directions."""
        self._server: asyncio.Server | None = None
        self._ways: set[_Way] = set()
        self._delay_s = 0.0
        self._silent = False
        self._shunned: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def connections(self) -> int:
        return len(self._ways)

    def silence(self) -> None:
        """Pass nothing on, and let clients connect all the same, as a stopped process or a cut cable does."""
        self._relays.call(self._set(silent=True))

    def delay(self, seconds: float) -> None:
        """Hand answers to clients that much later."""
        self._relays.call(self._set(delay_s=seconds))

    def refuse(self) -> None:
        """End all connections, and refuse new ones, as the port of a process that has ended does."""
        self._relays.call(self._close_ways())

    def end(self) -> None:
        """End all connections. New ones are welcome."""
        self._relays.call(self._abort())

    def shun(self, member: int) -> None:
        """Pass nothing on between this port and that etcd member, a peer."""
        self._relays.call(self._set(shunned=f"{member:x}"))

    def heal(self) -> None:
        """Pass everything on at once, and listen."""
        self._relays.call(self._heal())

    async def _set(self, *, silent: bool = False, delay_s: float = 0.0, shunned: str | None = None) -> None:
        self._silent |= silent
        self._delay_s = delay_s or self._delay_s
        if shunned is not None:
            self._shunned.add(shunned)

    async def _heal(self) -> None:
        self._silent, self._delay_s = False, 0.0
        self._shunned.clear()
        self._changed.set()
        self._changed = asyncio.Event()
        if self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port, reuse_address=True)

    async def _close_ways(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._abort()

    async def _abort(self) -> None:
        ways = list(self._ways)
        for way in ways:
            way.abort()
        await asyncio.gather(*(task for way in ways for task in way.tasks), return_exceptions=True)

    async def _close(self) -> None:
        await self._close_ways()
        self._holder.close()

    async def _until_open(self, way: _Way) -> None:
        while way.silent:
            await self._changed.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = _Way(self, writer)
        self._ways.add(way)
        way.tasks.append(asyncio.create_task(self._serve(way, reader)))

    async def _serve(self, way: _Way, reader: asyncio.StreamReader) -> None:
        try:
            await self._until_open(way)
            answers, way.server = await asyncio.open_connection(HOST, self._to)
            pumps = [
                asyncio.create_task(way.pump(reader, way.server, lambda: 0.0)),
                asyncio.create_task(way.pump(answers, way.client, lambda: self._delay_s)),
            ]
            way.tasks += pumps
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            pass  # one of the ends has gone, or the relay ends it
        finally:
            self._ways.discard(way)
            way.abort()
