"""``TCPStore`` for asyncio: the operations of ``torch.distributed.TCPStore``, each an awaitable.

The client is the core's, not PyTorch's. Waiting blocks no thread. Cancelling a waiting task gives up its wait. An
error names the store, the operation and the elapsed time. It works with this project's server and PyTorch's::

    async with aio.TCPStore.connect("node0", 29400, timeout=5) as store:
        await store.set("key", "value")
        async with asyncio.timeout(5):
            await store.get("other key")
"""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

# Imported here, because errors are made while the event loop runs, and importing torch takes seconds.
import elastic_rs._torch_errors  # noqa: F401
from elastic_rs._durations import as_seconds, as_timedelta
from elastic_rs._elastic_rs import AsyncStoreClient

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from types import TracebackType

    from elastic_rs._durations import Duration

    Text = str | bytes | bytearray
    """A key or a value. A ``str`` is sent as UTF-8."""

__all__ = ["TCPStore"]

S = TypeVar("S", bound="TCPStore")


class TCPStore:
    """A connection to a store, made by :meth:`connect`.

    Operations of one object are carried out one after the other, in the order they are called, so one that waits holds
    up those after it; :meth:`clone` makes a connection of its own. Cancelling an operation leaves the connection in
    step; whether it was carried out is then not known.

    A duration is a ``timedelta``, or a number of seconds. A negative one is for ever.

    Every operation raises, besides what its own description says, ``StoreNetworkError`` once the connection is lost
    (the object stays broken then), and those that wait raise ``StoreTimeoutError``: subclasses of what PyTorch raises.

    >>> import asyncio
    >>> from elastic_rs import TCPStore, aio
    >>> server = TCPStore("127.0.0.1", 0, is_master=True)
    >>> async def main():
    ...     async with await aio.TCPStore.connect("127.0.0.1", server.port, timeout=60.0) as store:
    ...         await store.set("key", "value")
    ...         return await store.get("key")
    >>> asyncio.run(main())
    b'value'
    """

    def __init__(self, client: AsyncStoreClient, host: str, port: int, timeout: timedelta) -> None:
        """Private: :meth:`connect` makes instances."""
        self._client = client
        self._host = host
        self._port = port
        self._timeout = timeout

    @classmethod
    def connect(cls, host: str, port: int, timeout: Duration = timedelta(seconds=300)) -> _Connecting[Self]:
        """Connect to the store at ``host:port``, which need not listen yet.

        ``await`` the result, or use it in ``async with``, which closes the store at the end of the block.

        Args:
            host: name or address; all addresses of a name are tried.
            port: of the store.
            timeout: for connecting, and for operations that wait.

        Raises:
            StoreNetworkError: no store answered in time; the message says what each address met.
            TypeError: ``timeout`` is not a duration.
            ValueError: ``timeout`` is not finite.
        """
        return _Connecting(cls._connect(host, port, as_timedelta("timeout", timeout, signed=True)))

    @classmethod
    async def _connect(cls, host: str, port: int, timeout: timedelta) -> Self:
        client = await AsyncStoreClient.connect(host, port, timeout_s=timeout.total_seconds())
        return cls(client, host, port, timeout)

    @property
    def host(self) -> str:
        """The host, as given."""
        return self._host

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._port

    @property
    def timeout(self) -> timedelta:
        """How long operations wait by default. Negative is for ever."""
        return self._timeout

    def set_timeout(self, timeout: Duration) -> None:
        """Change :attr:`timeout` for operations that are called later."""
        changed = as_timedelta("timeout", timeout, signed=True)
        self._client.set_timeout(changed.total_seconds())
        self._timeout = changed

    async def set(self, key: Text, value: Text) -> None:
        """Store a value. Returns when the request has been sent: the protocol has no acknowledgement."""
        await self._client.set(key, value)

    async def get(self, key: Text) -> bytes:
        """Return a key's value, waiting for it to appear."""
        return bytes(await self._client.get(key))

    async def add(self, key: Text, amount: int) -> int:
        """Add to the number stored under a key, which is 0 if there is none, and return the sum."""
        if not -(1 << 63) <= amount < 1 << 63:
            raise TypeError(f"amount is `{amount}`, must be in 64 bits")  # PyTorch's class for it
        return int(await self._client.add(key, amount))

    async def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Store ``desired`` if the value is ``expected``, where empty means missing. Return the valid value."""
        return bytes(await self._client.compare_set(key, expected, desired))

    async def check(self, keys: Collection[Text]) -> bool:
        """Whether all keys exist."""
        return bool(await self._client.check(_list(keys)))

    async def wait(self, keys: Collection[Text], timeout: Duration | None = None) -> None:
        """Wait until all keys exist."""
        await self._client.wait(_list(keys), _seconds(timeout))

    async def delete_key(self, key: Text) -> bool:
        """Remove a key. Return whether it existed."""
        return bool(await self._client.delete_key(key))

    async def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return int(await self._client.num_keys())

    async def append(self, key: Text, value: Text) -> None:
        """Append to a key's value."""
        await self._client.append(key, value)

    async def multi_get(self, keys: Collection[Text]) -> list[bytes]:
        """Return several values, waiting for all keys to appear."""
        values: list[bytes] = await self._client.multi_get(_list(keys))
        return values

    async def multi_set(self, keys: Collection[Text], values: Collection[Text]) -> None:
        """Store several values, all at once.

        Raises:
            StoreError: there are not as many values as keys.
        """
        await self._client.multi_set(_list(keys), _list(values))

    async def queue_push(self, key: Text, value: Text) -> None:
        """Add an item to the end of a queue."""
        await self._client.queue_push(key, value)

    async def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the first item of a queue. With ``block``, wait for one.

        Raises:
            StoreQueueEmptyError: there is none; also after blocking, if another client was faster.
        """
        return bytes(await self._client.queue_pop(key, block))

    async def queue_len(self, key: Text) -> int:
        """Return the length of a queue."""
        return int(await self._client.queue_len(key))

    async def list_keys(self) -> list[str]:
        """Return all keys, in no particular order.

        Raises:
            UnicodeDecodeError: a key is not UTF-8.
        """
        keys: list[bytes] = await self._client.list_keys()
        return [key.decode() for key in keys]

    async def barrier(self, key: Text, world_size: int, timeout: Duration | None = None) -> None:
        """Wait until ``world_size`` callers have reached the barrier at this key. The key must be unused."""
        await self._client.barrier(key, world_size, _seconds(timeout))

    async def clone(self) -> Self:
        """Open another connection to the same store."""
        return type(self)(await self._client.clone(), self._host, self._port, self._timeout)

    def close(self) -> None:
        """Close the connection once operations under way have ended. Later ones raise ``StoreNetworkError``."""
        self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._client.closed else ""
        return f"<elastic_rs.aio.TCPStore of {self._host}:{self._port}{closed}>"


class _Connecting(Coroutine[Any, Any, S]):
    """A store that is being connected: to be awaited, or to be entered by ``async with``.

    It is a coroutine, so that ``asyncio.create_task`` takes it, and so that one that nobody awaits is warned of.
    """

    def __init__(self, connect: Coroutine[Any, Any, S]) -> None:
        self._connect = connect
        self._store: S | None = None

    def __await__(self) -> Generator[Any, Any, S]:
        return self._connect.__await__()

    def send(self, value: Any) -> Any:
        return self._connect.send(value)

    def throw(self, *error: Any) -> Any:
        return self._connect.throw(*error)

    def close(self) -> None:
        self._connect.close()

    async def __aenter__(self) -> S:
        self._store = await self._connect
        return self._store

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._store is not None  # it was entered
        self._store.close()


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else as_seconds("timeout", timeout, signed=True)


def _list(texts: Collection[Text]) -> list[Text]:
    if isinstance(texts, (str, bytes, bytearray)):
        raise TypeError(f"`{texts!r}` must be a list of such")
    return list(texts)


def __dir__() -> list[str]:
    return list(__all__)
