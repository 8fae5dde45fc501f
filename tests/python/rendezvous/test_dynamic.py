"""``DynamicRendezvousHandler`` over backends: ours, PyTorch's store, and a user's class."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from elastic_rs import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    TCPStore,
    create_backend,
    create_handler,
)
from elastic_rs.errors import ElasticError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.elastic.rendezvous import RendezvousInfo

    Make = Callable[..., DynamicRendezvousHandler]

LIMIT_S = 60


class Cell(RendezvousBackend):
    """A user's backend: a state in memory, with numbers as tokens."""

    name = "cell"

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.version = 0
        self.lock = threading.Lock()
        self.fault: Exception | None = None
        self.calls = 0

    def get_state(self) -> tuple[bytes, Any] | None:
        with self.lock:
            self.calls += 1
            if self.fault is not None:
                raise self.fault
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        with self.lock:
            self.calls += 1
            if self.fault is not None:
                raise self.fault
            written = token == (None if self.state is None else self.version)
            if written:
                self.state, self.version = state, self.version + 1
            return None if self.state is None else (self.state, self.version, written)


@pytest.fixture(params=["cell", "c10d over ours", "c10d over PyTorch's"])
def backends(request: pytest.FixtureRequest) -> tuple[dist.Store, Callable[[], RendezvousBackend]]:
    theirs = request.param == "c10d over PyTorch's"
    store = (dist.TCPStore if theirs else TCPStore)("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))
    cell = Cell()
    return store, (lambda: cell) if request.param == "cell" else (lambda: C10dRendezvousBackend(store, "job"))


@pytest.fixture
def make(backends: tuple[dist.Store, Callable[[], RendezvousBackend]]) -> Iterator[Make]:
    made: list[DynamicRendezvousHandler] = []
    store, backend = backends

    def make(min_nodes: int, max_nodes: int, **given: Any) -> DynamicRendezvousHandler:
        timeout = RendezvousTimeout(join=timedelta(seconds=LIMIT_S), last_call=timedelta(seconds=0.5), **given)
        addr = f"127.0.0.{len(made) + 2}"
        made.append(DynamicRendezvousHandler.from_backend("job", store, backend(), min_nodes, max_nodes, addr, timeout))
        return made[-1]

    yield make
    for handler in made:
        handler._stop_heartbeats()


def join_all(*handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=LIMIT_S))


def until(holds: Callable[[], bool]) -> None:
    """Poll until a driver's thread has made a condition true."""
    pause = threading.Event()
    for _ in range(LIMIT_S * 50):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it does not come about")


def test_nodes_form_one_world_with_a_worker_store(make: Make) -> None:
    handlers = [make(3, 3) for _ in range(3)]
    infos = join_all(*handlers)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    bootstraps = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}  # type: ignore[union-attr, unused-ignore]
    ((addr, port),) = bootstraps
    assert dist.TCPStore(addr, port, is_master=False).num_keys() == 0
    infos[0].store.set("from", "one")
    assert infos[2].store.get("from") == b"one"
    assert isinstance(handlers[0], RendezvousHandler)
    assert not handlers[0].is_closed()


def test_a_new_node_joins_a_running_job_and_ranks_are_kept(make: Make) -> None:
    first = make(1, 2)
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0
    second = make(1, 2)
    with ThreadPoolExecutor() as pool:
        join = pool.submit(second.next_rendezvous)
        until(lambda: first.num_nodes_waiting() == 1)
        assert first.next_rendezvous().rank == 0
        assert join.result(LIMIT_S).rank == 1
    assert first.num_nodes_waiting() == 0


def test_a_closed_rendezvous_admits_nobody_and_ends_the_wait_of_spares(make: Make) -> None:
    handler, spare = make(1, 1), make(1, 1)
    handler.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        join = pool.submit(spare.next_rendezvous)
        until(lambda: "runs undisturbed" in (spare.session.progress or ""))
        assert handler.num_nodes_waiting() == 0, "a spare disturbs nobody"
        handler.set_closed()
        assert isinstance(join.exception(LIMIT_S), RendezvousGracefulExitError)
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="closed by"):
        make(1, 1).next_rendezvous()


def test_a_member_that_leaves_interrupts_the_others(make: Make) -> None:
    first, second = make(1, 2), make(1, 2)
    assert {info.world_size for info in join_all(first, second)} == {2}
    try:
        raise RuntimeError("a fault of this node alone")
    except RuntimeError:
        assert second.shutdown()
    until(lambda: first.num_nodes_waiting() == 1)
    assert first.next_rendezvous().world_size == 1


