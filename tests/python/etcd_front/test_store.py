"""``EtcdStore`` over a real etcd: from Python, from C++, and with PyTorch's own helpers."""

from __future__ import annotations

import inspect
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from elastic_rs import EtcdClient, EtcdOptions, EtcdStore
from elastic_rs.errors import ElasticError, StoreLookupError, StoreNetworkError
from torch.distributed.elastic.rendezvous import etcd_store as theirs
from torch.distributed.elastic.utils import store as store_util

LIMIT = timedelta(seconds=60)
SOON = timedelta(milliseconds=200)


@pytest.fixture
def store(client: EtcdClient, name: str) -> EtcdStore:
    return EtcdStore(client, f"/test/{name}", LIMIT)


@pytest.fixture(params=["direct", "through C++"])
def either(request: pytest.FixtureRequest, store: EtcdStore) -> Any:
    """Return the store itself, or one of C++'s around it."""
    return store if request.param == "direct" else dist.PrefixStore("inner", store)


def test_it_is_a_store_with_the_methods_of_pytorchs(store: EtcdStore) -> None:
    assert EtcdStore.__mro__[1] is dist.Store, "C++ calls the methods of no other subclass"
    for name, method in inspect.getmembers(theirs.EtcdStore, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            expected = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(EtcdStore, name)).parameters)[: len(expected)] == expected, name
    assert store.prefix.endswith("/")
    assert store.timeout == LIMIT  # type: ignore[attr-defined, unused-ignore]
    assert EtcdStore(store.client, "/x/").prefix == "/x/"
    assert EtcdStore(store.client, "/x/").timeout == timedelta(seconds=300)  # type: ignore[attr-defined, unused-ignore]


def test_values_are_bytes(either: Any, store: EtcdStore) -> None:
    either.set("key", b"\x00\xff\n")
    assert either.get("key") == b"\x00\xff\n"
    either.set("key", "text")
    assert either.get("key") == b"text"
    either.set("empty", "")
    assert either.get("empty") == b""
    stored = {key: value for key, value, _ in store.client.range(store.prefix)}
    assert b"text" in stored.values(), "etcdctl shows them as they are"


def test_numbers_are_decimal_digits(either: Any) -> None:
    assert [either.add("n", 5), either.add("n", -7), either.add("n", 0)] == [5, -2, -2]
    assert either.get("n") == b"-2"
    either.set("n", "40")
    assert either.add("n", 2) == 42


def test_additions_of_many_are_all_counted(store: EtcdStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda _: store.add("n", 1), range(80)))
    assert sorted(sums) == list(range(1, 81))


def test_get_waits_for_the_key(either: Any) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(either.get, "later")
        assert not either.check(["later"])
        either.set("other", "x")
        either.set("later", "now")
        assert waiting.result(60) == b"now"


def test_a_key_that_does_not_appear_is_a_lookup_error_and_a_store_error(either: Any, store: EtcdStore) -> None:
    either.set_timeout(SOON)
    for operation in (lambda: either.get("missing"), lambda: either.wait(["missing"])):
        with pytest.raises(LookupError) as caught:
            operation()
        for kind in (StoreLookupError, dist.DistStoreError, TimeoutError, ElasticError):
            assert isinstance(caught.value, kind)
        text = str(caught.value)
        assert "missing" in text
        assert store.client.options.endpoints in text
        assert "within 0.2 s" in text
    with pytest.raises(dist.DistStoreError):
        either.wait(["missing"], timedelta(milliseconds=1))


def test_wait_and_check(either: Any) -> None:
    either.set("a", "1")
    assert either.check(["a"])
    assert not either.check(["a", "ab"])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(either.wait, ["a", "ab", "abc"])
        either.set("abc", "1")
        either.set("ab", "1")
        waiting.result(60)
    assert either.check(["a", "ab", "abc"])
    either.wait(["a"], LIMIT)
    either.wait(["a", "ab", "abc"], timedelta(milliseconds=1))
    with pytest.raises(LookupError, match=r"`[^`]*zz` did not appear") as caught:
        either.wait(["a", "zz", "ab"], SOON)
    assert "ab`" not in str(caught.value), "which is there"


def test_compare_set_is_as_in_pytorchs_stores(either: Any) -> None:
    reference = dist.HashStore()
    for key, expected, desired in (
        ("none", "x", "y"),
        ("new", "", "first"),
        ("new", "", "second"),
        ("new", "wrong", "second"),
        ("new", "first", "second"),
    ):
        answers = [store.compare_set(key, expected, desired) for store in (either, reference)]
        assert answers[0] == answers[1], (key, expected, desired)
        assert either.check([key]) == reference.check([key])


