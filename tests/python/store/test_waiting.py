"""Waits that another client releases, in every pairing. A wait blocks neither other clients nor the interpreter."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.stores import HOST, LIMIT, PAIRS, client_of, until

RELEASES: dict[str, Callable[[Any], Any]] = {
    "set": lambda s: s.set("k", "x"),
    "an_empty_set": lambda s: s.set("k", ""),
    "add": lambda s: s.add("k", 1),
    "append": lambda s: s.append("k", "x"),
    "multi_set": lambda s: s.multi_set(["other", "k"], ["1", "2"]),
    "compare_set": lambda s: s.compare_set("k", "", "x"),
    "a_complete_barrier": lambda s: s.barrier("k", 1),
    "queue_push": lambda s: s.queue_push("k", "x"),
}
# In PyTorch's legacy server compare_set releases no waiter, and there are no queues.
NOT_LEGACY = {"compare_set", "queue_push"}


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize(("client", "server"), PAIRS, ids=lambda kind: kind)
def test_a_wait_is_released_by(how: str, client: str, server: str, served: Callable[[str], int]) -> None:
    if server == "legacy" and how in NOT_LEGACY:
        pytest.skip("not in PyTorch's legacy server")
    port = served(server)
    waiter, other = client_of(client, port), client_of(client, port)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(waiter.wait, ["k"], LIMIT)
        # The order of the wait and its release must not matter, and both orders occur.
        RELEASES[how](other)
        assert waiting.result() is None
    assert waiter.check(["k"])


@pytest.mark.parametrize(("client", "server"), PAIRS, ids=lambda kind: kind)
def test_get_and_barrier_wait_for_others(client: str, server: str, served: Callable[[str], int]) -> None:
    port = served(server)
    stores = [client_of(client, port) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        got = threads.submit(stores[0].get, "late")
        met = [threads.submit(store.barrier, "all", 2, LIMIT) for store in stores[1:]]
        assert [future.result() for future in met] == [None, None]
        stores[1].set("late", "value")
        assert got.result() == b"value"


def waiting(server: _elastic_rs.StoreServer, count: int) -> None:
    until(f"{count} waiting", lambda: server.waiting == count)


def test_a_wait_for_several_keys_ends_with_the_last(server: _elastic_rs.StoreServer, stock: dist.TCPStore) -> None:
    other = client_of("stock", server.port)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(stock.wait, ["a", "b", "c"], LIMIT)
        waiting(server, 1)
        for key in ("c", "a"):
            other.set(key, "1")
        assert other.num_keys() == 2  # both have been carried out
        assert server.waiting == 1
        other.set("b", "1")
        assert future.result() is None
    assert server.waiting == 0


@pytest.mark.parametrize("kind", ["stock", "elastic_rs", "core"])
def test_waiting_releases_the_interpreter(kind: str, server: _elastic_rs.StoreServer) -> None:
    waiter, other = client_of(kind, server.port), client_of(kind, server.port)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(waiter.get, "k")
        waiting(server, 1)  # this thread runs meanwhile
        other.set("k", "released")
        assert future.result() == b"released"


def test_a_queue_item_releases_one_of_its_waiters(server: _elastic_rs.StoreServer) -> None:
    stores = [client_of("stock", server.port) for _ in range(4)]
    with ThreadPoolExecutor(3) as threads:
        popped = [threads.submit(store.queue_pop, "q") for store in stores[:3]]
        waiting(server, 3)
        for left in (2, 1, 0):
            stores[3].queue_push("q", f"item {left}")
            waiting(server, left)
        assert sorted(future.result() for future in popped) == [b"item 0", b"item 1", b"item 2"]


@pytest.mark.parametrize("kind", ["stock", "elastic_rs", "core"])
def test_many_threads_on_clones_count_together(kind: str, server: _elastic_rs.StoreServer) -> None:
    threads_count, rounds = 16, 200
    first = client_of(kind, server.port)
    clones = [first.clone() for _ in range(threads_count)]
    start = threading.Barrier(threads_count)

    def work(at: int) -> list[int]:
        store = clones[at]
        start.wait()
        sums = []
        for round_ in range(rounds):
            store.set(f"{at}/{round_}", str(round_))
            sums.append(store.add("sum", 1))
        store.wait([f"{(at + 1) % threads_count}/{rounds - 1}"], LIMIT)
        return sums

    with ThreadPoolExecutor(threads_count) as threads:
        sums = [number for one in threads.map(work, range(threads_count)) for number in one]
    assert sorted(sums) == list(range(1, threads_count * rounds + 1))
    assert first.num_keys() == threads_count * rounds + 1


def test_threads_on_one_client_take_turns(server: _elastic_rs.StoreServer) -> None:
    store = _elastic_rs.StoreClient(HOST, server.port)
    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(lambda _: store.add("n", 1), range(400)))
    assert sorted(sums) == list(range(1, 401))
