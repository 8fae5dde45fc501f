"""Convert between the core's ``Placement`` of a node in a round and PyTorch's worker group."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import Worker

from elastic_rs import _elastic_rs
from elastic_rs._elastic_rs import Placement
from elastic_rs.agent._metrics import measured


@measured("SimpleElasticAgent._assign_worker_ranks")
def workers_of(placement: Placement, count: int) -> list[Worker]:
    """Return the workers of the node with their ranks."""
    first_rank, first_role_rank, world_size, role_world_size = placement.workers or (0, 0, 0, 0)
    return [Worker(i, first_rank + i, first_role_rank + i, world_size, role_world_size) for i in range(count)]


def placement_of(group: Any, number: int) -> Placement:
    """Return the placement that PyTorch's rank assignment through the handler's store resulted in."""
    first = group.workers[0]
    return _elastic_rs.Placement(
        round=number,
        rank=group.group_rank,
        world_size=group.group_world_size,
        master_addr=group.master_addr,
        master_port=int(group.master_port),
        first_rank=first.global_rank,
        first_role_rank=first.role_rank,
        worker_count=first.world_size,
        role_worker_count=first.role_world_size,
    )
