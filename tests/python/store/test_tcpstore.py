"""`elastic_rs.TCPStore`: constructor, properties and lifetime of the server, compared with PyTorch's."""

import gc
import inspect
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.procs import Job
from helpers.stores import HOST, LIMIT, bound_socket, until

BOTH = pytest.mark.parametrize("kind", [dist.TCPStore, elastic_rs.TCPStore], ids=["torch", "elastic_rs"])
Kind = type[dist.TCPStore]


def test_the_constructor_has_pytorchs_parameters_and_defaults() -> None:
    line = next(line for line in (dist.TCPStore.__init__.__doc__ or "").splitlines() if "host_name" in line)
    upstream = re.findall(r"(\w+): [^,=)]*?(?: = ([^,)]+?(?:\([^)]*\))?))?(?=, \w+:|\) ->)", line)
    names = [name for name, _ in upstream if name != "self"]
    ours = inspect.signature(elastic_rs.TCPStore).parameters
    assert names == list(ours)
    defaults = {name: default for name, default in upstream if default}
    assert list(defaults) == [name for name, one in ours.items() if one.default is not one.empty]
    assert {name: repr(ours[name].default) for name in defaults} == {
        name: repr(timedelta(seconds=300)) if "timedelta" in default or "300" in default else default
        for name, default in defaults.items()
    }


def test_it_is_pytorchs_store() -> None:
    store = elastic_rs.TCPStore(HOST, 0, is_master=True)
    assert isinstance(store, dist.TCPStore)
    assert isinstance(store, dist.Store)
    assert store.has_extended_api()  # type: ignore[attr-defined, unused-ignore]


@BOTH
def test_properties_are_those_given(kind: Kind) -> None:
    store = kind("localhost", 0, is_master=True, timeout=timedelta(seconds=42), use_libuv=False)
    assert (store.host, store.timeout, store.libuvBackend) == ("localhost", timedelta(seconds=42), False)  # type: ignore[attr-defined, unused-ignore]
    assert 0 < store.port < 65536
    client = kind(HOST, store.port)
    assert (client.host, client.timeout, client.libuvBackend) == (HOST, timedelta(seconds=300), True)  # type: ignore[attr-defined, unused-ignore]
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)  # type: ignore[attr-defined, unused-ignore]


@BOTH
def test_repr_names_the_connection_and_the_server(kind: Kind) -> None:
    store = kind(HOST, 0, is_master=True)
    address = r"\[::ffff:127\.0\.0\.1\]:\d+"
    client = rf"TCPStore\(client=TCPClient\(SocketImpl\(fd=\d+, addr={address}, remote={address}\)\)"
    assert re.fullmatch(rf"{client}, server=TCPServer\(port={store.port}\)\)", repr(store))
    assert re.fullmatch(rf"{client}, server=<nullptr>\)", repr(kind(HOST, store.port)))


@BOTH
@pytest.mark.parametrize("port", [-1, 65536, 1 << 70, 1.5, "1", None])
@pytest.mark.parametrize("is_master", [True, False])
def test_a_port_that_does_not_exist_is_a_type_error(kind: Kind, port: Any, is_master: bool) -> None:
    with pytest.raises(TypeError):
        kind(HOST, port, is_master=is_master)


