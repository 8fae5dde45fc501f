"""A worker that counts steps with the others, writes the count when it gets SIGTERM, and begins with what was written.

preempted.py CHECKPOINT --until FILE    run until the file exists, then end well
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from elastic_rs._elastic_rs import StoreClient

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--until", type=Path, required=True)
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
asked = False


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


def ask(_: int, __: object) -> None:
    global asked  # noqa: PLW0603
    asked = True


signal.signal(signal.SIGTERM, ask)
store.barrier("start", world)
step = int(args.checkpoint.read_text()) if args.checkpoint.exists() else 0
say(f"BEGIN rank={rank} world={world} step={step}")
while not asked and not args.until.exists():
    step += 1
    time.sleep(0.02)
if asked:
    if rank == 0:
        args.checkpoint.write_text(str(step))
        say(f"SAVED step={step}")
    sys.exit(0)
say(f"DONE rank={rank}")
