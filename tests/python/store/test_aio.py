"""`elastic_rs.aio.TCPStore`: every operation, many at once, cancellation, and time-outs."""

import asyncio
import inspect
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs, aio, errors
from helpers.stores import HOST, LIMIT, SHORT, outcome, servers_of, until

NEVER = timedelta(seconds=-1)


@pytest.fixture(params=["ours", "libuv"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    kept, port = servers_of(request.param)
    yield port
    del kept


def connected(port: int, test: Callable[[aio.TCPStore], Awaitable[Any]]) -> Any:
    """Run a test with a store in a new event loop, and assert that no task is left."""

    async def run() -> Any:
        async with await aio.TCPStore.connect(HOST, port, LIMIT) as store:
            return await test(store)

    return asyncio.run(run(), debug=True)


def test_it_has_every_method_of_pytorchs_store() -> None:
    theirs = {name for name in dir(dist.TCPStore) if not name.startswith("_")}
    other = {"has_extended_api", "libuvBackend", "collect_client_counters"}  # about PyTorch's implementation
    assert theirs - other <= set(dir(aio.TCPStore))
    for name in theirs - other - {"host", "port", "timeout", "set_timeout"}:
        assert inspect.iscoroutinefunction(getattr(aio.TCPStore, name)), name


def test_every_operation_does_what_pytorchs_does(port: int) -> None:
    stock = dist.TCPStore(HOST, port, timeout=LIMIT)
    prefixes = iter(["a", "b"])

    def operations(store: Any, prefix: str) -> list[Callable[[], Any]]:
        def key(name: str) -> str:
            return f"{prefix}/{name}"

        return [
            lambda: store.set(key("k"), "v"),
            lambda: store.set(key("bin"), b"\0\xff"),
            lambda: store.append(key("k"), bytearray(b"w")),
            lambda: store.get(key("k")),
            lambda: store.add(key("n"), 5),
            lambda: store.add(key("n"), -7),
            lambda: store.compare_set(key("k"), "vw", "x"),
            lambda: store.compare_set(key("none"), "y", "x"),
            lambda: store.check([key("k"), key("n")]),
            lambda: store.check({key("none")}),
            lambda: store.wait([key("k")]),
            lambda: store.wait((key("k"), key("n")), LIMIT),
            lambda: store.wait([key("none")], SHORT),
            lambda: store.wait([key("none")], 0.01),
            lambda: store.wait(key("k")),
            lambda: store.multi_set([key("a"), key("b")], ["1", "2"]),
            lambda: store.multi_set([key("a")], ["1", "2"]),
            lambda: store.multi_get([key("b"), key("a")]),
            lambda: store.multi_get([]),
            lambda: store.delete_key(key("a")),
            lambda: store.delete_key(key("a")),
            lambda: store.queue_push(key("q"), "1"),
            lambda: store.queue_push(key("q"), "2"),
            lambda: store.queue_len(key("q")),
            lambda: store.queue_pop(key("q")),
            lambda: store.queue_pop(key("q"), block=False),
            lambda: store.queue_pop(key("q"), False),
            lambda: store.barrier(key("alone"), 1),
            lambda: store.barrier(key("two"), 2, SHORT),
            lambda: store.barrier(key=key("more"), world_size=2, timeout=SHORT),
            lambda: store.set(key("k"), 1),
            lambda: store.add(key("n"), 1 << 63),
            store.num_keys,
        ]

    expected = [outcome(one) for one in operations(stock, next(prefixes))]
    stock.set_timeout(LIMIT)
    before = stock.num_keys()

    async def test(store: aio.TCPStore) -> list[Any]:
        found = []
        for one in operations(store, next(prefixes)):
            try:
                value = await one()
            except Exception as error:  # noqa: BLE001 - whatever comes is compared

                def again(error: Exception = error) -> None:
                    raise error

                found.append(outcome(again))
            else:
                found.append(value)
        assert sorted(await store.list_keys()) == sorted(stock.list_keys())
        return found

    found = connected(port, test)
    assert found[:-1] == expected[:-1]
    assert (expected[-1], found[-1]) == (before, 2 * before)


def test_many_operations_on_clones_at_once(port: int) -> None:
    async def test(store: aio.TCPStore) -> None:
        clones = await asyncio.gather(*(store.clone() for _ in range(50)))
        sums = await asyncio.gather(*(clone.add("n", 1) for clone in clones for _ in range(20)))
        assert sorted(sums) == list(range(1, 1001))
        waits = [asyncio.create_task(clone.get(f"key{at}")) for at, clone in enumerate(clones)]
        await asyncio.gather(*(store.set(f"key{at}", str(at)) for at in range(50)))
        assert await asyncio.gather(*waits) == [str(at).encode() for at in range(50)]
        barriers = [clone.barrier("all", len(clones)) for clone in clones]
        await asyncio.gather(*barriers)
        for clone in clones:
            clone.close()

    connected(port, test)


def test_operations_of_one_client_are_carried_out_in_the_order_of_the_calls(port: int) -> None:
    async def test(store: aio.TCPStore) -> None:
        for round_ in range(20):
            await asyncio.gather(*(store.append(f"k{round_}", f"{at},") for at in range(100)))
            assert (await store.get(f"k{round_}")).decode() == "".join(f"{at}," for at in range(100))

    connected(port, test)


def test_the_event_loop_goes_on_while_operations_wait(port: int) -> None:
    async def test(store: aio.TCPStore) -> None:
        waiting = asyncio.create_task(store.get("late"))
        longest, last = 0.0, time.monotonic()
        for _ in range(200):
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert not waiting.done()
        assert longest < 10  # a blocked loop would be stalled for the whole of LIMIT
        other = await store.clone()
        await other.set("late", "v")
        assert await waiting == b"v"

    connected(port, test)


@pytest.mark.parametrize("operation", ["get", "wait", "multi_get", "queue_pop", "barrier"])
def test_a_cancelled_wait_leaves_the_connection_in_step(port: int, operation: str) -> None:
    async def test(store: aio.TCPStore) -> None:
        def arguments(key: str) -> tuple[Any, ...]:
            return {"get": (key,), "queue_pop": (key,), "barrier": (key, 2)}.get(operation, ([key],))

        for pause in (0, 0.001, 0.05):
            waiting = asyncio.create_task(getattr(store, operation)(*arguments(f"none {pause}")))
            await asyncio.sleep(pause)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await store.add(f"after {pause}", 1) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(getattr(store, operation)(*arguments("none")), 0.05)
        await store.set("k", "v")
        assert await store.get("k") == b"v"

    connected(port, test)


def test_cancellation_at_any_moment_never_mixes_up_replies(port: int) -> None:
    async def test(store: aio.TCPStore) -> None:
        other = await store.clone()
        for at in range(200):
            key, value = f"k{at}", f"v{at}".encode()
            waiting = asyncio.create_task(store.get(key))
            setting = asyncio.create_task(other.set(key, value))
            for _ in range(at % 7):
                await asyncio.sleep(0)
            if at % 3 == 0:
                await asyncio.sleep(0.0002)
            waiting.cancel()
            await setting
            assert (await asyncio.gather(waiting, return_exceptions=True))[0] == value or waiting.cancelled()
            assert await store.get(key) == value

    connected(port, test)


def test_a_timeout_is_pytorchs_error_and_leaves_the_store_usable(port: int) -> None:
    async def test(store: aio.TCPStore) -> None:
        store.set_timeout(SHORT)
        assert store.timeout == SHORT
        for operation in (store.get("none"), store.multi_get(["none"]), store.queue_pop("none"), store.barrier("b", 2)):
            with pytest.raises(
                dist.DistStoreError, match=r"of `.*` timed out after .* \(timeout 300ms, store at"
            ) as caught:
                await operation
            assert isinstance(caught.value, TimeoutError)
        with pytest.raises(errors.StoreTimeoutError):
            await store.wait(["none"], timedelta(0))
        store.set_timeout(NEVER)
        waiting = asyncio.create_task(store.get("late"))
        await asyncio.sleep(0.05)
        async with await store.clone() as other:
            assert other.timeout == NEVER
            await other.set("late", "v")
        assert await waiting == b"v"

    connected(port, test)


def test_a_lost_server_is_one_error_that_names_it() -> None:
    server = _elastic_rs.StoreServer.listen(None, 0)

    async def test(store: aio.TCPStore) -> None:
        waiting = asyncio.create_task(store.get("never"))
        while server.waiting == 0:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.stop)
        for operation in (waiting, store.get("k"), store.set("k", "v")):
            with pytest.raises(
                dist.DistNetworkError, match=rf"connection to the store at 127\.0\.0\.1:{server.port} lost"
            ):
                await operation

    connected(server.port, test)


def test_connect_is_awaited_entered_or_made_a_task(port: int) -> None:
    async def run() -> None:
        async with aio.TCPStore.connect(HOST, port, timeout=60) as store:
            assert store.timeout == timedelta(seconds=60), "an int is seconds"
            await store.set("k", "v")
            await store.wait(["k"], 1)  # PyTorch takes a timedelta or a float alone
        with pytest.raises(errors.StoreNetworkError, match="closed"):
            await store.get("k")
        awaited = await aio.TCPStore.connect(HOST, port, 60.0)
        task = asyncio.create_task(aio.TCPStore.connect(HOST, port, LIMIT))
        [gathered] = await asyncio.gather(aio.TCPStore.connect(HOST, port))
        for other in (awaited, await task, gathered):
            async with other:
                assert await other.get("k") == b"v"

    asyncio.run(run(), debug=True)


def test_a_store_that_is_entered_and_not_there_raises_and_leaves_nothing(free_port: Callable[[], int]) -> None:
    async def run() -> None:
        port = free_port()
        with pytest.raises(errors.StoreNetworkError, match="no store reached") as caught:
            async with aio.TCPStore.connect(HOST, port, timeout=0.2):
                pytest.fail("there is no store")
        assert caught.value.endpoint == f"{HOST}:{port}"
        assert caught.value.elapsed is not None

    asyncio.run(run(), debug=True)


def test_connecting_ends_with_its_timeout_and_can_be_cancelled() -> None:
    async def test() -> None:
        with pytest.raises(dist.DistNetworkError, match=rf"no store reached at {HOST}:1 within"):
            await aio.TCPStore.connect(HOST, 1, 0.1)
        connecting = asyncio.create_task(aio.TCPStore.connect(HOST, 1))
        await asyncio.sleep(0.05)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    asyncio.run(test())


def test_a_closed_store_raises_and_frees_its_connection() -> None:
    server = _elastic_rs.StoreServer.listen(None, 0)

    async def test(store: aio.TCPStore) -> aio.TCPStore:
        await store.set("k", "v")
        under_way = asyncio.ensure_future(store.get("k"))
        await asyncio.sleep(0)
        store.close()
        assert await under_way == b"v"
        with pytest.raises(dist.DistNetworkError, match="this client was closed"):
            await store.get("k")
        return store

    store = connected(server.port, test)
    assert repr(store) == f"<elastic_rs.aio.TCPStore of {HOST}:{server.port}, closed>"
    until("the connection is closed", lambda: server.connections == 0)
    server.stop()


def test_a_call_without_an_event_loop_raises() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        _elastic_rs.AsyncStoreClient.connect(HOST, 1, timeout_s=1)


OPEN_AT_EXIT = """
import asyncio
from elastic_rs import _elastic_rs
server = _elastic_rs.StoreServer.listen(None, 0)
async def main():
    store = await _elastic_rs.AsyncStoreClient.connect("127.0.0.1", server.port, timeout_s=60)
    await store.set("k", "v")
    async def get(key):
        return await store.get(key)
    tasks = [asyncio.create_task(get(key)) for key in ("k", "never", "never", "k")]
    await asyncio.sleep(0)
asyncio.run(main())
"""


def test_an_exit_with_operations_under_way_is_clean() -> None:
    for _ in range(10):
        run = subprocess.run(
            [sys.executable, "-c", OPEN_AT_EXIT], capture_output=True, text=True, timeout=60, check=False
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
