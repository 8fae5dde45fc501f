"""The rendezvous backend ``c10d``: a state in a store, with the interface of PyTorch's class of that name.

Facts are from ``torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py`` (2.15): the key, the base64 in it,
the sentinel that stands for "no state" (a store's ``get`` would wait), and what a write answers.
"""

from __future__ import annotations

import binascii
import logging
import os
import sys
import tempfile
from base64 import b64decode, b64encode
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from elastic_rs._torch_private import FileStore, Store, is_this_host
from elastic_rs.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from elastic_rs.rendezvous._protection import refuse_c10d
from elastic_rs.store import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["C10dRendezvousBackend", "create_backend"]

logger = logging.getLogger(__name__)

KEYS = ("is_host", "read_timeout", "store_type")
"""Keys of ``--rdzv-conf`` that ``create_backend`` reads."""

_DEFAULT_PORT = 29400
_THEIRS = "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"
_FAILED = "The connection to the C10d store has failed. See inner exception for details."
_NO_STATE = "Y2FuaW1hZGFt"


class C10dRendezvousBackend(RendezvousBackend):
    """Holds the rendezvous state under one key of a store, ours or PyTorch's.

    Args:
        store: the store; it must have ``compare_set``.
        run_id: the run id; the key is ``torch.rendezvous.`` and this.

    Raises:
        ValueError: the run id is empty.
        RendezvousConnectionError: the store cannot be reached.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._call(store.compare_set, self._key, "", _NO_STATE)

    @property
    def name(self) -> str:
        """``c10d``."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token, or None if there is none.

        Raises:
            RendezvousConnectionError: the store cannot be reached.
            RendezvousStateError: the key holds no base64.
        """
        return _decode(self._call(self._store.get, self._key))

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state if ``token`` is that of the one that is there; None stands for no state.

        Args:
            state: what to write.
            token: what :meth:`get_state` or this method has returned with the state that is to be replaced.

        Returns:
            What is there now, its token, and whether it is what was to be written. None if nothing is there.

        Raises:
            RendezvousConnectionError: the store cannot be reached.
            RendezvousStateError: the key holds no base64.
        """
        if token and not isinstance(token, bytes):
            # Not a token of this class, so it cannot match the present state.
            there = self.get_state()
            return None if there is None else (*there, False)
        expected = token.decode() if token else _NO_STATE
        there = _decode(self._call(self._store.compare_set, self._key, expected, b64encode(state).decode()))
        return None if there is None else (*there, there[0] == state)

    def _call(self, operation: Callable[..., Any], *args: str) -> bytes:
        try:
            return bytes(operation(*args))
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(_FAILED) from error


def _decode(text: bytes) -> tuple[bytes, Any] | None:
    if text == _NO_STATE.encode():
        return None
    try:
        return b64decode(text), text
    except binascii.Error as error:
        raise RendezvousStateError("The state object is corrupt. See inner exception for details.") from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Create a backend, and its store, from what torchrun was given.

    Reads ``store_type`` (``tcp`` or ``file``), ``read_timeout`` (whole seconds, default 60) and ``is_host`` of the
    configuration. Unless ``is_host`` says otherwise, this process hosts the store if the endpoint names this
    machine, as PyTorch finds out, and its port is free.

    Args:
        params: run id, endpoint and configuration: ``torch.distributed.elastic``'s class.

    Raises:
        ValueError: a value is not allowed.
        RendezvousConnectionError: the store cannot be reached, or not be hosted.
        RendezvousError: no temporary file could be made.
    """
    try:
        kind = params.get("store_type", "tcp").strip().lower()
        if kind == "tcp":
            store: Store = _tcp_store(params)
        elif kind == "file":
            store = _file_store(params)
        else:
            raise ValueError("Invalid store type given. Currently only supports file and tcp.")
        return C10dRendezvousBackend(store, params.run_id), store
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(message=message, run_id=params.run_id, node_state=NodeState.FAILED)
        raise


def _tcp_store(params: RendezvousParameters) -> TCPStore:
    refuse_c10d("C10dRendezvousBackend")
    # A program that changes PyTorch's default changes ours too.
    port = getattr(sys.modules.get(_THEIRS), "DEFAULT_PORT", _DEFAULT_PORT)
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=port)
    is_host = params.get_as_bool("is_host")
    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    # Several processes of the host may try. One of them gets the port, and the others become clients.
    attempts = [is_host] if is_host is not None else [True, False] if is_this_host(host) else [False]
    for is_master in attempts:
        try:
            timeout = timedelta(seconds=read_timeout)
            store = TCPStore(host, port, is_master=is_master, multi_tenant=True, timeout=timeout)
        except (ValueError, RuntimeError, TimeoutError) as error:
            if is_master and is_host is None:
                continue
            raise RendezvousConnectionError(_FAILED) from error
        if is_master:
            message = f"Process {os.getpid()} hosts the TCP store for the C10d rendezvous backend."
            construct_and_record_rdzv_event(run_id=params.run_id, message=message, node_state=NodeState.INIT)
            logger.info(message)
        return store
    raise AssertionError("the last attempt returns or raises")


def _file_store(params: RendezvousParameters) -> FileStore:
    path = params.endpoint
    if not path:
        try:
            descriptor, path = tempfile.mkstemp()
            os.close(descriptor)
        except OSError as error:
            raise RendezvousError(
                "The file creation for C10d store has failed. See inner exception for details."
            ) from error
    try:
        make: type[FileStore] = getattr(sys.modules.get(_THEIRS), "FileStore", FileStore)
        return make(path)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(_FAILED) from error


def __dir__() -> list[str]:
    return list(__all__)
