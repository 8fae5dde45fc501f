"""A user's file. It names each public name as a program does, and has to please ``mypy --strict`` and pyright.

It is checked and never run. ``typing_extensions`` is not needed: ``assert_type`` is in ``typing`` since Python 3.11.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, assert_type

import elastic_rs
import elastic_rs.elastic as hvd
import torch
from elastic_rs import aio, discovery, elastic, errors
from elastic_rs.agent import LocalElasticAgent
from elastic_rs.rendezvous import (
    DEFAULT_PORT,
    RustC10dRendezvousHandler,
    RustEtcdRendezvousHandler,
    create_rust_c10d_handler,
    create_rust_etcd_handler,
)
from elastic_rs.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from elastic_rs.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)
from elastic_rs.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend
from elastic_rs.rendezvous.etcd_rendezvous_backend import create_backend as create_etcd_backend
from elastic_rs.rendezvous.etcd_store import EtcdStore
from elastic_rs.run import main
from elastic_rs.store import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters


def root() -> None:
    assert_type(elastic_rs.__version__, str)
    elastic_rs.install(store=True, rendezvous=False, agent=True)
    elastic_rs.uninstall()
    elastic_rs.step()
    elastic_rs.step(7)
    elastic_rs.step.auto(last=7).remove()
    with elastic_rs.section("eval"):
        pass
    if assert_type(elastic_rs.should_checkpoint(), bool):
        elastic_rs.checkpointed()
    raise SystemExit(main(["--nproc-per-node=2", "train.py"]))


def work(offset: int) -> int:
    return offset


def launches() -> int:
    config = elastic_rs.LaunchConfig(
        nproc_per_node=2, rdzv_conf={"join_timeout": 60}, shutdown_timeout=timedelta(seconds=5)
    )
    elastic_rs.launch("train.py", config, ["--lr", "0.1"])
    values = elastic_rs.launch(work, config, (7,))
    assert_type(values, dict[int, int])
    return values[0]


def modules() -> None:
    """The submodules are there after ``import elastic_rs`` alone."""
    print(elastic_rs.agent.LocalElasticAgent, elastic_rs.rendezvous.DEFAULT_PORT, elastic_rs.store.TCPStore)
    print(elastic_rs.aio, elastic_rs.discovery, elastic_rs.elastic, elastic_rs.errors, elastic_rs.run.main)


def stores(client: elastic_rs.EtcdClient) -> None:
    store = elastic_rs.TCPStore("node0", DEFAULT_PORT, is_master=True, timeout=timedelta(seconds=60))
    assert_type(store, TCPStore)
    assert_type(store.is_server, bool)
    assert_type(store.get("key"), bytes)
    with_prefix = elastic_rs.EtcdStore(client, "/job", timedelta(seconds=60), ttl=600.0)
    assert_type(with_prefix, EtcdStore)
    assert_type(with_prefix.add("key", 1), int)


def etcd() -> elastic_rs.EtcdClient:
    options = elastic_rs.EtcdOptions("h1:2379,h2:2379", protocol="https", cacert="ca.pem", read_timeout_s=10)
    client = elastic_rs.EtcdClient(options)
    assert_type(client.put("key", b"value"), int)
    assert_type(client.get("key"), tuple[bytes | None, int, int])
    return client


async def with_asyncio() -> bytes:
    async with aio.TCPStore.connect("node0", 29400, timeout=5) as store:
        await store.set("key", "value")
        await store.wait(["key"], timedelta(seconds=5))
        return await store.get("key")


def rendezvous(params: RendezvousParameters, store: TCPStore, client: elastic_rs.EtcdClient) -> None:
    assert_type(create_rust_c10d_handler(params), RustC10dRendezvousHandler)
    assert_type(create_rust_etcd_handler(params), RustEtcdRendezvousHandler)
    backend, its_store = create_backend(params)
    assert_type(backend, C10dRendezvousBackend)
    assert_type(create_handler(its_store, backend, params), DynamicRendezvousHandler)
    assert_type(create_etcd_backend(params), tuple[EtcdRendezvousBackend, EtcdStore])
    EtcdRendezvousBackend(client, "job", key_prefix="/torch", ttl=600)
    timeout = RendezvousTimeout(join=timedelta(seconds=60))
    handler = elastic_rs.DynamicRendezvousHandler.from_backend(
        "job", store, elastic_rs.C10dRendezvousBackend(store, "job"), 1, 4, timeout=timeout, store_peers="any"
    )
    assert_type(handler.settings, RendezvousSettings)
    assert_type(handler.shutdown(), bool)


def agent(spec: WorkerSpec) -> Mapping[int, Any]:
    runs = elastic_rs.LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="forkserver", shutdown_timeout=10)
    assert_type(runs, LocalElasticAgent)
    result = runs.run()
    return result.return_values


@elastic.run
def train(state: elastic.TorchState, epochs: int, *, rate: float = 0.1) -> float:
    optimizer: torch.optim.Optimizer = state.optimizer
    while state.epoch < epochs:
        optimizer.step()
        state.epoch += 1
        state.commit()
        state.check_host_updates()
    return rate


@hvd.elastic.run(backend="gloo", timeout=timedelta(minutes=5))
def train_with_options(state: elastic.ObjectState) -> list[int]:
    return [state.epoch]


class Mine(elastic.State):
    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


class MyHandler(elastic.StateDictHandler):
    def state(self) -> dict[str, int]:
        return {"value": int(self.value)}


class Listens:
    def on_hosts_updated(self, timestamp: int, update_res: elastic.HostUpdateResult) -> None:
        print(timestamp, update_res is elastic.HostUpdateResult.added)


def training(model: torch.nn.Module, tensor: torch.Tensor) -> None:
    hvd.init(backend="gloo", timeout=timedelta(minutes=5))
    sampler = elastic.ElasticSampler(range(100), shuffle=False, seed=1)
    state = hvd.elastic.TorchState(model=model, optimizer=None, sampler=sampler, epoch=0)
    state.register_reset_callbacks([lambda: None])
    assert_type(train(state, 3, rate=0.2), float)
    assert_type(train_with_options(elastic.ObjectState(epoch=0)), list[int])
    elastic.run(lambda state: state.commit())(Mine())
    listener: elastic.Listener = Listens()
    elastic.register_listener(listener)
    elastic.remove_listener(listener)
    elastic.set_handler_registry([(dict, MyHandler), *elastic.get_handler_registry()])
    assert_type(elastic.allreduce(tensor, op=elastic.Sum), torch.Tensor)
    elastic.allreduce_(tensor, op=hvd.Average)
    for op in (elastic.Min, elastic.Max, elastic.Product):
        elastic.allreduce(tensor, op=op)
    elastic.broadcast_parameters(model.state_dict(), root_rank=elastic.source_rank())
    elastic.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1))
    print(elastic.broadcast_object([1]), elastic.is_initialized())
    ranks = elastic.rank(), elastic.size(), elastic.local_rank(), elastic.local_size()
    nodes = elastic.cross_rank(), elastic.cross_size()
    assert_type((ranks, nodes), tuple[tuple[int, int, int, int], tuple[int, int]])
    handler: type[elastic.StateHandler] = elastic.StateHandler
    print(handler)
    elastic.shutdown()


def failures() -> str:
    try:
        print(asyncio.run(with_asyncio()))
    except errors.StoreTimeoutError as error:
        return str(error)
    except (errors.StoreLookupError, errors.StoreQueueEmptyError, errors.StoreNetworkError, errors.StoreError):
        raise elastic.HorovodInternalError("go back") from None
    except (errors.RendezvousClosedError, errors.RendezvousTimeoutError, errors.RendezvousConnectionError):
        raise elastic.HostsUpdatedInterrupt("again", elastic.HostUpdateResult.mixed) from None
    except (errors.RendezvousGracefulExitError, errors.RendezvousStateError, errors.RendezvousError):
        raise elastic.PeerFailed("gone") from None
    except (errors.EtcdPermissionError, errors.EtcdConnectionError, errors.EtcdLeaseError, errors.EtcdError) as error:
        assert_type(error.elapsed, float | None)
    except (errors.StateMismatchError, errors.TensorMismatchError) as error:
        assert_type(error.rank, int | None)
    except elastic_rs.ElasticError as error:
        assert_type(error.endpoint, str | None)
    return "none"


class MyHosts(discovery.HostDiscovery):
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {"node1": 8}


def hosts() -> set[str]:
    manager = discovery.HostManager(MyHosts(), cooldown_range=(10.0, 100.0))
    assert_type(manager.update_available_hosts(), discovery.HostUpdateResult)
    found: discovery.DiscoveredHosts = manager.current_hosts
    known: list[discovery.HostDiscovery] = [
        discovery.FixedHosts({"node1": 8}),
        discovery.FileHosts("hosts.txt", slots=8),
        discovery.DnsHosts("workers.default.svc", slots=8),
        discovery.SlurmHosts(),
        discovery.HostDiscoveryScript("./hosts.sh", slots=8, timeout_s=5.0),
    ]
    try:
        print(known[0].find_available_hosts_and_slots())
    except discovery.DiscoveryError:
        manager.blacklist("node1")
    return found.available_hosts
