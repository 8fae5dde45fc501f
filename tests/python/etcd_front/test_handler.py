"""The handler of ``rust-etcd`` without an agent: several nodes in one process, over a real etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import EtcdClient, EtcdStore, RustEtcdRendezvousHandler, create_rust_etcd_handler
from helpers.handlers import assert_one_world, waiting
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousTimeoutError,
    etcd_store,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils import store as store_util

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

Make = Callable[..., RustEtcdRendezvousHandler]
LIMIT_S = 60


@pytest.fixture
def make(endpoint: str, name: str) -> Iterator[Make]:
    """Return a function that makes handlers of one job."""
    handlers: list[RustEtcdRendezvousHandler] = []

    def make(nodes: str = "1", *, run_id: str = name, **config: object) -> RustEtcdRendezvousHandler:
        low, _, high = nodes.partition(":")
        config = {"last_call_timeout": 1, "drain_timeout": 0} | config
        addr = f"127.0.0.{len(handlers) + 2}"
        params = RendezvousParameters("rust-etcd", endpoint, run_id, int(low), int(high or low), addr, **config)
        handlers.append(create_rust_etcd_handler(params))
        return handlers[-1]

    yield make
    for handler in handlers:
        handler.shutdown()


def join_all(*handlers: RustEtcdRendezvousHandler) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=LIMIT_S))


def test_torch_finds_the_backend_by_its_entry_point(endpoint: str, name: str) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("rust-etcd", endpoint, name, 1, 1, drain_timeout=0))
    assert isinstance(handler, RustEtcdRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id()) == ("rust-etcd", name)
    assert handler.shutdown(), "of a handler that was not used"


def test_all_nodes_get_one_world_and_a_common_store(make: Make) -> None:
    handlers = [make("3") for _ in range(3)]
    infos = join_all(*handlers)
    assert len(infos) == 3
    assert_one_world(infos)


def test_workers_share_an_empty_store_at_rank_0(make: Make) -> None:
    handler = make()
    for _ in range(2):
        bootstrap = handler.next_rendezvous().bootstrap_store_info
        assert bootstrap is not None
        assert bootstrap.master_addr == "127.0.0.2"
        store = dist.TCPStore(bootstrap.master_addr, bootstrap.master_port, is_master=False)
        assert store.num_keys() == 0
        store.set("left", "behind")


def test_members_are_notified_of_a_waiting_node(make: Make) -> None:
    first = make("1:2")
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0
    second = make("1:2")
    with ThreadPoolExecutor() as pool:
        join = pool.submit(second.next_rendezvous)
        assert waiting(first) == 1
        assert first.next_rendezvous().rank == 0
        assert join.result(LIMIT_S).rank == 1
    assert first.num_nodes_waiting() == 0


def test_a_closed_rendezvous_admits_nobody(make: Make) -> None:
    handler = make()
    handler.next_rendezvous()
    handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="closed by"):
        make().next_rendezvous()


def test_an_exception_under_way_at_shutdown_leaves_the_rendezvous_open(make: Make) -> None:
    first, second = make("1:2"), make("1:2")
    assert [info.world_size for info in join_all(first, second)] == [2, 2]
    try:
        raise RuntimeError("a fault of this node alone")
    except RuntimeError:
        second.shutdown()
    assert waiting(first) == 1
    assert first.next_rendezvous().world_size == 1


def test_a_join_timeout_names_the_nodes_that_joined_and_the_number_missing(make: Make) -> None:
    handler = make("3", join_timeout=2)
    expected = r"no round completed within .*: round 1: 1 of 3 nodes have joined \(127\.0\.0\.2 .*\); 2 more needed"
    with pytest.raises(RendezvousTimeoutError, match=expected):
        handler.next_rendezvous()


def test_two_jobs_share_an_etcd_without_mixing(make: Make, name: str) -> None:
    one, other = make(run_id=f"{name}/one"), make(run_id=f"{name}/one@store")
    assert one.next_rendezvous().world_size == 1
    assert other.next_rendezvous().world_size == 1
    one.set_closed()
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()
    assert not other.is_closed()


def test_an_unknown_key_and_one_of_the_other_backend_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="did you mean `join_timeout`"):
        make(join_timeuot=5)
    with pytest.raises(ValueError, match="is_host has no meaning with --rdzv-backend=rust-etcd"):
        make(is_host=1)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_pytorchs_names_take_the_keys_of_pytorchs_tests(
    endpoint: str, name: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    elastic_rs.install()
    try:
        handler = get_rendezvous_handler(RendezvousParameters(backend, endpoint, name, 1, 1, is_host=True))
        assert isinstance(handler, RustEtcdRendezvousHandler)
        assert handler.next_rendezvous().world_size == 1
        assert handler.shutdown()
    finally:
        elastic_rs.uninstall()
    assert [
        message
        for message in caplog.messages
        if message.endswith(f"--rdzv-backend={backend}, ignored as by PyTorch: is_host")
    ]


def test_the_agents_store_outlives_the_node_with_rank_0(make: Make) -> None:
    """PyTorch's agents wait for each other there at the end. rank 0 may be gone by then."""
    handlers = [make("3") for _ in range(3)]
    infos = {info.rank: (handler, info) for handler, info in zip(handlers, join_all(*handlers), strict=True)}
    handler, info = infos.pop(0)
    store_util._barrier_nonblocking(info.store, 3, "end")
    del info
    try:
        raise RuntimeError("its node is gone")
    except RuntimeError:
        handler.shutdown()
    with ThreadPoolExecutor() as pool:
        barriers = [pool.submit(store_util.barrier, info.store, 3, "end", LIMIT_S) for _, info in infos.values()]
        for barrier in barriers:
            barrier.result(LIMIT_S)


def test_the_agents_store_is_outside_of_what_nodes_watch(make: Make, client: EtcdClient, name: str) -> None:
    info = make().next_rendezvous()
    info.store.set("key", "1")
    prefix = "/torch/elastic/rendezvous"
    own = [key for key, _, _ in client.range(f"{prefix}/{name}/")]
    assert f"{prefix}/{name}/state".encode() in own
    assert not any(key.endswith(b"/key") for key in own)
    ((shared, value, _),) = client.range(f"{prefix}/{name}@store/")
    assert (shared.endswith(b"/key"), value) == (True, b"1")


def test_install_takes_over_the_names_and_classes_of_pytorchs_backends(endpoint: str, name: str) -> None:
    their_store = etcd_store.EtcdStore
    elastic_rs.install(store=False, agent=False)
    try:
        assert etcd_store.EtcdStore is EtcdStore
        for backend in ("etcd", "etcd-v2"):
            given: dict[str, Any] = {"read_timeout": "5"} if backend == "etcd-v2" else {"timeout": "60"}
            params = RendezvousParameters(backend, endpoint, f"{name}{backend}", 1, 1, **given)
            handler = get_rendezvous_handler(params)
            assert isinstance(handler, RustEtcdRendezvousHandler)
            assert handler.get_backend() == backend
            assert handler.next_rendezvous().world_size == 1
            assert handler.shutdown()
    finally:
        elastic_rs.uninstall()
    assert etcd_store.EtcdStore is their_store
