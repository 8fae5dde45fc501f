"""Fixtures for the tests of ``elastic_rs.elastic``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from elastic_rs.elastic import _membership
from elastic_rs.elastic._membership import MEMBERSHIP
from helpers.channel import Agent
from helpers.elastic import FakeChannel, World
from helpers.elastic_node import Node

if TYPE_CHECKING:
    from helpers.procs import Job

Attend = Callable[..., FakeChannel]


@pytest.fixture(autouse=True)
def membership(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without a membership, a process group or a launcher, and leave none."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    MEMBERSHIP.__init__()  # type: ignore[misc]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    MEMBERSHIP.__init__()  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Return a function that gives this process an agent. It takes the worlds and the options of ``FakeChannel``."""

    def attend(*worlds: World, **options: object) -> FakeChannel:
        channel = FakeChannel(list(worlds) or [World()], **options)  # type: ignore[arg-type]
        monkeypatch.setenv("ELASTIC_RS_AGENT", "/test/agent")
        monkeypatch.setenv("ELASTIC_RS_IN_PLACE", "gloo")
        monkeypatch.setattr(_membership, "WorkerChannel", Mock(connect=lambda _path, _limit_s: channel))
        return channel

    return attend


@pytest.fixture
def node(job: Job) -> Iterator[Node]:
    agent = Agent()
    node = Node(job, agent)
    yield node
    agent.close()
    for world in node.worlds:
        world.store.stop()
