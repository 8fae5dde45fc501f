"""The handler of ``rust-c10d`` without an agent: several nodes in one process."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist
from elastic_rs import RustC10dRendezvousHandler, _elastic_rs, create_rust_c10d_handler
from elastic_rs.errors import ElasticError
from helpers.handlers import assert_one_world, waiting
from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

Make = Callable[..., RustC10dRendezvousHandler]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes handlers of one job. They are shut down at the end, the host's handler last."""
    handlers: list[RustC10dRendezvousHandler] = []

    def make(
        nodes: str = "1", *, endpoint: str | None = None, run_id: str = "job", **config: object
    ) -> RustC10dRendezvousHandler:
        low, _, high = nodes.partition(":")
        if endpoint is None:
            host, port = handlers[0]._endpoints[0] if handlers else ("127.0.0.1", 0)
            endpoint = f"{host}:{port}"
        config = {"last_call_timeout": 1, "drain_timeout": 0} | config
        number = len(handlers) + 2
        params = RendezvousParameters(
            "rust-c10d", endpoint, run_id, int(low), int(high or low), f"127.0.0.{number}", **config
        )
        handlers.append(create_rust_c10d_handler(params))
        return handlers[-1]

    yield make
    for handler in reversed(handlers):
        handler.shutdown()


