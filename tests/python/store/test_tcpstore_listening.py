"""The listening socket of a `TCPStore`'s server, and errors if it cannot listen, compared with PyTorch's."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs.errors import ElasticError
from helpers.stores import HOST, LIMIT, bound_socket, until

BOTH = pytest.mark.parametrize("kind", [dist.TCPStore, elastic_rs.TCPStore], ids=["torch", "elastic_rs"])
Kind = type[dist.TCPStore]


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port on which this process listens without answering."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


@BOTH
@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("given", ["its port", "port 0"])
def test_a_bound_socket_is_taken_over_and_closed_at_the_end(kind: Kind, listening: bool, given: str) -> None:
    listener, port = bound_socket()
    if listening:
        listener.listen()
    number = listener.detach()
    store = kind(HOST, port if given == "its port" else 0, is_master=True, master_listen_fd=number)
    assert store.port == port
    assert kind(HOST, port).add("n", 1) == 1
    os.fstat(number)
    del store

    def is_closed() -> bool:
        try:
            os.fstat(number)
        except OSError:
            return True
        return False

    until("closed", is_closed)


@pytest.mark.parametrize("use_libuv", [False, True])
def test_a_bound_socket_is_taken_over_whichever_server_is_asked_for(use_libuv: bool) -> None:
    # PyTorch's libuv server refuses it up to 2.7. We have only one server.
    listener, port = bound_socket()
    store = elastic_rs.TCPStore(
        HOST, port, is_master=True, master_listen_fd=listener.detach(), use_libuv=use_libuv, timeout=LIMIT
    )
    store.set("k", "v")
    assert (store.port, store.get("k")) == (port, b"v")


@BOTH
def test_a_socket_of_another_port_is_refused_and_stays_open(kind: Kind) -> None:
    listener, port = bound_socket()
    with listener:
        fd, other = listener.fileno(), port % 65535 + 1
        with pytest.raises(dist.DistStoreError) as caught:
            kind(HOST, other, is_master=True, master_listen_fd=fd)
        assert str(caught.value) == f"listen fd {fd} is bound to port {port}, expected to be bound to port {other}"
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize("what", ["pipe", "closed", "negative", "unix"])
def test_a_descriptor_that_cannot_listen_is_refused_in_pytorchs_words(what: str) -> None:
    pipe = os.pipe()
    unix = socket.socket(socket.AF_UNIX)
    number = {"pipe": pipe[0], "closed": 99_999, "negative": -1, "unix": unix.fileno()}[what]
    texts = []
    for kind in (dist.TCPStore, elastic_rs.TCPStore):
        with pytest.raises(dist.DistNetworkError) as caught:
            kind(HOST, 0, is_master=True, master_listen_fd=number)
        texts.append(str(caught.value))
    # libuv and the C library have different names and texts for one of the errors.
    assert texts[1].replace("EOPNOTSUPP", "ENOTSUP") in (texts[0], texts[0].removesuffix(" on socket"))
    for fd in pipe:
        os.close(fd)
    unix.close()


@BOTH
def test_a_client_ignores_the_listen_fd(kind: Kind) -> None:
    store = kind(HOST, 0, is_master=True)
    assert kind(HOST, store.port, master_listen_fd=99_999).num_keys() == 0


def test_a_taken_port_is_an_error_that_names_its_owner(taken: int) -> None:
    errors = []
    for kind in (dist.TCPStore, elastic_rs.TCPStore):
        with pytest.raises(dist.DistNetworkError) as caught:
            kind(HOST, taken, is_master=True)
        errors.append(caught.value)
    texts = [str(error) for error in errors]
    assert texts[1].startswith(texts[0])
    assert f"is already in use by pid {os.getpid()} (" in texts[1]
    assert isinstance(errors[1], ElasticError)


AGENTS_PORT = {"yes": True, "1": True, "T": True, "tRuE": True, "y": True}
NOT_AGENTS = {"no": False, "0": False, "F": False, "false": False, "n": False}
INVALID = {"": RuntimeError, "maybe": RuntimeError, "on": RuntimeError, "00": RuntimeError, " 1": RuntimeError}


@BOTH
@pytest.mark.parametrize(("value", "meaning"), {**AGENTS_PORT, **NOT_AGENTS, **INVALID}.items())
def test_a_taken_port_may_be_the_agents_store(
    kind: Kind, value: str, meaning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = dist.TCPStore(HOST, 0, is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    make: Callable[[], dist.TCPStore] = lambda: kind(HOST, agents.port, is_master=True, timeout=LIMIT)  # noqa: E731
    if meaning is RuntimeError:
        with pytest.raises(RuntimeError, match=r"^Invalid value .*: TORCHELASTIC_USE_AGENT_STORE$"):
            make()
    elif meaning:
        store = make()
        agents.set("k", "v")
        assert store.get("k") == b"v"
        assert "server=<nullptr>" in repr(store)
    else:
        with pytest.raises(dist.DistNetworkError, match="address already in use"):
            make()


@BOTH
@pytest.mark.parametrize(
    ("port", "error"),
    [("1", dist.DistNetworkError), ("", RuntimeError), ("x", RuntimeError), (None, dist.DistNetworkError)],
)
def test_another_taken_port_is_not_the_agents_store(
    kind: Kind, port: str | None, error: type[Exception], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if port is None:
        monkeypatch.delenv("MASTER_PORT", raising=False)
    else:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(error, match="address already in use" if error is dist.DistNetworkError else "MASTER_PORT"):
        kind(HOST, taken, is_master=True)


@BOTH
def test_the_agents_environment_is_not_looked_at_while_the_port_is_free(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "maybe")
    assert "server=TCPServer" in repr(kind(HOST, 0, is_master=True))
