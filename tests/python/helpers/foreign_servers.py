"""Servers that are neither a store nor a coordinator: they send bytes, close at once, or answer no connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def answering(said: bytes | None) -> Iterator[int]:
    """Accept connections, and send these bytes on each. None closes each at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            held = []
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if said:
                        connection.sendall(said)
                    if said is None:
                        connection.close()
                    held.append(connection)
            for connection in held:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """Listen without accepting: the backlog is full, so the kernel drops further connections."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]
