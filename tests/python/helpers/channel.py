"""An agent's end of the channel to workers, written after the messages in `src/channel/message.rs`."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Heard = tuple[str, *tuple[int | str | None, ...]]

LIMIT_S = 60.0


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def text(value: str) -> bytes:
    return varint(len(value.encode())) + value.encode()


class Agent:
    """Listens for workers at a name of its own, which is in no file system."""

    def __init__(self) -> None:
        name = f"elastic_rs-test-{uuid.uuid4().hex}"
        self.address = f"@{name}"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(f"\0{name}")
        self.socket.listen()
        self.socket.settimeout(LIMIT_S)
        self.no_process_group = False
        """Whether it has said that the library makes its process group."""
        self.workers: list[Worker] = []

    def accept(self) -> Worker:
        """Return the next connection, whose hello is read."""
        connection, _ = self.socket.accept()
        worker = Worker(connection)
        self.workers.append(worker)
        assert worker.hear() == ("hello", 5)
        return worker

    def close(self) -> None:
        self.socket.close()
        for worker in self.workers:
            worker.close()


class Worker:
    """The connection of one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(LIMIT_S)
        self.generation: tuple[int, int] | None = None
        """Round and world of the state with which it has parked."""

    def hear(self) -> Heard | None:
        """Return what the worker says next, or None at the end of the connection."""
        while head := self._bytes(4):
            body = iter(self._bytes(struct.unpack("<I", head)[0]))
            heard = self._heard(body)
            assert list(body) == []
            if heard is not None:
                return heard
        return None

    def _heard(self, body: Iterator[int]) -> Heard | None:
        heard: Heard
        match number(body):
            case 0:
                heard = ("hello", number(body))
            case 1:
                heard = ("ack", number(body), number(body))
            case 2:
                self.generation = (number(body), number(body)) if next(body) else None
                heard = ("parked", number(body) if next(body) else None)
            case 3:
                self.no_process_group = True
                return None
            case 4:
                heard = ("stuck",)
            case 5:
                heard = ("raised", string(body), string(body))
            case 6:
                heard = ("unfit", string(body))
            case 8:
                return None  # freed: how fast a worker leaves its world is the agent's matter
            case kind:
                raise AssertionError(f"message {kind}")
        return heard

    def _bytes(self, count: int) -> bytes:
        out = b""
        while len(out) < count and (more := self.socket.recv(count - len(out))):
            out += more
        return out

    def refuse(self, reason: str) -> None:
        self._tell(0, text(reason))

    def world(
        self,
        generation: int,
        variables: dict[str, str],
        reason: str = "",
        *,
        source: int = 1,
        sync: bool = True,
    ) -> None:
        """Tell of a world."""
        pairs = b"".join(text(name) + text(value) for name, value in variables.items())
        # The id of its world is the number of its round.
        world = varint(generation) * 2 + varint(source) + bytes([sync, not sync])
        fields = varint(len(variables)) + pairs + world + text(reason)
        self._tell(1, fields)

    def change(self, seq: int, flags: int, reason: str) -> None:
        self._tell(2, varint(seq) + bytes([flags]) + text(reason))

    def raise_at(self, seq: int, check: int) -> None:
        self._tell(3, varint(seq) + varint(check))

    def fail(self, reason: str, rank: int | None = None) -> None:
        self._tell(4, text(reason) + (b"\0" if rank is None else b"\1" + varint(rank)))

    def _tell(self, kind: int, fields: bytes) -> None:
        body = varint(kind) + fields
        self.socket.sendall(struct.pack("<I", len(body)) + body)

    def close(self) -> None:
        self.socket.close()


def string(body: Iterator[int]) -> str:
    return bytes(next(body) for _ in range(number(body))).decode()


def number(body: Iterator[int]) -> int:
    value = shift = 0
    while True:
        byte = next(body)
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value