@BOTH
@pytest.mark.parametrize("arguments", [{"is_master": 1}, {"world_size": "2"}, {"timeout": "soon"}, {"host_name": 1}])
def test_an_argument_of_another_type_is_a_type_error(kind: Kind, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(**{"host_name": HOST, "port": 0, "is_master": True, **arguments})


@BOTH
@pytest.mark.parametrize("wait_for_workers", [True, False])
def test_a_world_size_of_0_is_a_value_error(kind: Kind, wait_for_workers: bool) -> None:
    with pytest.raises(ValueError, match=r"^TCPStore world size cannot be 0$"):
        kind(HOST, 0, 0, True, wait_for_workers=wait_for_workers)


@BOTH
def test_a_negative_world_size_counts_as_none(kind: Kind) -> None:
    store = kind(HOST, 0, -3, True)
    assert store.num_keys() == 0


@BOTH
def test_the_owner_waits_for_all_workers(kind: Kind) -> None:
    with ThreadPoolExecutor(2) as threads:
        listener, port = bound_socket()
        owner = threads.submit(kind, HOST, port, 3, True, LIMIT, master_listen_fd=listener.detach())
        others = [kind(HOST, port, 3, timeout=LIMIT)]
        assert not owner.done()
        others.append(kind(HOST, port, 3, timeout=LIMIT))
        store = owner.result()
    assert store.num_keys() == 1  # `init/`
    assert store.list_keys() == []


@BOTH
def test_missing_workers_are_counted(kind: Kind) -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        kind(HOST, 0, 2, True, timedelta(seconds=1))
    text = r"Timed out after [12] seconds waiting for clients\. 1/2 clients joined\."
    assert re.fullmatch(text, str(caught.value))


WAITS_FOR_WORKERS = """
import signal, socket
import elastic_rs
signal.signal(signal.SIGINT, signal.default_int_handler)
listener = socket.create_server(("", 0))
port = listener.getsockname()[1]
print("port", port, flush=True)
try:
    elastic_rs.TCPStore("127.0.0.1", port, 2, is_master=True, master_listen_fd=listener.detach())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_waiting_for_workers_can_be_interrupted(job: Job) -> None:
    process = job.start([sys.executable, "-c", WAITS_FOR_WORKERS])
    client = _elastic_rs.StoreClient(HOST, int(process.line(r"port (\d+)")[1]))
    until("the owner waits", lambda: client.num_keys() == 1)
    process.signal(signal.SIGINT)
    process.line("interrupted")
    assert process.wait() == 0


def test_a_store_that_could_not_be_made_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    listen = _elastic_rs.StoreServer.listen

    class Recorder:
        @staticmethod
        def listen(address: str | None, port: int) -> _elastic_rs.StoreServer:
            made.append(listen(address, port))
            return made[-1]

    monkeypatch.setattr(_elastic_rs, "StoreServer", Recorder)
    for multi_tenant in (False, True):
        with pytest.raises(TypeError):
            elastic_rs.TCPStore(HOST, 0, "two", is_master=True, multi_tenant=multi_tenant)  # type: ignore[arg-type]
    until("ended", lambda: all(server.stopped for server in made))
    assert len(made) == 2


def test_durations_are_timedeltas_or_numbers_of_seconds() -> None:
    for given in (60, 60.0, timedelta(minutes=1)):
        store = elastic_rs.TCPStore(HOST, 0, is_master=True, timeout=given)
        stock: Any = store  # the attribute is not in PyTorch's types
        assert stock.timeout == timedelta(minutes=1)
        store.set_timeout(given)
        assert stock.timeout == timedelta(minutes=1)
        store.set("k", "v")
        store.wait(["k"], given)
        for bad in (True, "soon", float("nan")):
            with pytest.raises((TypeError, ValueError), match=r"^timeout is "):
                store.wait(["k"], bad)  # type: ignore[arg-type]


@BOTH
def test_the_server_ends_with_its_store(kind: Kind) -> None:
    store = kind(HOST, 0, is_master=True)
    client = kind(HOST, store.port, timeout=LIMIT)
    clone = store.clone()
    client.set("k", "v")
    assert clone.get("k") == b"v"
    del store
    with pytest.raises(dist.DistNetworkError):
        client.get("k")
    with pytest.raises(dist.DistNetworkError):
        clone.get("k")


def test_a_lost_server_is_named_with_the_operation_and_the_time_it_took() -> None:
    store = elastic_rs.TCPStore(HOST, 0, is_master=True)
    port = store.port
    client = elastic_rs.TCPStore(HOST, port, timeout=LIMIT)
    del store
    with pytest.raises(dist.DistNetworkError) as caught:
        client.get("k")
    lost = rf"failed after \d+\.\d+ s: connection to the store at 127\.0\.0\.1:{port} lost: "
    assert re.match(rf"get of `k` {lost}\w", str(caught.value))
    assert isinstance(caught.value, elastic_rs.errors.StoreNetworkError)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)
    for operation, named in [
        (lambda: client.wait(["a", "b", "c", "d", "e"]), "wait of `a`, `b`, `c` and 2 more "),
        (lambda: client.add("n", 1), "add of `n` "),
        (client.num_keys, "num_keys "),
    ]:
        with pytest.raises(elastic_rs.errors.StoreNetworkError, match=named + lost):
            operation()


@BOTH
def test_tenants_share_a_server_until_the_last_has_gone(kind: Kind) -> None:
    first = kind(HOST, 0, is_master=True, multi_tenant=True)
    port = first.port
    second = kind(HOST, port, is_master=True, multi_tenant=True)
    first.set("k", "1")
    assert second.get("k") == b"1"
    assert f"server=TCPServer(port={port})" in repr(second)
    watcher = kind(HOST, port, timeout=LIMIT)
    del first
    gc.collect()
    assert second.add("k", 1) == 2
    assert watcher.get("k") == b"2"
    del second
    with pytest.raises(dist.DistNetworkError):
        watcher.get("k")
    # The port is free, and a new server has an empty store.
    again = kind(HOST, port, is_master=True, multi_tenant=True)
    assert again.num_keys() == 0


@BOTH
def test_only_tenants_share(kind: Kind) -> None:
    alone = kind(HOST, 0, is_master=True)
    with pytest.raises(dist.DistNetworkError, match="address already in use"):
        kind(HOST, alone.port, is_master=True, multi_tenant=True)
    tenant = kind(HOST, 0, is_master=True, multi_tenant=True)
    with pytest.raises(dist.DistNetworkError, match="address already in use"):
        kind(HOST, tenant.port, is_master=True)
    other = kind(HOST, 0, is_master=True, multi_tenant=True)
    assert other.port != tenant.port


def test_tenants_that_come_and_go_never_lose_the_server_under_way() -> None:
    listener, port = bound_socket()
    listener.close()

    def come_and_go(_: int) -> int:
        store = elastic_rs.TCPStore(HOST, port, is_master=True, multi_tenant=True, timeout=LIMIT)
        return store.add("n", 1)

    with ThreadPoolExecutor(4) as threads:
        assert all(count >= 1 for count in threads.map(come_and_go, range(40)))