@contextlib.contextmanager
def together(*handlers: RustC10dRendezvousHandler) -> Iterator[list[Future[RendezvousInfo]]]:
    """Let all handlers join at the same time."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        yield [pool.submit(handler.next_rendezvous) for handler in handlers]


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    # Importing torch.distributed.elastic.rendezvous has registered the plug-ins of installed packages.
    handler = get_rendezvous_handler(RendezvousParameters("rust-c10d", "127.0.0.1:0", "job", 1, 1, drain_timeout=0))
    assert isinstance(handler, RustC10dRendezvousHandler)
    assert isinstance(handler, RendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id()) == ("rust-c10d", "job")
    handler.shutdown()


def test_all_nodes_get_one_world_and_a_common_store(make: Make) -> None:
    handlers = [make("3") for _ in range(3)]
    with together(*handlers) as joins:
        infos = [join.result() for join in joins]
    assert len(infos) == 3
    assert_one_world(infos)


def test_the_worker_store_listens_after_the_join_and_is_empty(make: Make) -> None:
    handler = make()
    for _ in range(2):
        bootstrap = handler.next_rendezvous().bootstrap_store_info
        assert bootstrap is not None
        store = dist.TCPStore(bootstrap.master_addr, bootstrap.master_port, is_master=False)
        assert store.num_keys() == 0
        store.set("left", "behind")


def test_without_sharing_the_port_is_free_for_rank_0(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = make()
    assert not handler.use_agent_store
    bootstrap = handler.next_rendezvous().bootstrap_store_info
    assert bootstrap is not None
    dist.TCPStore(bootstrap.master_addr, bootstrap.master_port, is_master=True)


@pytest.mark.parametrize(("agent", "bounded"), [("rust", True), ("torch", False)])
def test_the_endpoints_store_is_bounded_where_nothing_uses_it(make: Make, agent: str, *, bounded: bool) -> None:
    client = _elastic_rs.StoreClient(*make(agent=agent)._endpoints[0])
    client.set("small", b"v")
    refused = pytest.raises(RuntimeError, match=r"closed|reset|lost") if bounded else contextlib.nullcontext()
    with refused:
        client.set("large", bytes(2 << 20))
        client.get("large")


def test_members_are_notified_of_a_waiting_node_by_a_push(make: Make) -> None:
    first = make("1:2")
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0
    second = make("1:2")
    with together(second) as (join,):
        assert waiting(first) == 1
        assert first.next_rendezvous().rank == 0
        assert join.result().rank == 1
    assert first.num_nodes_waiting() == 0


def test_a_closed_rendezvous_admits_nobody(make: Make) -> None:
    handler = make()
    handler.next_rendezvous()
    handler.set_closed()
    assert handler.is_closed()
    assert handler.num_nodes_waiting() == 0, "running workers are not disturbed"
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="closed by"):
        make().next_rendezvous()


def test_an_exception_under_way_at_shutdown_leaves_the_rendezvous_open(make: Make) -> None:
    # pytorch #67616: with PyTorch's backend one bad node closes the job for all.
    first, second = make("1:2"), make("1:2")
    with together(first, second) as joins:
        assert [join.result().world_size for join in joins] == [2, 2]
    try:
        raise RuntimeError("a fault of this node alone")
    except RuntimeError:
        second.shutdown()
    assert waiting(first) == 1
    assert first.next_rendezvous().world_size == 1


def test_a_join_timeout_names_the_nodes_that_joined_and_the_number_missing(make: Make) -> None:
    # pytorch #91943: with PyTorch's backend the message is empty.
    handler = make("3", join_timeout=0.5)
    expected = r"no round completed within .*: round 1: 1 of 3 nodes have joined \(127\.0\.0\.2 .*\); 2 more needed"
    with pytest.raises(RendezvousTimeoutError, match=expected) as caught:
        handler.next_rendezvous()
    assert isinstance(caught.value, ElasticError)


def test_nodes_with_another_nnodes_are_rejected_naming_both_numbers(make: Make) -> None:
    make("1").next_rendezvous()
    with pytest.raises(RendezvousError, match=r"asks for 2 to 4 nodes, but run `job` was opened for 1:") as caught:
        make("2:4").next_rendezvous()
    assert not isinstance(caught.value, RendezvousConnectionError)


def test_two_jobs_share_an_endpoint_without_mixing(make: Make) -> None:
    # pytorch #126510.
    one, other = make("1", run_id="one"), make("1", run_id="other")
    assert one.next_rendezvous().world_size == 1
    assert other.next_rendezvous().world_size == 1
    one.set_closed()
    assert not other.is_closed()


@pytest.mark.parametrize("endpoint", ["host:port", "127.0.0.1:70000", "bad host:29400", "a b"])
def test_an_invalid_endpoint_is_rejected(endpoint: str, make: Make) -> None:
    with pytest.raises(ValueError, match=f"rendezvous endpoint is `{endpoint}`"):
        make(endpoint=endpoint)


def test_a_maximum_below_the_minimum_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"maximum number of rendezvous nodes \(1\) must be greater than or equal"):
        RendezvousParameters("rust-c10d", "127.0.0.1:0", "job", 2, 1)


def test_more_nodes_than_32_bits_can_count_are_rejected(make: Make) -> None:
    with pytest.raises(ValueError, match=r"\(4294967296\) must be at most 4294967295"):
        make("1:4294967296")


def test_an_unknown_key_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="did you mean `join_timeout`"):
        make(join_timeuot=5)


def test_a_node_that_must_host_but_cannot_names_the_owner_of_the_port(make: Make) -> None:
    import os

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousConnectionError, match=rf"port {port} .* already in use by pid {os.getpid()}"):
            make(endpoint=f"127.0.0.1:{port}", is_host=1)


def test_the_error_names_a_foreign_server_on_the_port(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with taken.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-nobody\r\n")

        threading.Thread(target=answer, daemon=True).start()
        handler = make(endpoint=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RendezvousConnectionError, match="is not an elastic_rs coordinator") as caught:
            handler.next_rendezvous()
        assert "already in use by pid" in "".join(caught.value.__notes__)
        taken.shutdown(socket.SHUT_RDWR)


def test_a_store_of_pytorch_on_the_port_is_recognised(make: Make) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True)
    handler = make(endpoint=f"127.0.0.1:{theirs.port}")
    with pytest.raises(RendezvousConnectionError, match="a store of PyTorch's c10d backend"):
        handler.next_rendezvous()
    theirs.set("still", "serving")


def test_a_missing_coordinator_is_named_with_the_reason_why_this_node_does_not_host_it(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    handler = make(endpoint=f"127.0.0.1:{port}", is_host=0, join_timeout=0.5)
    with pytest.raises(
        RendezvousConnectionError, match=rf"could not reach the coordinator at 127\.0\.0\.1:{port}"
    ) as caught:
        handler.next_rendezvous()
    assert "refused" in str(caught.value)
    assert "is_host=0 was given" in "".join(caught.value.__notes__)


def test_two_joins_at_the_same_time_are_refused(make: Make) -> None:
    handler = make("2", join_timeout=2)
    with together(handler, handler) as joins:
        errors = [join.exception() for join in joins]
    assert sum(isinstance(error, RendezvousTimeoutError) for error in errors) == 1
    assert any("already waits for the next round, in another call" in str(error) for error in errors)


@pytest.mark.parametrize("run_id", ["x" * 70_000, "two\nlines", "\x1b[2J"])
def test_a_run_id_that_cannot_be_shown_is_refused(make: Make, run_id: str) -> None:
    with pytest.raises(ValueError, match=r"the run id .*(must have at most 1024|has control characters)"):
        make(run_id=run_id)


SCRIPT = """
import os, sys, threading, time
from elastic_rs import create_rust_c10d_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters

