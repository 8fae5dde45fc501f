"""A script of `elastic_rs.should_checkpoint`: it trains until FOLDER/done exists, and does not end by SIGTERM."""

import os
import signal
import sys
import time
from pathlib import Path

import elastic_rs
import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
SAVED, DONE = FOLDER / "saved", FOLDER / "done"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"HEARD SIGTERM\n"))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    step = int(SAVED.read_text()) if SAVED.exists() else 0
    os.write(1, f"BEGINS rank {rank} of {size} at {step}, pid {os.getpid()}\n".encode())
    while True:
        finished = torch.tensor(float(DONE.exists()))
        dist.all_reduce(finished)
        if finished.item():
            break
        step += 1
        time.sleep(0.02)
        if step % 10 == 0 and rank == 0:
            os.write(1, f"STEP {step}\n".encode())
        if elastic_rs.should_checkpoint():
            steps = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(steps, torch.tensor([step]))
            assert {int(other) for other in steps} == {step}, steps
            # The others wait for nobody: the agents do.
            time.sleep(float(os.environ.get("SAVING_S", "0")))
            if rank == 0:
                SAVED.write_text(str(step))
            os.write(1, f"SAVED rank {rank} at {step}\n".encode())
            if "exits" in sys.argv:
                sys.exit()
            elastic_rs.checkpointed()
    dist.destroy_process_group()
    os.write(1, f"ENDS at {step}\n".encode())


main()
