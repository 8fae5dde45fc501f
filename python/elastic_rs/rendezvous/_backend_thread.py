"""The thread that calls a backend for a node's session over a shared cell."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import api

from elastic_rs.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    from elastic_rs._elastic_rs import CellSession

_GONE = re.compile(r"(connection refused|connection reset|broken pipe|failed to recv, got 0 bytes)\b", re.IGNORECASE)
"""What the errors of PyTorch's stores say if the other end is gone. They have no errno."""


def is_gone(error: BaseException) -> bool:
    """Whether an error shows that nobody serves the backend any more. Silence and cuts show nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ConnectionRefusedError | ConnectionResetError | BrokenPipeError):
        return True
    return bool(_GONE.search(str(error).split("\n", 1)[0]))


class BackendThread:
    """The thread that calls the backend.

    It is Python's, not the core's: a thread that is in a backend's call when the interpreter goes is ended there by
    CPython, which must not meet Rust on its stack. It is a daemon, so it never keeps a process from ending.
    """

    def __init__(self, session: CellSession, backend: RendezvousBackend) -> None:
        self._session = session
        self._backend = backend
        # Etcd's client connects again, to whichever member answers.
        self._comes_back = isinstance(backend, EtcdRendezvousBackend)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def serve(self, session: CellSession) -> None:
        """Serve this session instead. Only before the thread is started."""
        assert self._thread is None
        self._session = session

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, unless it was started already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic_rs-rendezvous", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Leave and end, without waiting."""
        self._session.abandon("its handler is gone")

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise what the backend raised, if that is why a call failed."""
        try:
            yield
        except (api.RendezvousConnectionError, api.RendezvousStateError) as error:
            if self._error is None:
                raise
            raise self._error from error

    def _run(self) -> None:
        session, token = self._session, None
        while (state := session.next_step()) is not None:
            try:
                if state:
                    token = self._write(state, token)
                else:
                    there = self._backend.get_state()
                    content, token = (None, None) if there is None else there
                    session.on_state(content)
                self._error = None
            except api.RendezvousStateError as error:
                self._error = error
                session.on_broken(f"{type(error).__name__}: {error}", state=True)
            except api.RendezvousConnectionError as error:
                # The backend may come back: the node carries on for a lease.
                self._error = error
                text = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
                session.on_failed(text, gone=not self._comes_back and is_gone(error))
            except Exception as error:  # noqa: BLE001 - a backend is a user's code; its caller gets the exception
                self._error = error
                session.on_broken(f"the backend raised {type(error).__name__}: {error}", state=False)

    def _write(self, state: bytes, token: Any) -> Any:
        answer = self._backend.set_state(state, token)
        if answer is None:
            # Some backends do not say what became of a write. The present state shows it.
            there = self._backend.get_state()
            answer = None if there is None else (*there, there[0] == state)
        content, token, written = answer or (None, None, False)
        if written:
            self._session.on_written()
        else:
            self._session.on_conflict(content)
        return token