def cell_handler(cell: RendezvousBackend, min_nodes: int = 1, max_nodes: int = 1, **given: Any) -> Any:
    store = dist.HashStore()
    return DynamicRendezvousHandler.from_backend("job", store, cell, min_nodes, max_nodes, "127.0.0.1", **given)


def test_a_backend_is_not_called_before_the_first_request() -> None:
    cell = Cell()
    handler = cell_handler(cell)
    assert (handler.get_backend(), handler.get_run_id(), cell.calls) == ("cell", "job", 0)
    assert handler.settings.keep_alive_interval == timedelta(seconds=5)


def test_a_join_timeout_names_the_number_missing_and_leaves_no_trace_in_the_state() -> None:
    cell = Cell()
    handler = cell_handler(cell, 2, 2, timeout=RendezvousTimeout(join=timedelta(seconds=1)))
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 nodes have joined .*; 1 more needed") as caught:
        handler.next_rendezvous()
    assert isinstance(caught.value, ElasticError)
    assert b"127.0.0.1" not in (cell.state or b"127.0.0.1")


def test_the_error_names_a_state_of_pytorchs_handler() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

    cell = Cell()
    cell.state = before = pickle.dumps(_RendezvousState())
    handler = cell_handler(cell)
    with pytest.raises(RendezvousStateError, match="found a pickle of PyTorch's rendezvous"):
        handler.next_rendezvous()
    assert cell.state == before


def test_an_unreachable_backend_is_a_connection_error() -> None:
    cell = Cell()
    cell.fault = RendezvousConnectionError("nobody there")
    handler = cell_handler(cell, keep_alive_interval=1, keep_alive_max_attempt=1)
    with pytest.raises(RendezvousConnectionError, match="nobody there"):
        handler.is_closed()
    with pytest.raises(RendezvousConnectionError, match="nobody there"):
        handler.next_rendezvous()
    cell.fault = None
    assert handler.next_rendezvous().world_size == 1, "it is back"


def test_exceptions_of_a_backend_reach_the_caller() -> None:
    cell = Cell()
    cell.fault = KeyError("a fault of the backend's own")
    with pytest.raises(KeyError, match="a fault of the backend's own"):
        cell_handler(cell).next_rendezvous()


class Silent(Cell):
    """A backend whose ``set_state`` never returns the result of a write."""

    def set_state(self, state: bytes, token: Any | None = None) -> None:
        super().set_state(state, token)


class Forgetful(Silent):
    """A backend that does not keep the state."""

    def set_state(self, state: bytes, token: Any | None = None) -> None:
        super().set_state(state, token)
        self.state = None


def test_a_backend_that_does_not_return_the_result_of_a_write_is_read_again() -> None:
    cell = Silent()
    handlers = [cell_handler(cell, 2, 2, timeout=RendezvousTimeout(join=timedelta(seconds=LIMIT_S))) for _ in range(2)]
    assert sorted(info.rank for info in join_all(*handlers)) == [0, 1]
    handlers[0].set_closed()
    until(handlers[1].is_closed)
    for handler in handlers:
        handler._stop_heartbeats()


def test_a_backend_that_keeps_nothing_forms_no_world_and_is_named() -> None:
    """PyTorch's handler takes the answer None for a successful write, so each node would form a separate world."""
    handler = cell_handler(Forgetful(), timeout=RendezvousTimeout(join=timedelta(seconds=1)))
    with pytest.raises(RendezvousTimeoutError, match=r"the backend keeps nothing: .* [0-9]+ times in a row"):
        handler.next_rendezvous()


def test_a_node_that_cannot_renew_its_lease_stops_its_workers() -> None:
    cell = Cell()
    handler = cell_handler(cell, keep_alive_interval=1, keep_alive_max_attempt=1)
    handler.next_rendezvous()
    cell.fault = RendezvousConnectionError("cut off")
    until(lambda: handler.num_nodes_waiting() == 1)


def test_shutdown_of_a_rendezvous_that_cannot_be_closed_says_so() -> None:
    cell = Cell()
    handler = cell_handler(cell, timeout=RendezvousTimeout(close=timedelta(seconds=0.2)))
    cell.fault = RendezvousConnectionError("cut off")
    assert handler.shutdown() is False


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
def test_time_limits_must_be_positive(name: str) -> None:
    assert getattr(RendezvousTimeout(), name) > timedelta(0)
    with pytest.raises(ValueError, match=rf"^The {name} timeout \(0:00:00\) must be positive.$"):
        RendezvousTimeout(**{name: timedelta(0)})


