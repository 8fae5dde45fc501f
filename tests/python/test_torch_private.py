"""``elastic_rs._torch_private``: each private name of this version of PyTorch still does what this package needs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import elastic_rs
import pytest
import torch
import torch.distributed as dist
from elastic_rs import _torch_private
from torch import nn
from torch.distributed import new_group
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SignalException
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_no_other_module_uses_such_names() -> None:
    names = re.compile(r"torch\._C|distributed_c10d\._|(registry|handlers|group)\._[a-z]|\._metadata|api import _[a-z]")
    folder = Path(elastic_rs.__file__).parent
    found = [path.name for path in folder.rglob("*.py") if names.search(path.read_text())]
    # The names of modules are all that `install()` looks at.
    assert sorted(found) == ["_install.py", "_torch_private.py"]


def test_stores_are_pytorchs_own_also_after_install() -> None:
    elastic_rs.install()
    try:
        assert dist.TCPStore is not _torch_private.TCPStore
        assert issubclass(dist.TCPStore, _torch_private.TCPStore)
    finally:
        elastic_rs.uninstall()
    for name in ("FileStore", "PrefixStore", "Store", "TCPStore"):
        assert getattr(dist, name) is getattr(_torch_private, name)


def test_factories_of_handlers() -> None:
    factories = _torch_private.handler_factories()
    assert {"c10d", "etcd", "static"} <= factories.keys()
    assert factories is _torch_private.handler_factories()


def test_handlers_of_events() -> None:
    assert {"null", "console"} <= _torch_private.event_handlers().keys()


def test_the_handler_of_signals_raises() -> None:
    with pytest.raises(SignalException) as raised:
        _torch_private.signal_handler()(signal.SIGTERM, None)
    assert raised.value.sigval == signal.SIGTERM


@pytest.mark.usefixtures("group")
def test_recorded_collectives_and_members(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.all_reduce(torch.ones(3))
    members = _torch_private.members_of_groups()
    assert members == {"0": [0]}
    recorded = _torch_private.recorded_collectives()
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        assert recorded == []
        return
    (dump,) = map(json.loads, recorded)
    names = [entry["process_group"][0] for entry in dump.get("entries", [])]
    assert set(names) <= {"0"}, "before 2.15 nothing is recorded by default"
    monkeypatch.setattr(_torch_private, "RECORDED_LIMIT_BYTES", 10)
    (short,) = map(json.loads, _torch_private.recorded_collectives())
    assert not short.get("entries"), "of one that is too long, the numbers alone"


def test_hosts() -> None:
    assert _torch_private.is_this_host("localhost")
    assert not _torch_private.is_this_host("no-such-host.invalid")


def test_the_store_of_a_backend() -> None:
    store = dist.HashStore()
    assert _torch_private.store_of(C10dRendezvousBackend(store, "job")) is store
    assert _torch_private.store_of(object()) is None


def test_the_worker_group_of_an_agent() -> None:
    agent = LocalElasticAgent.__new__(LocalElasticAgent)
    agent._worker_group = group = SimpleNamespace()  # type: ignore[assignment]
    assert agent.get_worker_group() is group
    assert _torch_private.worker_group_of(agent) is group
    assert _torch_private.worker_group_of(object()) is None


def test_workers_that_are_functions() -> None:
    context = MultiprocessContext(
        name="worker",
        entrypoint=print,
        args={0: ()},
        envs={0: {}},
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
        log_line_prefixes=None,
    )
    assert _torch_private.processes_of(context) is None, "not started"
    assert _torch_private.return_queues(context).keys() == {0}
    _torch_private.let_workers_end(context)
    assert context._worker_finished_event.is_set()


@pytest.mark.usefixtures("group")
def test_the_timeout_of_the_default_group() -> None:
    assert _torch_private.timeout_of_default_group() == timedelta(seconds=77)


@pytest.mark.usefixtures("group")
def test_subgroups_are_known() -> None:
    assert not _torch_private.has_subgroups()
    dist.new_group([0])
    assert _torch_private.has_subgroups()


def test_the_port_of_the_default_groups_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for store, port in ((dist.PrefixStore("a", dist.PrefixStore("b", server)), server.port), (dist.HashStore(), None)):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert _torch_private.port_of_default_store() == port
        dist.destroy_process_group()
    assert _torch_private.port_of_default_store() is None


@pytest.mark.usefixtures("group")
def test_gloo_connects_inside_a_block_whoever_makes_the_group() -> None:
    noted: list[str] = []

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        noted.append("begin")
        yield
        noted.append("end")

    makers: list[Callable[[], object]] = [
        lambda: new_group([0]),
        lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1),
    ]
    if torch.__version__ >= "2.13":  # it crashes before, and `dist.split_group` is for GPUs alone
        makers.append(lambda: dist.split_group(None, [[0]]))
    before = {kind: dict(vars(kind)) for kind in (dist.ProcessGroup, dist.ProcessGroupGloo)}
    with _torch_private.gloo_connects_inside(block):
        for number, make in enumerate(makers, 1):
            make()
            assert noted == ["begin", "end"] * number
        # Who wraps it too keeps what he has set.
        ours = dist.ProcessGroupGloo.__init__
        theirs = functools.partialmethod(ours)
        dist.ProcessGroupGloo.__init__ = theirs  # type: ignore[assignment, method-assign]
    assert vars(dist.ProcessGroupGloo)["__init__"] is theirs
    dist.ProcessGroupGloo.__init__ = before[dist.ProcessGroupGloo]["__init__"]  # type: ignore[method-assign]
    assert {kind: dict(vars(kind)) for kind in before} == before


@pytest.mark.usefixtures("group")
def test_numbers_of_groups_begin_again() -> None:
    dist.new_group([0])
    dist.destroy_process_group()
    _torch_private.forget_group_numbers()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.distributed_c10d._world.group_count == 1


@pytest.mark.usefixtures("group")
def test_the_backends_of_groups_are_known() -> None:
    dist.new_group([0])
    assert {backend.name() for backend in _torch_private.backends_of_groups()} == {"gloo"}
    dist.destroy_process_group()
    assert _torch_private.backends_of_groups() == []


@pytest.mark.usefixtures("group")
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="PyTorch 2.6 aborts groups of NCCL alone")
def test_groups_are_aborted() -> None:
    _torch_private.abort_groups()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("group")
def test_hooks_of_a_wrap_run_no_more() -> None:
    model = nn.Linear(1, 1)
    wrap = DistributedDataParallel(model)
    _torch_private.take_hooks_off(wrap)
    dist.destroy_process_group()
    model(torch.ones(1)).backward()
    assert model.weight.grad is not None
    _torch_private.take_hooks_off(nn.Module())


def test_a_copy_keeps_the_versions_of_modules() -> None:
    versions = nn.BatchNorm1d(1).state_dict()
    new = copy.copy(dict(versions))
    _torch_private.keep_versions(new, new)
    bare = type(versions)(versions)
    assert not hasattr(bare, "_metadata")
    _torch_private.keep_versions(versions, bare)
    assert bare._metadata[""]["version"] == 2  # type: ignore[attr-defined, unused-ignore]


def test_meshes_of_different_worlds_are_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's caches take a mesh of an earlier world, in which this process had another rank, for an equal one."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def part_of(rank: int) -> tuple[list[DeviceMesh], list[list[float]], list[int] | None]:
        """Return the meshes of a world in which this process has that rank, its part of a tensor, and its place."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            whole = DTensor.from_local(torch.arange(8.0).reshape(4, 2), mesh, [Replicate(), Replicate()])
            result: Any = whole + 1
            sharded = result.redistribute(mesh, [Shard(0), Shard(0)])
            place = (sharded * 2).device_mesh.get_coordinate()
            return [mesh, mesh["tp"]], sharded.to_local().tolist(), None if place is None else list(place)
        finally:
            dist.destroy_process_group()

    # PyTorch's own, also if another test has left a world in this process. What is there now is put back at the end.
    monkeypatch.setattr(DeviceMesh, "__init__", inspect.unwrap(DeviceMesh.__init__))
    world = 1
    first, rows, place = part_of(0)
    assert (rows, place) == ([[1.0, 2.0]], [0, 0])
    again, rows, _ = part_of(3)
    assert again[0] == first[0]
    assert rows == [[1.0, 2.0]], "PyTorch has mended it: `tell_meshes_apart` is not needed any longer"
    _torch_private.tell_meshes_apart(lambda: world)
    second, rows, place = part_of(3)
    assert second[0] != first[0]
    assert second[1] != first[1]
    assert (rows, place) == ([[7.0, 8.0]], [1, 1])
    world = 2
    third, rows, place = part_of(1)
    assert third[0] not in (first[0], second[0])
    assert (rows, place) == ([[3.0, 4.0]], [0, 1])
    assert part_of(1)[0] == third, "of the same world"
