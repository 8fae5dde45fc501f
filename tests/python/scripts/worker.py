"""A worker for tests: it meets the other workers, prints what it sees, and ends as requested.

worker.py                  meet the others once in the agent's worker store, then end well
worker.py --torch          the same in a process group of PyTorch, by all_reduce; the start takes 3 s of a core
worker.py --until FILE     run until the file exists, then end well; with --torch, all_reduce in a loop meanwhile
worker.py --fail RANK:CODE the worker of that rank ends with the exit code after they have met
worker.py --quiet          do not meet: print the environment, then sleep until ended

PyTorch's collectives notice a lost peer by themselves. Without --torch, only the agents can notice it.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--torch", action="store_true")
parser.add_argument("--until", type=Path)
parser.add_argument("--fail")
parser.add_argument("--quiet", action="store_true")
args = parser.parse_args()


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


class Store:
    """The workers of the world meet in the worker store."""

    def __init__(self) -> None:
        from elastic_rs._elastic_rs import StoreClient

        self._store = StoreClient(host, port)

    def keys(self) -> int:
        return self._store.num_keys()

    def total(self) -> int:
        """Return the number of workers. Exits if two have the same rank."""
        if (count := self._store.add(f"rank {rank}", 1)) != 1:
            sys.exit(f"there are {count} workers of rank {rank}")
        ranks = [f"rank {other}" for other in range(world)]
        self._store.wait(ranks)
        return sum(map(int, self._store.multi_get(ranks)))

    def any(self, *, done: bool) -> bool:
        time.sleep(0.02)
        return done

    def close(self) -> None:
        self._store.barrier("close", world)


class ProcessGroup:
    """The workers of the world meet in a process group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._store = dist.TCPStore(host, port, is_master=False)

    def keys(self) -> int:
        return int(self._store.num_keys())

    def total(self) -> int:
        self._dist.init_process_group("gloo")
        total = self._torch.ones(1)
        self._dist.all_reduce(total)
        return int(total.item())

    def any(self, *, done: bool) -> bool:
        """Return whether a worker is done. All ranks return the same in the same step."""
        told = self._torch.tensor([float(done)])
        self._dist.all_reduce(told, op=self._dist.ReduceOp.MAX)
        return bool(told.item())

    def close(self) -> None:
        self._dist.destroy_process_group()


say(
    f"WORKER rank={rank} world={world} group_rank={os.environ['GROUP_RANK']} groups={os.environ['GROUP_WORLD_SIZE']} "
    f"master={host}:{port} pid={os.getpid()}"
)
if args.quiet:
    signal.pause()
    sys.exit(0)

group = ProcessGroup() if args.torch else Store()
say(f"KEYS rank={rank} at start: {group.keys()}")
say(f"SUM rank={rank} world={group.total()} master={host}:{port}")
if args.fail:
    failing, code = map(int, args.fail.split(":"))
    if rank == failing:
        os._exit(code)
while (args.until or args.fail) and not group.any(done=args.until is not None and args.until.exists()):
    pass
group.close()
say(f"DONE rank={rank}")
