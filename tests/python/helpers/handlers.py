"""Rendezvous handlers of several nodes in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo


def waiting(handler: RendezvousHandler) -> int:
    """Poll until the handler knows of waiting nodes, for at most the test's time limit."""
    pause = threading.Event()
    while not (count := handler.num_nodes_waiting()):
        pause.wait(0.01)
    return count


def assert_one_world(infos: Sequence[RendezvousInfo]) -> None:
    """Check that these are all nodes of one world, which share a store."""
    assert sorted(info.rank for info in infos) == list(range(len(infos)))
    assert {info.world_size for info in infos} == {len(infos)}
    bootstraps = [info.bootstrap_store_info for info in infos]
    assert len({(info.master_addr, info.master_port) for info in bootstraps if info}) == 1
    infos[0].store.set("from", "one")
    assert infos[-1].store.get("from") == b"one"
    assert isinstance(infos[0].store, dist.Store)
