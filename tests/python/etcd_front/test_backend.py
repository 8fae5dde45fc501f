"""``EtcdRendezvousBackend`` over a real etcd, under PyTorch's handler and under ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import elastic_rs
import pytest
from elastic_rs import EtcdClient, EtcdOptions, EtcdRendezvousBackend, EtcdStore
from elastic_rs.rendezvous import etcd_rendezvous_backend
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    dynamic_rendezvous,
)

LIMIT_S = 60


@pytest.fixture
def backend(client: EtcdClient, name: str) -> EtcdRendezvousBackend:
    return EtcdRendezvousBackend(client, name, "/test")


def test_a_state_is_written_only_over_the_one_that_is_known(backend: EtcdRendezvousBackend) -> None:
    assert backend.name == "etcd-v2"
    assert backend.get_state() is None
    first = backend.set_state(b"\x00first")
    assert first is not None
    state, token, written = first
    assert (state, written) == (b"\x00first", True)
    assert backend.get_state() == (b"\x00first", token)
    assert backend.set_state(b"other") == (b"\x00first", token, False), "there is a state already"
    second = backend.set_state(b"second", token)
    assert second is not None
    assert (second[0], second[2]) == (b"second", True)
    assert second[1] != token
    assert backend.set_state(b"third", token) == (b"second", second[1], False), "the token is fenced"
    assert backend.get_state() == (b"second", second[1])


@pytest.mark.parametrize("token", ["no number", b"x", object()])
def test_a_strange_token_writes_nothing(backend: EtcdRendezvousBackend, token: Any) -> None:
    assert backend.set_state(b"state", token) is None
    first = backend.set_state(b"state")
    assert backend.set_state(b"other", token) == (*first[:2], False)  # type: ignore[index]


def test_a_token_may_come_back_as_a_text(backend: EtcdRendezvousBackend) -> None:
    first = backend.set_state(b"first")
    assert first is not None
    second = backend.set_state(b"second", str(first[1]))
    assert second is not None
    assert second[2]


def test_a_token_of_a_deleted_state_writes_nothing(client: EtcdClient, name: str) -> None:
    backend = EtcdRendezvousBackend(client, name)
    first = backend.set_state(b"first")
    assert first is not None
    assert client.delete(name), "without a prefix the key is the run id"
    assert backend.set_state(b"second", first[1]) is None


def test_a_state_lives_for_its_time(client: EtcdClient, name: str) -> None:
    backend = EtcdRendezvousBackend(client, name, ttl=1)
    backend.set_state(b"state")
    pause = threading.Event()
    for _ in range(400):
        if backend.get_state() is None:
            break
        pause.wait(0.05)
    else:
        raise AssertionError("the state does not end")
    assert EtcdRendezvousBackend(client, name, ttl=0)._leases._ttl == 7200


def test_what_cannot_be_a_backend_is_refused(client: EtcdClient) -> None:
    with pytest.raises(ValueError, match="non-empty"):
        EtcdRendezvousBackend(client, "")
    with pytest.raises(TypeError, match=r"must be an elastic_rs\.EtcdClient"):
        EtcdRendezvousBackend(object(), "job")  # type: ignore[arg-type]


def test_an_unreachable_etcd_is_pytorchs_exception() -> None:
    backend = EtcdRendezvousBackend(EtcdClient(EtcdOptions("127.0.0.1:1", read_timeout_s=0.5)), "job")
    for call in (backend.get_state, lambda: backend.set_state(b"state")):
        with pytest.raises(RendezvousConnectionError, match="connection to etcd has failed") as caught:
            call()
        assert "127.0.0.1:1" in str(caught.value.__cause__)
    # PyTorch's connects when it is made.
    params = RendezvousParameters("etcd-v2", "127.0.0.1:1", "job", 1, 1, read_timeout="1")
    with pytest.raises(RendezvousConnectionError, match=r"^The connection to etcd has failed\. See inner exception"):
        etcd_rendezvous_backend.create_backend(params)


def test_a_backend_is_made_of_torchruns_parameters(endpoint: str, name: str) -> None:
    params = RendezvousParameters("etcd-v2", endpoint, name, 1, 1, read_timeout="7", protocol="HTTP")
    backend, store = etcd_rendezvous_backend.create_backend(params)
    assert isinstance(store, EtcdStore)
    assert backend.set_state(b"state")
    assert store.client.get(f"/torch/elastic/rendezvous/{name}")[0] == b"state"
    assert store.client.options.read_timeout_s == 7
    assert store.prefix == "/torch/elastic/store/"
    for key, value, text in (("read_timeout", "0", "positive integer"), ("protocol", "ftp", "HTTP or HTTPS")):
        with pytest.raises(ValueError, match=text):
            etcd_rendezvous_backend.create_backend(
                RendezvousParameters("etcd-v2", endpoint, name, 1, 1, **{key: value})
            )


@pytest.fixture(params=["PyTorch's handler", "our handler"])
def handlers(request: pytest.FixtureRequest, client: EtcdClient, name: str) -> Iterator[list[Any]]:
    """Yield two nodes of a job, each with a backend of its own."""
    classes: Any = dynamic_rendezvous if request.param == "PyTorch's handler" else elastic_rs
    timeout = classes.RendezvousTimeout(join=timedelta(seconds=LIMIT_S), last_call=timedelta(seconds=1))
    made = [
        classes.DynamicRendezvousHandler.from_backend(
            name,
            EtcdStore(client, f"/test/{name}/store", timedelta(seconds=LIMIT_S)),
            EtcdRendezvousBackend(client, name, "/test"),
            2,
            2,
            local_addr=f"127.0.0.{number}",
            timeout=timeout,
        )
        for number in (2, 3)
    ]
    yield made
    for handler in made:
        handler._stop_heartbeats()


def test_nodes_meet_over_it(handlers: list[Any]) -> None:
    with ThreadPoolExecutor() as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=LIMIT_S))
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    infos[0].store.set("from", "one")
    assert infos[1].store.get("from") == b"one"
    assert handlers[0].get_backend() == "etcd-v2"
    handlers[0].set_closed()
    with pytest.raises(RendezvousClosedError):
        handlers[1].next_rendezvous()
