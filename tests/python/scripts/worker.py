"""A worker for tests: joins the process group, tells what it sees, and trains nothing until it is told how to end.

worker.py                  one all_reduce, then a clean end
worker.py --until FILE     all_reduce in a loop until the file exists (on all ranks in the same step), then a clean end
worker.py --fail RANK:CODE the worker of that rank ends with the exit code after the first all_reduce
worker.py --quiet          no process group: print the environment, then sleep until ended (collectives would notice a
                           lost peer by themselves; this shows what the agents notice)
"""

import argparse
import os
import signal
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path)
parser.add_argument("--fail")
parser.add_argument("--quiet", action="store_true")
args = parser.parse_args()


def say(text: str) -> None:
    # One write for the whole line: the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
say(
    f"WORKER rank={rank} world={world} group_rank={os.environ['GROUP_RANK']} groups={os.environ['GROUP_WORLD_SIZE']} "
    f"master={master} pid={os.getpid()}"
)
if args.quiet:
    signal.pause()
    sys.exit(0)

import torch  # noqa: E402 - a quiet worker does without
import torch.distributed as dist  # noqa: E402

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
say(f"KEYS rank={rank} at start: {store.num_keys()}")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
say(f"SUM rank={rank} world={int(total.item())} master={master}")

if args.fail:
    failing, code = map(int, args.fail.split(":"))
    if rank == failing:
        os._exit(code)
while args.until or args.fail:
    done = torch.tensor([float(args.until is not None and args.until.exists())])
    dist.all_reduce(done, op=dist.ReduceOp.MAX)
    if done.item():
        break
dist.destroy_process_group()
say(f"DONE rank={rank}")
