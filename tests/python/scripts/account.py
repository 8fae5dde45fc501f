"""A worker for tests that compare launchers: it writes its environment to a file, then ends as requested.

account.py FOLDER [--exit RANK:CODE] [--raise RANK] [--record RANK] [OTHER ARGUMENTS]

--exit    that rank ends with this code
--raise   that rank raises an exception
--record  that rank has PyTorch record its exception
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--exit")
parser.add_argument("--raise", type=int, dest="raising")
parser.add_argument("--record", type=int)
args, rest = parser.parse_known_args()

# Signals 32 and 33 are internal to glibc. Its posix_spawn (in make, for example) ignores them, and executed programs
# inherit that.
OF_LIBC = 0b11 << 31

rank = int(os.environ["RANK"])
status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
account = {
    "env": dict(os.environ),
    "argv": sys.argv[1:],
    "flags": list(sys.flags),
    "path": sys.path[0],
    "cwd": str(Path.cwd()),
    "leads its session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "blocked": status["SigBlk"],
    "ignored": f"{int(status['SigIgn'], 16) & ~OF_LIBC:016x}",
    "descriptors": sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if int(fd.name) < 3),
    "stdin": str(Path("/proc/self/fd/0").readlink()),
    "SIGINT": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}
(args.folder / f"{rank}.json").write_text(json.dumps(account))
# One write for the whole line, because two workers share a console.
os.write(1, f"out of {rank}\n".encode())
os.write(2, f"err of {rank}\n".encode())


def fail() -> None:
    raise ValueError("the sky fell")


def others_are_there() -> bool:
    return all((args.folder / f"{other}.json").exists() for other in range(int(os.environ["WORLD_SIZE"])))


# A failing worker ends the others, so it waits until they have written their files.
while not others_are_there():
    time.sleep(0.01)
if args.exit and rank == int(args.exit.split(":")[0]):
    os._exit(int(args.exit.split(":")[1]))
if args.raising == rank:
    fail()
if args.record is not None:
    if args.record == rank:
        from torch.distributed.elastic.multiprocessing.errors import record

        record(fail)()
    signal.pause()
if args.exit or args.raising is not None:
    signal.pause()
