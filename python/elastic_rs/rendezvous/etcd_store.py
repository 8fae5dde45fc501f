"""``EtcdStore``: a ``torch.distributed.Store`` in etcd, with the interface of PyTorch's class of that name.

Facts are from ``torch/distributed/elastic/rendezvous/etcd_store.py`` (2.15). That one speaks etcd's v2 API, in which
keys and values are base64. Here they are stored as they are, so that ``etcdctl get --prefix`` shows them.

It is a direct subclass of ``Store``, since C++ calls the methods of no other Python class. C++ does so only while the
Python object lives: whoever passes an ``EtcdStore`` to a ``PrefixStore`` or a process group keeps it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from elastic_rs._durations import Duration, as_seconds, as_timedelta
from elastic_rs._elastic_rs import EtcdClient
from elastic_rs._torch_private import Store
from elastic_rs.errors import StoreError, StoreLookupError, StoreNetworkError

__all__ = ["EtcdStore"]

T = TypeVar("T")

_LONGEST_PAUSE_S = 0.05
"""Of those whose change of a key was refused because another was faster."""


class Leases:
    """Leases for keys that must live for a time after they are written, though whoever wrote them may end before.

    Nobody renews them. A key that is written now lives for ``ttl`` at least, and for twice that at most.

    Args:
        client: of the cluster.
        ttl: seconds.
    """

    def __init__(self, client: EtcdClient, ttl: float) -> None:
        self._client = client
        self._ttl = ttl
        self._lease, self._fresh_until = 0, 0.0

    def put(self, write: Callable[..., T]) -> T:
        """Call ``write(lease=...)``. If the lease has ended, against all expectation, do so again with a new one.

        Args:
            write: writes keys with the lease that it is given, and raises ``LookupError`` if there is none.
        """
        now = time.monotonic()
        if now >= self._fresh_until:
            self._grant(now)
        try:
            return write(lease=self._lease)
        except LookupError:
            self._grant(time.monotonic())
            return write(lease=self._lease)

    def _grant(self, now: float) -> None:
        self._lease = self._client.lease_grant(2 * self._ttl)
        self._fresh_until = now + self._ttl


class EtcdStore(Store):
    """Keys and values in etcd, below a prefix.

    Args:
        etcd_client: an :class:`elastic_rs.EtcdClient`.
        etcd_store_prefix: beginning of all keys of this store.
        timeout: how long :meth:`get` and :meth:`wait` wait for keys: a ``timedelta``, or seconds. Default 300 s.
        ttl: how long keys live after they were written, at least, and at most twice as long. Without it they live
            until somebody deletes them.

    Raises:
        TypeError: the client is another. That of the package python-etcd speaks the v2 API, which etcd 3.6 has removed.

    Operations are those of ``torch.distributed.Store``. Each raises ``StoreNetworkError`` if etcd cannot be reached,
    and ``StoreError`` if it refuses.
    """

    def __init__(
        self,
        etcd_client: EtcdClient,
        etcd_store_prefix: str,
        timeout: Duration | None = None,
        *,
        ttl: Duration | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore] # pybind11 makes the C++ object
        self.client = checked(etcd_client)
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        if timeout is not None:
            self.set_timeout(as_timedelta("timeout", timeout))
        self._ttl = None if ttl is None else as_seconds("ttl", ttl)
        self._leases = None if self._ttl is None else Leases(etcd_client, self._ttl)
        self._clones: list[EtcdStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        with self._named("set", [key]):
            self._put(functools.partial(self.client.put, self._at(key), value))

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it to appear.

        Raises:
            StoreLookupError: it did not within the store's timeout. It is a ``LookupError``, as with PyTorch's class.
        """
        began, limit_s = time.monotonic(), self._limit_s()
        with self._named("get", [key]):
            while (value := self.client.get(self._at(key))[0]) is None:
                self._wait([key], began, limit_s, f"Key {key} not found in EtcdStore")
        return value

    def add(self, key: str, num: int) -> int:
        """Add to the number stored under a key, in decimal digits, and return the sum. No key counts as 0."""
        return int(self._change("add", key, lambda value: str(int(value or b"0") + num).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value. No key counts as an empty one."""
        self._change("append", key, lambda there: (there or b"") + _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace a value by another if it is the expected one; an empty one stands for no key.

        Returns:
            What is stored now, or the expected value if there is no key and one was expected.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        answer = desired

        def change(there: bytes | None) -> bytes | None:
            nonlocal answer
            matches = there == expected if there is not None else not expected
            answer = desired if matches else expected if there is None else there
            return desired if matches else None

        self._change("compare_set", key, change)
        return answer

    def delete_key(self, key: str) -> bool:
        """Delete a key. True if it was there."""
        with self._named("delete_key", [key]):
            return self.client.delete(self._at(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._range("num_keys", ""))

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [key.decode(errors="surrogateescape") for key in self._range("list_keys", "")]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there. Does not wait."""
        return None not in self._values("check", keys)

    def wait(self, keys: Sequence[str], override_timeout: Duration | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            StoreLookupError: they were not within the timeout. It is a ``LookupError``, as with PyTorch's class.
        """
        # PyTorch's C++ passes what it is given. A negative time is over at once.
        given = override_timeout
        limit_s = self._limit_s() if given is None else as_seconds("override_timeout", given, signed=True)
        with self._named("wait", keys):
            self._wait(keys, time.monotonic(), limit_s, "Timeout while waiting for keys in EtcdStore")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, waiting for all to appear."""
        began, limit_s = time.monotonic(), self._limit_s()
        while True:
            found = [value for value in self._values("multi_get", keys) if value is not None]
            if len(found) == len(keys):
                return found
            with self._named("multi_get", keys):
                self._wait(keys, began, limit_s, "Timeout while waiting for keys in EtcdStore")

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether there are ``append``, ``multi_get`` and ``multi_set``: yes."""
        return True

    def clone(self) -> EtcdStore:
        """Return another store of the same keys. It lives as long as this one, since C++ does not keep it."""
        clone = EtcdStore(self.client, self.prefix, timedelta(seconds=self._limit_s()), ttl=self._ttl)
        self._clones.append(clone)
        return clone

    # The names under which C++ looks for them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _at(self, key: str) -> str:
        return self.prefix + key

    def _limit_s(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined, unused-ignore] # not in older stubs of torch
        return timeout.total_seconds()

    def _put(self, write: Callable[..., T]) -> T:
        return write() if self._leases is None else self._leases.put(write)

    def _range(self, operation: str, prefix: str) -> dict[bytes, bytes]:
        """Return the keys with this prefix, without the store's own, and their values."""
        own = len(self.prefix.encode())
        with self._named(operation, [f"{prefix}*"]):
            return {key[own:]: value for key, value, _ in self.client.range(self._at(prefix))}

    def _values(self, operation: str, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values that are there now, in one request if the keys begin alike."""
        if prefix := os.path.commonprefix(list(keys)) if len(keys) > 1 else "":  # noqa: RUF071 - of texts
            there = self._range(operation, prefix)
            return [there.get(key.encode()) for key in keys]
        with self._named(operation, keys):
            return [self.client.get(self._at(key))[0] for key in keys]

    def _wait(self, keys: Sequence[str], began: float, limit_s: float, what: str) -> None:
        left_s = max(0.0, began + limit_s - time.monotonic())
        missing = self.client.wait([self._at(key) for key in keys], timeout_s=left_s)
        if missing:
            own = len(self.prefix.encode())
            names = ", ".join(f"`{key[own:].decode(errors='replace')}`" for key in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            where = f"below `{self.prefix}` at {self.client.options.endpoints}"
            text = f"{what}: {names}{more} did not appear {where} within {limit_s:.1f} s"
            raise StoreLookupError(text, elapsed=time.monotonic() - began)

    def _change(self, operation: str, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes:
        """Replace a value by what ``change`` makes of it, once. None: leave it."""
        at, began = self._at(key), time.monotonic()
        with self._named(operation, [key]):
            value, revision, _ = self.client.get(at)
            unsure, pause_s = False, 0.0
            while (new := change(value)) is not None:
                done = self._put(functools.partial(self.client.compare_and_put, at, revision, new))
                if done is None:
                    # The same request again cannot be done twice.
                    unsure = True
                    if time.monotonic() - began > self.client.options.read_timeout_s:
                        raise ConnectionError("etcd does not answer: it may have been done")
                    continue
                written, value, revision = done
                if written:
                    return new
                if unsure:
                    raise ConnectionError("etcd did not answer, and the key has changed since: it may have been done")
                # Spread those that change the same key.
                pause_s = min(max(0.001, 2 * pause_s), _LONGEST_PAUSE_S)
                time.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
        return b""

    @contextlib.contextmanager
    def _named(self, operation: str, keys: Sequence[str]) -> Iterator[None]:
        """Raise this package's exceptions, which name the operation and its keys."""
        began = time.monotonic()
        try:
            yield
        except StoreError:
            raise
        except (OSError, LookupError) as error:
            kind = StoreNetworkError if isinstance(error, ConnectionError) else StoreError
            text = f"{operation} of {_shown(keys)} failed: {error}"
            raise kind(text, elapsed=time.monotonic() - began) from None


def checked(client: object) -> EtcdClient:
    """Return the client if it is one of this package.

    Raises:
        TypeError: it is another; the message says how to make one.
    """
    if not isinstance(client, EtcdClient):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise TypeError(
            f"the client is a {kind}, must be an elastic_rs.EtcdClient, which speaks etcd's v3 API: "
            'elastic_rs.EtcdClient(elastic_rs.EtcdOptions("host:2379"))'
        )
    return client


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _shown(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(f"`{key}`" for key in keys[:3]) + more


def __dir__() -> list[str]:
    return list(__all__)
