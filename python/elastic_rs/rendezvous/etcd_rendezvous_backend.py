"""The rendezvous backend ``etcd-v2``: a state in etcd, with the interface of PyTorch's class, over etcd's v3 API.

For programs that make a ``DynamicRendezvousHandler`` of it, ours or PyTorch's. ``--rdzv-backend=rust-etcd`` does not
use it: its nodes watch the state, where a handler over a backend asks for it every second.

Facts are from ``torch/distributed/elastic/rendezvous/etcd_rendezvous_backend.py`` (2.15). There a token is a
``modifiedIndex`` of the v2 API and the state is base64; here it is a key's ``mod_revision`` and the state is stored as
it is. Nodes of both cannot be mixed: etcd keeps the keys of its two APIs apart.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from elastic_rs._durations import Duration, as_seconds
from elastic_rs._elastic_rs import EtcdClient, EtcdOptions
from elastic_rs.errors import RendezvousConnectionError
from elastic_rs.rendezvous.etcd_store import EtcdStore, Leases, checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["EtcdRendezvousBackend", "create_backend"]

_KEY_PREFIX = "/torch/elastic/rendezvous"
_STORE_PREFIX = "/torch/elastic/store"

T = TypeVar("T")


class EtcdRendezvousBackend(RendezvousBackend):
    """Holds the rendezvous state under one key of etcd.

    Args:
        client: an :class:`elastic_rs.EtcdClient`.
        run_id: the run id.
        key_prefix: the key is this, a slash, and the run id. Without it, the key is the run id.
        ttl: how long the state lives after the last write, at least, and at most twice as long: a ``timedelta``, or
            seconds. Two hours if it is not given, or not above zero.

    Raises:
        ValueError: the run id is empty.
        TypeError: the client is another.
    """

    _DEFAULT_TTL = 7200

    def __init__(
        self, client: EtcdClient, run_id: str, key_prefix: str | None = None, ttl: Duration | None = None
    ) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._client = checked(client)
        self._key = f"{key_prefix}/{run_id}" if key_prefix else run_id
        given_s = 0.0 if ttl is None else as_seconds("ttl", ttl, signed=True)
        self._leases = Leases(client, given_s if given_s > 0 else self._DEFAULT_TTL)

    @property
    def name(self) -> str:
        """``etcd-v2``, PyTorch's name for a state in etcd."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token, or None if there is none.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
        """
        state, revision, _ = self._call(self._client.get, self._key)
        return None if state is None else (state, revision)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state if ``token`` is that of the one that is there; None stands for no state.

        Args:
            state: what to write.
            token: what :meth:`get_state` or this method has returned with the state that is to be replaced.

        Returns:
            What is there now, its token, and whether this call wrote it. None if nothing is there.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
        """
        try:
            expected = int(token) if token else 0
        except (TypeError, ValueError):
            # Not a token of this class, so it cannot match the present state.
            return self._present(lambda _: False)
        write = functools.partial(self._client.compare_and_put, self._key, expected, state)
        done = self._call(self._leases.put, write)
        if done is None:
            # Nobody answered. The present state shows whether it was written.
            return self._present(lambda there: there == state)
        written, there, revision = done
        return None if there is None else (there, revision, written)

    def _present(self, written: Callable[[bytes], bool]) -> tuple[bytes, Any, bool] | None:
        there = self.get_state()
        return None if there is None else (*there, written(there[0]))

    def _call(self, operation: Callable[..., T], *args: Any) -> T:
        try:
            return operation(*args)
        except (OSError, LookupError) as error:
            text = "The connection to etcd has failed. See inner exception for details."
            raise RendezvousConnectionError(text) from error


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Create a backend, and a store, from what torchrun was given.

    The endpoint may name several members: ``h1:2379,h2:2379``. Reads ``read_timeout`` (whole seconds, default 60),
    ``protocol`` (``http`` or ``https``), ``ca_cert``, ``ssl_cert``, ``ssl_cert_key``, ``username`` and
    ``password_file`` of the configuration.

    Args:
        params: run id, endpoint and configuration: ``torch.distributed.elastic``'s class.

    Raises:
        ValueError: a value is not allowed, or a file cannot be read.
        RendezvousConnectionError: etcd has not answered within ``read_timeout``, or refuses.
    """
    read_timeout = params.get_as_int("read_timeout", 60)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    protocol = params.get("protocol")
    if protocol is not None and (protocol := protocol.strip().lower()) not in {"http", "https"}:
        raise ValueError("The protocol must be HTTP or HTTPS.")
    options = EtcdOptions(
        params.endpoint or "",
        protocol=protocol,
        cacert=params.get("ca_cert"),
        cert=params.get("ssl_cert"),
        key=params.get("ssl_cert_key"),
        username=params.get("username"),
        password_file=params.get("password_file"),
        read_timeout_s=read_timeout,
    )
    client = EtcdClient(options)
    backend = EtcdRendezvousBackend(client, params.run_id, key_prefix=_KEY_PREFIX)
    backend.get_state()  # the client itself connects with its first request
    return backend, EtcdStore(client, _STORE_PREFIX)


def __dir__() -> list[str]:
    return list(__all__)
