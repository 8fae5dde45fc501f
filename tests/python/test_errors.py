"""The exceptions: one root, PyTorch's and builtin classes beside it, attributes, and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import ElasticError, EtcdClient, EtcdOptions, elastic, errors
from elastic_rs._elastic_rs import NodeOptions, RendezvousConfig, Session, StoreClient
from elastic_rs.elastic._membership import Membership
from helpers.elastic import FakeChannel, World
from torch.distributed.elastic.rendezvous import api

NAMES = [name for name in errors.__all__ if name != "ElasticError"]
WITH_ATTRIBUTES = {"endpoint": "node0:29400", "elapsed": 2.5, "round": 3, "rank": 4}


@pytest.mark.parametrize("name", NAMES)
def test_every_exception_has_the_root_and_its_attributes(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, ElasticError)
    assert kind.__module__ == "elastic_rs.errors"
    plain = kind("text")
    assert str(plain) == "text"
    assert [getattr(plain, attribute) for attribute in WITH_ATTRIBUTES] == [None] * 4


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_survives_pickling_with_its_attributes(name: str) -> None:
    kind = getattr(errors, name)
    given = {"round": 3} if kind is errors.HostsUpdatedInterrupt else WITH_ATTRIBUTES
    error = kind("what happened", **given)
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(made) is kind
        assert (str(made), made.args) == ("what happened", ("what happened",))
        assert vars(made) == vars(error)
    assert {name: getattr(error, name) for name in given} == given


def test_pickled_interrupts_keep_what_changes() -> None:
    error = errors.HostsUpdatedInterrupt("node1 joins", elastic.HostUpdateResult.added, round=2)
    made = pickle.loads(pickle.dumps(error))
    assert (made.flags, made.skip_sync, made.round) == (elastic.HostUpdateResult.added, False, 2)
    assert elastic.HostsUpdatedInterrupt(True).skip_sync is True, "as Horovod's"


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("RendezvousTimeoutError", [api.RendezvousTimeoutError, api.RendezvousError]),
        ("RendezvousClosedError", [api.RendezvousClosedError, api.RendezvousError]),
        ("RendezvousConnectionError", [api.RendezvousConnectionError, api.RendezvousError]),
        ("RendezvousStateError", [api.RendezvousStateError, api.RendezvousError]),
        ("RendezvousGracefulExitError", [api.RendezvousGracefulExitError]),
        ("StoreTimeoutError", [dist.DistStoreError, TimeoutError]),
        ("StoreLookupError", [dist.DistStoreError, LookupError]),
        ("StoreNetworkError", [dist.DistNetworkError]),
        ("StoreQueueEmptyError", [dist.DistStoreError]),
        ("EtcdError", [OSError]),
        ("EtcdConnectionError", [ConnectionError, errors.EtcdError]),
        ("EtcdPermissionError", [PermissionError, errors.EtcdError]),
        ("EtcdLeaseError", [LookupError, errors.EtcdError]),
        ("PeerFailed", [RuntimeError]),
        ("HostsUpdatedInterrupt", [RuntimeError]),
        ("TensorMismatchError", [RuntimeError]),
        ("StateMismatchError", [ValueError]),
        ("DiscoveryError", [RuntimeError]),
    ],
)
def test_except_clauses_written_without_this_package_work(name: str, also: list[type[Exception]]) -> None:
    for kind in also:
        with pytest.raises(kind, match="text"):
            raise getattr(errors, name)("text")


def test_the_names_in_other_modules_are_the_same_classes() -> None:
    assert elastic_rs.ElasticError is errors.ElasticError
    assert elastic.PeerFailed is errors.PeerFailed is elastic.HorovodInternalError
    assert elastic.HostsUpdatedInterrupt is errors.HostsUpdatedInterrupt
    assert elastic_rs.discovery.DiscoveryError is errors.DiscoveryError


def test_a_store_that_is_not_there_is_named_with_the_time(port: int) -> None:
    with pytest.raises(ElasticError, match="no store reached") as caught:
        StoreClient("127.0.0.1", port, timeout_s=0.2)
    assert isinstance(caught.value, errors.StoreNetworkError)
    assert caught.value.endpoint == f"127.0.0.1:{port}"
    assert caught.value.elapsed is not None
    assert 0.2 <= caught.value.elapsed < 60


def test_a_wait_that_times_out_names_the_store_and_the_time() -> None:
    store = elastic_rs.TCPStore("127.0.0.1", 0, is_master=True)
    client = StoreClient("127.0.0.1", store.port)
    with pytest.raises(errors.StoreTimeoutError) as caught:
        client.wait(["missing"], 0.1)
    assert caught.value.endpoint == f"127.0.0.1:{store.port}"
    assert caught.value.elapsed is not None
    assert caught.value.elapsed >= 0.1
    assert (caught.value.round, caught.value.rank) == (None, None)


def test_a_coordinator_that_is_not_there_is_named_with_the_time(port: int) -> None:
    options = NodeOptions(
        run_id="job",
        name="node",
        local_addr="127.0.0.1",
        nodes=(1, 1),
        config=RendezvousConfig(join_timeout=0.3),
        max_restarts=0,
        ranks_as_asked=False,
        use_agent_store=False,
    )
    session = Session([("127.0.0.1", port)], options)
    with pytest.raises(errors.RendezvousConnectionError) as caught:
        session.join()
    assert caught.value.endpoint == f"127.0.0.1:{port}"
    assert caught.value.elapsed is not None
    assert caught.value.elapsed >= 0.3
    session.leave("the test is over")


def test_etcd_out_of_reach_is_a_connection_error_of_ours(port: int) -> None:
    client = EtcdClient(EtcdOptions(f"127.0.0.1:{port}", read_timeout_s=0.3))
    with pytest.raises(ConnectionError, match="127") as caught:
        client.get("key")
    assert type(caught.value) is errors.EtcdConnectionError
    assert caught.value.elapsed is not None


@pytest.mark.parametrize("look", ["check", "raise_if_failed"])
def test_a_failed_peer_is_named_by_rank_and_round(look: str) -> None:
    member = membership(failed=True, reason="rank 5 failed", failed_rank=5)
    with pytest.raises(elastic.PeerFailed, match="rank 5 failed") as caught:
        getattr(member, look)()
    assert (caught.value.rank, caught.value.round) == (5, 7)


def test_a_change_of_the_world_names_its_round() -> None:
    with pytest.raises(elastic.HostsUpdatedInterrupt) as caught:
        membership(changes_at=1).check()
    assert (caught.value.flags, caught.value.rank, caught.value.round) == (elastic.HostUpdateResult.added, None, 7)


def membership(**news: Any) -> Membership:
    """Return the membership of a worker in round 7, whose agent has these news."""
    member: Any = Membership()
    member._world = World(generation=7)
    member.channel = FakeChannel([member._world], **news)
    return cast("Membership", member)
