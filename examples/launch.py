"""Launch workers from a program, read what they return, handle a failure, and launch again (docs/launch.md)."""

import elastic_rs
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def train(value: float) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)  # a worker that fails before ends the others, too
    dist.destroy_process_group()
    return 1.0 / total.item()


if __name__ == "__main__":
    config = elastic_rs.LaunchConfig(nproc_per_node=2)
    try:
        elastic_rs.launch(train, config, args=(0.0,))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} failed with exit code {failure.exitcode}")
    print(elastic_rs.launch(train, config, args=(2.0,)))
