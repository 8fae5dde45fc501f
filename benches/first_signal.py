"""Count the checkpoints that trainers with data workers save after SIGTERM, with PyTorch's launcher and with ours.

    python benches/first_signal.py [--workers 50]

Jobs of ten workers (tests/python/scripts/loads.py, ``DataLoader(num_workers=2)``), by turns under stock torchrun, under
torchrun with our agent, and under elastic-run with either first signal. Once all have data, SIGTERM goes to the agent.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "first_signal.json"
SCRIPT = Path(__file__).parents[1] / "tests" / "python" / "scripts" / "loads.py"
WORKERS = 10
LIMIT_S = 240.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1")
WAYS = {
    "stock torchrun": (*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
    "torchrun, rust-c10d": (*TORCHRUN, "--rdzv-backend=rust-c10d", "--rdzv-endpoint=127.0.0.1:0"),
    "elastic-run": (sys.executable, "-m", "elastic_rs.run", "--standalone"),
    "elastic-run --first-signal=group": (
        *(sys.executable, "-m", "elastic_rs.run"),
        *("--standalone", "--first-signal=group"),
    ),
}


def saved(way: str) -> int:
    """Stop a job once all its workers have data. Return how many have saved."""
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            command = [*WAYS[way], f"--nproc-per-node={WORKERS}", str(SCRIPT), folder]
            agent = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            until = time.monotonic() + LIMIT_S
            while (seen := log.read_text(errors="replace")).count("READY ") < WORKERS:
                if time.monotonic() > until or agent.poll() is not None:
                    sys.exit(f"error: {way}: the workers have not started:\n{seen[-3000:]}")
                time.sleep(0.05)
            agent.send_signal(signal.SIGTERM)
            agent.wait(LIMIT_S)
        finally:
            agent.kill()
        return len(list(Path(folder).glob("checkpoint-*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=50, help="workers that are stopped in each way (50)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    jobs = max(1, args.workers // WORKERS)
    found: dict[str, list[int]] = {way: [] for way in WAYS}
    load = [os.getloadavg()[0]]
    for _ in range(jobs):
        for way, counts in found.items():
            counts.append(saved(way))
    load.append(os.getloadavg()[0])
    for way, counts in found.items():
        print(f"{way}: {sum(counts)} of {jobs * WORKERS} checkpoints saved")
    keep({"machine": machine(), "load": load, "workers_of_a_job": WORKERS, "saved": found}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
