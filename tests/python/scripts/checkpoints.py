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
    signal.signal(signal.SIGTERM, lambda *_: print("HEARD SIGTERM", flush=True))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    step = int(SAVED.read_text()) if SAVED.exists() else 0
    print(f"BEGINS rank {rank} of {size} at {step}, pid {os.getpid()}", flush=True)
    while True:
        finished = torch.tensor(float(DONE.exists()))
        dist.all_reduce(finished)
        if finished.item():
            break
        step += 1
        time.sleep(0.02)
        if step % 10 == 0 and rank == 0:
            print(f"STEP {step}", flush=True)
        if elastic_rs.should_checkpoint():
            steps = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(steps, torch.tensor([step]))
            assert {int(other) for other in steps} == {step}, steps
            # The others wait for nobody: the agents do.
            time.sleep(float(os.environ.get("SAVING_S", "0")))
            if rank == 0:
                SAVED.write_text(str(step))
            print(f"SAVED rank {rank} at {step}", flush=True)
            if "exits" in sys.argv:
                sys.exit()
            elastic_rs.checkpointed()
    dist.destroy_process_group()
    print(f"ENDS at {step}", flush=True)


main()
