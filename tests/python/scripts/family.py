"""A worker for tests of workers' ends. It joins no process group, and may have children or ignore signals.

family.py --until FILE        end well once the file exists; without it, run until ended
family.py --stubborn          ignore SIGTERM and SIGINT
family.py --lock FILE         rank 0 holds this lock while it lives, and prints TWO WORLDS if another process holds it
family.py --children FOLDER   start a child, and a grandchild in another session whose parent has ended; both ignore
                              SIGTERM. Before that, print which of an earlier attempt are still alive.
family.py --exit RANK:CODE    that rank ends with this code, without cleaning up, in the first attempt
family.py --raise RANK        that rank raises ValueError("the sky fell")
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path)
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--lock", type=Path)
parser.add_argument("--children", type=Path)
parser.add_argument("--exit")
parser.add_argument("--raise", type=int, dest="raising")
args = parser.parse_args()

rank, world, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
# Starts an orphan: the parent of the grandchild ends at once.
DETACH = (
    "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, "
    "stdout=open(sys.argv[2], 'w'))"
)


def say(text: str) -> None:
    # One write for the whole line, because the workers of a node share a pipe.
    os.write(1, f"{text}\n".encode())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_children(folder: Path) -> None:
    earlier = folder / f"rank{rank}"
    if earlier.exists():
        say(f"LEFT rank={rank} {[pid for pid in map(int, earlier.read_text().split()) if alive(pid)]}")
    report = f"import os; print(os.getpid(), flush=True); {STUBBORN}"
    child = subprocess.Popen([sys.executable, "-c", report], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert [child.stdout.readline().strip(), child.stdout.readline().strip()] == [str(child.pid), "up"]
    told = folder / f"grandchild{rank}.{count}"
    subprocess.run([sys.executable, "-c", DETACH, report, str(told)], check=True)
    while "up" not in told.read_text():
        time.sleep(0.02)
    earlier.write_text(f"{child.pid} {told.read_text().split()[0]}")


if args.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if args.lock and rank == 0:
    held = args.lock.open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("TWO WORLDS: another rank 0 lives")
if args.children:
    start_children(args.children)
say(f"WORKER rank={rank} world={world} group_rank={os.environ['GROUP_RANK']} restarts={count} pid={os.getpid()}")
if args.raising == rank:
    raise ValueError("the sky fell")
if args.exit and count == 0 and rank == int(args.exit.split(":")[0]):
    os._exit(int(args.exit.split(":")[1]))
while args.until is None or not args.until.exists():
    time.sleep(0.05)