def test_keys_can_be_listed_and_deleted(either: Any, store: EtcdStore) -> None:
    for key in ("a", "b/c", "ä"):
        either.set(key, key)
    assert either.num_keys() == 3
    assert either.delete_key("b/c")
    assert not either.delete_key("b/c")
    assert either.num_keys() == 2
    listed = store.list_keys()
    assert sorted(key.removeprefix("inner/") for key in listed) == ["a", "ä"]


def test_append_and_several_keys_at_once(either: Any) -> None:
    assert either.has_extended_api()
    either.append("log", "one")
    either.append("log", b" two")
    assert either.get("log") == b"one two"
    either.multi_set(["x1", "x2"], ["1", "\xfc"])
    assert either.multi_get(["x2", "x1", "x2"]) == ["\xfc".encode(), b"1", "\xfc".encode()]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(either.multi_get, ["x1", "x3"])
        either.set("x3", "3")
        assert waiting.result(60) == [b"1", b"3"]


def test_stores_with_other_prefixes_are_other_stores(client: EtcdClient, store: EtcdStore, name: str) -> None:
    other = EtcdStore(client, f"/test/{name}2")
    store.set("key", "1")
    assert not other.check(["key"])
    assert (store.num_keys(), other.num_keys()) == (1, 0)
    assert EtcdStore(client, f"/test/{name}/").get("key") == b"1"


def test_a_clone_is_the_same_store(store: EtcdStore) -> None:
    clone = store.clone()
    store.set("key", "1")
    assert clone.get("key") == b"1"
    assert (clone.prefix, clone.timeout) == (store.prefix, store.timeout)  # type: ignore[attr-defined, unused-ignore]


def test_pytorchs_barrier_and_exchange(store: EtcdStore) -> None:
    rounds = [dist.PrefixStore("round", store) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        output = [
            pool.submit(store_util.synchronize, own, f"data {rank}".encode(), rank, 3, "role/", 60)
            for rank, own in enumerate(rounds)
        ]
        assert [one.result(60) for one in output] == [[b"data 0", b"data 1", b"data 2"]] * 3
        barriers = [pool.submit(store_util.barrier, own, 3, "end", 60) for own in rounds]
        for barrier in barriers:
            barrier.result(60)
    with pytest.raises(dist.DistStoreError):
        store_util.barrier(rounds[0], 2, "alone", 0.2)


def test_a_process_group_meets_over_it(store: EtcdStore) -> None:
    group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), 0, 1, LIMIT)
    group.barrier().wait()  # type: ignore[attr-defined, unused-ignore]


def test_keys_may_live_for_a_time(client: EtcdClient, name: str) -> None:
    store = EtcdStore(client, f"/test/{name}", LIMIT, ttl=1)
    store.set("key", "1")
    assert store.add("n", 1) == 1
    began = time.monotonic()
    _until(lambda: not store.check(["key"]), 20)
    assert time.monotonic() - began >= 1
    store.set("key", "again")
    assert store.get("key") == b"again"


def test_a_lease_that_somebody_revoked_is_replaced(client: EtcdClient, name: str) -> None:
    store = EtcdStore(client, f"/test/{name}", LIMIT, ttl=600)
    store.set("key", "1")
    assert store._leases is not None
    client.lease_revoke(store._leases._lease)
    assert not store.check(["key"])
    store.set("key", "2")
    assert store.compare_set("key", "2", "3") == b"3"


def test_another_packages_client_is_refused() -> None:
    with pytest.raises(TypeError, match=r"is a builtins\.object, must be an elastic_rs\.EtcdClient"):
        EtcdStore(object(), "/test")  # type: ignore[arg-type]


def test_an_unreachable_etcd_is_named_with_the_operation(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = EtcdStore(EtcdClient(EtcdOptions(f"127.0.0.1:{port}", read_timeout_s=0.5)), name, SOON)
    operations: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("key", "1"),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("key", 1),
        "wait": lambda: store.wait(["key"]),
        "check": lambda: store.check(["key"]),
    }
    for operation, call in operations.items():
        with pytest.raises(StoreNetworkError, match=f"{operation} of `key` failed: .*127.0.0.1:{port}"):
            call()


def test_a_signal_ends_a_wait(store: EtcdStore) -> None:
    class EndedError(Exception):
        pass

    def handler(_: int, __: FrameType | None) -> None:
        raise EndedError

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1])
    try:
        timer.start()
        with pytest.raises(EndedError):
            store.get("never")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    store.set("still", "usable")


def _until(holds: Callable[[], bool], limit_s: float) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        pause.wait(0.05)