@pytest.mark.parametrize(
    ("run_id", "low", "high", "text"),
    [
        ("", 1, 1, r"^The run id must be a non-empty string.$"),
        ("job", 0, 1, r"^The minimum number of nodes \(0\) must be greater than zero.$"),
        ("job", 3, 2, r"^The maximum number of nodes \(2\) must be greater than or equal to the minimum .*\(3\).$"),
    ],
)
def test_invalid_arguments_have_pytorchs_messages(run_id: str, low: int, high: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DynamicRendezvousHandler.from_backend(run_id, dist.HashStore(), Cell(), low, high)


def params(**config: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, "127.0.0.1", **config)


def test_create_handler_reads_the_configuration() -> None:
    given = {"join_timeout": "50", "last_call_timeout": "60", "close_timeout": "70", "keep_alive_interval": "2"}
    settings = create_handler(dist.HashStore(), Cell(), params(**given)).settings
    assert isinstance(settings, RendezvousSettings)
    assert settings.timeout.join == timedelta(seconds=50)
    assert settings.timeout.last_call == timedelta(seconds=60)
    assert settings.timeout.close == timedelta(seconds=70)
    assert settings.keep_alive_interval == timedelta(seconds=2)
    with pytest.raises(ValueError, match=r"cas_backoff_max_seconds\('x'\) is not a valid float value"):
        create_handler(dist.HashStore(), Cell(), params(cas_backoff_max_seconds="x"))
    with pytest.raises(ValueError, match=r"store_peers is `all`, must be `same-user` or `any`"):
        create_handler(dist.HashStore(), Cell(), params(store_peers="all"))
    handler = create_handler(dist.HashStore(), Cell(), params(store_peers="any"))
    assert handler._config.values()["store_peers"] == "any"


def test_a_tunnel_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = params(store_tunnel="1")
    monkeypatch.delenv("ELASTIC_RS_TOKEN_FILE", raising=False)
    with pytest.raises(ValueError, match=r"store_tunnel=1 needs a token"):
        create_handler(dist.HashStore(), Cell(), asked)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("4f" * 32)
    monkeypatch.setenv("ELASTIC_RS_TOKEN_FILE", str(token))
    assert create_handler(dist.HashStore(), Cell(), asked)._config.store_tunnel
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with pytest.raises(ValueError, match=r"needs a store that the agents serve"):
        create_handler(dist.HashStore(), Cell(), asked)


def test_a_token_file_means_a_tunnel_unless_store_tunnel_is_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def asked(**conf: str) -> bool | None:
        return create_handler(dist.HashStore(), Cell(), params(**conf))._config.store_tunnel

    monkeypatch.delenv("ELASTIC_RS_TOKEN_FILE", raising=False)
    assert asked() is False
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("4f" * 32)
    monkeypatch.setenv("ELASTIC_RS_TOKEN_FILE", str(token))
    assert asked() is True
    assert asked(store_tunnel="0") is False
    assert not caplog.records
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert asked(store_tunnel="no") is False
    assert not caplog.records
    assert asked() is False
    [record] = caplog.records
    assert "do not protect the workers' store" in record.getMessage()
    assert "store_tunnel=0" in record.getMessage()


def test_create_backend_hosts_a_store_and_a_handler_works_over_it() -> None:
    backend, store = create_backend(params(is_host="1"))
    assert backend.name == "c10d"
    handler = create_handler(store, backend, params())
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


def test_a_backend_keeps_pytorchs_key_and_contract() -> None:
    store = dist.HashStore()
    backend = C10dRendezvousBackend(store, "job")
    assert backend.get_state() is None
    state, token, written = backend.set_state(b"x") or (b"", b"", False)
    assert (state, written, store.get("torch.rendezvous.job")) == (b"x", True, b"eA==")
    assert (backend.set_state(b"y") or ())[2] is False  # type: ignore[misc]
    assert (backend.set_state(b"y", "not a token") or ())[0] == b"x"  # type: ignore[misc]
    assert (backend.set_state(b"y", token) or ())[2] is True  # type: ignore[misc]
    store.set("torch.rendezvous.job", "non_base64")
    with pytest.raises(RendezvousStateError, match="The state object is corrupt"):
        backend.get_state()


def test_a_process_with_a_driver_ends_at_once() -> None:
    script = """
import datetime, threading, torch.distributed as dist
from elastic_rs import DynamicRendezvousHandler, C10dRendezvousBackend, TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
def make(nodes, run_id):
    backend = C10dRendezvousBackend(store, run_id)
    return DynamicRendezvousHandler.from_backend(run_id, store, backend, nodes, nodes, "127.0.0.1")
one = make(1, "one")
one.next_rendezvous()
waits = make(2, "other")
threading.Thread(target=waits.next_rendezvous, daemon=True).start()
while waits.session.progress is None: pass
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr
