"""A worker that reports its start and end, and is controlled by signals.

    python -I -S agent_worker.py PIPE LINES

Each event is one line in the pipe: name, CLOCK_MONOTONIC in nanoseconds, global rank, restart count, process id.
SIGUSR1: fail. SIGUSR2: print LINES lines as fast as possible, the second time with the time in each line.
"""

import os
import signal
import sys
import time

PIPE = os.open(sys.argv[1], os.O_WRONLY)
LINES = int(sys.argv[2])
RANK = os.environ["RANK"]
ASKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def tell(what: str) -> None:
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(PIPE, f"{what} {time.monotonic_ns()} {RANK} {restart} {os.getpid()}\n".encode())


def flood() -> None:
    block = b"".join(b"line %d of a worker that prints as fast as it can\n" % i for i in range(100))
    for _ in range(LINES // 100):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(1, rest) :]


def stamp() -> None:
    for _ in range(100):
        os.write(1, f"stamp {time.monotonic_ns()}\n".encode())
        time.sleep(0.02)


signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
tell("up")
work = [flood, stamp]
while True:
    match signal.sigwait(ASKED):
        case signal.SIGUSR1:
            tell("exit")
            os._exit(3)
        case signal.SIGUSR2 if work:
            work.pop(0)()
            tell("printed")
        case signal.SIGTERM:
            tell("term")
            os._exit(0)