def make(nodes):
    params = RendezvousParameters("rust-c10d", "127.0.0.1:0", "job", nodes, nodes, "127.0.0.2", drain_timeout=0)
    return create_rust_c10d_handler(params)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_forked_process_may_drop_its_copy_of_a_handler() -> None:
    done = run("""
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.12 and later
handler = make(1)
handler.next_rendezvous()
if os.fork() == 0:
    try:
        handler.next_rendezvous()
    except RuntimeError as error:
        print(error)
    del handler
    sys.exit(0)
print("child ended with", os.wait()[1])
handler.next_rendezvous()
handler.shutdown()
""")
    assert done.returncode == 0, done.stderr
    assert "before it forked this one" in done.stdout
    assert "child ended with 0" in done.stdout
    assert not done.stderr


def test_a_daemon_thread_that_waits_does_not_disturb_the_exit() -> None:
    done = run("""
handler = make(2)
threading.Thread(target=handler.next_rendezvous, daemon=True).start()
while handler.session.view().addr is None:
    time.sleep(0.01)
time.sleep(0.1)
""")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "panicked" not in done.stderr


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_member_lost_right_after_the_round_does_not_hold_up_the_others(make: Make, lost_rank: int) -> None:
    # PyTorch's agent calls `_assign_worker_ranks` next, which waits for every member's role. A member that dies before
    # it writes its role would make all others wait for `read_timeout`, and fail.
    make("1:2")  # hosts the coordinator, and does not join
    handlers = [make("1:2"), make("1:2")]
    with together(*handlers) as joins:
        infos = {join.result().rank: (handler, join.result()) for handler, join in zip(handlers, joins, strict=True)}
    lost, _ = infos.pop(lost_rank)
    ((survivor, info),) = infos.values()
    lost.session.leave("test")
    role = _RoleInstanceInfo("trainer", info.rank, 4)
    info.store.set(f"torchelastic/role_info/{info.rank}", role.serialize())  # type: ignore[arg-type]
    if info.rank == 0:
        found = info.store.multi_get([f"torchelastic/role_info/{rank}" for rank in range(2)])
        assert [_RoleInstanceInfo.deserialize(text).rank for text in found] == [0, 1]
    else:
        assert json.loads(info.store.get("torchelastic/assigned_ranks/1")) == [4, 8, 4, 8]
    assert survivor.num_nodes_waiting() > 0, "what it has been given is good for nothing but to begin anew"
    assert survivor.next_rendezvous().world_size == 1
    assert survivor.num_nodes_waiting() == 0


def test_an_ipv6_endpoint_without_brackets_is_rejected_when_the_handler_is_made(make: Make) -> None:
    with pytest.raises(
        ValueError, match=r"is `::1`, must have brackets around an IPv6 address: \[::1\] or \[::1\]:PORT"
    ):
        make(endpoint="::1")


@pytest.mark.parametrize(
    ("endpoint", "nodes", "output"), [("", "2", True), ("localhost:0", "2", False), ("", "1", False)]
)
def test_several_nodes_without_an_endpoint_get_a_warning_when_the_handler_is_made(
    make: Make, caplog: pytest.LogCaptureFixture, endpoint: str, nodes: str, output: bool
) -> None:
    with caplog.at_level("WARNING", "elastic_rs"):
        make(nodes, endpoint=endpoint, is_host=None if nodes == "1" else "0")
    expected = (
        "no --rdzv-endpoint is given: this node meets others at localhost:29400, where only agents of this machine"
    )
    assert any(text.startswith(expected) for text in caplog.messages) == output
