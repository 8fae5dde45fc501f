"""``elastic_rs.install()`` and ``uninstall()``."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import create_rust_c10d_handler
from elastic_rs._integration._launcher import take_over
from torch._C._distributed_c10d import TCPStore as TheirStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher import api as launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ["DynamicRendezvousHandler", "create_handler"]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    elastic_rs.uninstall()


def test_everything_is_replaced_and_restored() -> None:
    theirs = [getattr(dynamic_rendezvous, name) for name in NAMES]
    elastic_rs.install()
    elastic_rs.install()
    assert dist.TCPStore is elastic_rs.TCPStore
    assert c10d_rendezvous_backend.TCPStore is elastic_rs.TCPStore
    assert c10d_rendezvous_backend.C10dRendezvousBackend is elastic_rs.C10dRendezvousBackend
    for name in NAMES:
        assert getattr(dynamic_rendezvous, name) is getattr(elastic_rs, name)
    elastic_rs.uninstall()
    assert dist.TCPStore is TheirStore
    assert [getattr(dynamic_rendezvous, name) for name in NAMES] == theirs
    elastic_rs.uninstall()


def test_parts_can_be_installed_separately() -> None:
    elastic_rs.install(store=False)
    assert dist.TCPStore is TheirStore
    assert dynamic_rendezvous.create_handler is elastic_rs.create_handler
    elastic_rs.install(rendezvous=False)
    assert dist.TCPStore is elastic_rs.TCPStore


def test_a_store_returned_by_cpp_is_a_tcpstore_while_ours_is_installed() -> None:
    """C++ has kept the store without its Python object. PyTorch's ``InitPgWithNonUvStore`` tests check its type."""
    elastic_rs.install(rendezvous=False, agent=False)
    prefix = dist.PrefixStore("p", dist.TCPStore("127.0.0.1", 0, is_master=True))
    handed_back = prefix.underlying_store
    assert type(handed_back) is TheirStore, "else nothing is tested here"
    assert isinstance(handed_back, dist.TCPStore)
    assert not isinstance(dist.HashStore(), dist.TCPStore)
    elastic_rs.uninstall()
    assert not isinstance(handed_back, elastic_rs.TCPStore)


def test_the_c10d_handler_of_torchrun_is_ours() -> None:
    elastic_rs.install()
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, "127.0.0.1", is_host="1"))
    assert isinstance(handler, elastic_rs.DynamicRendezvousHandler)
    assert handler.get_backend() == "c10d"
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
    elastic_rs.uninstall()
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, "127.0.0.1", is_host="1"))
    assert type(handler).__module__.startswith("torch.")


@pytest.mark.parametrize(
    ("backend", "config", "ignored"),
    [
        ("c10d", {"is_host": "1", "join_timeout": "60", "store_peers": "any", "timeout": 900}, None),
        ("c10d", {"is_host": "1", "timeout": "60", "join_timeuot": "5", "cacert": None}, "join_timeuot, timeout"),
        ("static", {"rank": 0, "timeout": "60"}, None),
        ("static", {"rank": 0, "timeout": 900, "join_timeout": "5", "is_host": "1"}, "is_host, join_timeout"),
    ],
)
def test_pytorchs_names_take_pytorchs_keys(
    backend: str, config: dict[str, object], ignored: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    elastic_rs.install()
    params = RendezvousParameters(backend, "127.0.0.1:0", "job", 1, 1, "127.0.0.1", **config)
    with caplog.at_level(logging.WARNING, "elastic_rs"):
        handler = get_rendezvous_handler(params)
    assert handler.get_backend() == backend
    assert handler.shutdown(), "also before it has joined"
    names = [message.rpartition(": ")[2] for message in caplog.messages]
    assert names == ([] if ignored is None else [ignored])
    assert all(f"--rdzv-backend={backend}," in message for message in caplog.messages)


def test_the_agent_is_replaced_and_restored() -> None:
    theirs = local_elastic_agent.LocalElasticAgent
    # This may be ours already, if this process has made one of our handlers before.
    before = launcher.LocalElasticAgent
    elastic_rs.install(store=False, rendezvous=False)
    elastic_rs.install()
    assert launcher.LocalElasticAgent is elastic_rs.LocalElasticAgent
    assert local_elastic_agent.LocalElasticAgent is elastic_rs.LocalElasticAgent
    assert issubclass(elastic_rs.LocalElasticAgent, theirs)
    elastic_rs.uninstall()
    assert local_elastic_agent.LocalElasticAgent is theirs
    assert launcher.LocalElasticAgent is before
    elastic_rs.install(agent=False)
    assert launcher.LocalElasticAgent is before


def test_torchrun_s_launcher_uses_our_agent_only_for_our_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = local_elastic_agent.LocalElasticAgent
    monkeypatch.setattr(launcher, "LocalElasticAgent", theirs)
    take_over()
    taken = launcher.LocalElasticAgent
    made = {}
    for agent in ("rust", "torch"):
        params = RendezvousParameters("rust-c10d", "127.0.0.1:0", "job", 1, 1, "127.0.0.1", agent=agent)
        handler = create_rust_c10d_handler(params)
        made[agent] = type(taken(WorkerSpec("default", 1, handler, entrypoint="true"), DefaultLogsSpecs()))
        handler.shutdown()
    assert made == {"rust": elastic_rs.LocalElasticAgent, "torch": theirs}
    # The launcher's agent class while everything is installed, and after uninstall.
    elastic_rs.install()
    assert launcher.LocalElasticAgent is elastic_rs.LocalElasticAgent
    elastic_rs.uninstall()
    assert launcher.LocalElasticAgent is taken


def test_importing_the_package_does_not_import_torch() -> None:
    faces = "elastic_rs.agent, elastic_rs.rendezvous, elastic_rs.run, elastic_rs._integration._plugin"
    script = f"import sys, {faces}; elastic_rs.install; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("agent", ["LocalElasticAgent"]),
        ("aio", ["TCPStore"]),
        ("errors", ["ElasticError", "RendezvousError", "StoreError"]),
        ("rendezvous", ["DEFAULT_PORT", "RustC10dRendezvousHandler", "create_rust_c10d_handler"]),
        ("rendezvous.c10d_rendezvous_backend", ["C10dRendezvousBackend", "create_backend"]),
        ("rendezvous.dynamic_rendezvous", ["DynamicRendezvousHandler", "create_handler"]),
        ("rendezvous.etcd_rendezvous_backend", ["EtcdRendezvousBackend", "create_backend"]),
        ("rendezvous.etcd_store", ["EtcdStore"]),
        ("run", ["main"]),
        ("store", ["TCPStore"]),
    ],
)
def test_public_paths_lead_to_public_names(module: str, names: list[str]) -> None:
    home = importlib.import_module(f"elastic_rs.{module}")
    for name in names:
        value = getattr(home, name)
        assert not isinstance(value, type) or value.__module__ == home.__name__, "what error texts and pickles show"
    for name in ("RendezvousSettings", "RendezvousTimeout"):
        assert getattr(elastic_rs, name) is getattr(dynamic_rendezvous, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(home, "nothing")  # noqa: B009 - mypy knows that there is none
