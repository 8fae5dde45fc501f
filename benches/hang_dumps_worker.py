"""A worker that does not end by SIGTERM, in one of ten ways: ``hang_dumps_worker.py READY_FOLDER``. Needs no torch.

Its local rank says in which. It makes the file READY_FOLDER/RANK just before.
"""

import ctypes
import os
import platform
import re
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

LIBC = ctypes.PyDLL(None)  # its functions keep the GIL
CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
CLONE_VFORK = 0x4000


def asleep() -> None:
    time.sleep(3600)


def stopped() -> None:
    """Stay stopped: SIGCONT, which comes with SIGTERM, continues it for a moment."""
    signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


def busy() -> None:
    while True:
        pass


def gil_held() -> None:
    LIBC.sleep(3600)


def backtracks() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def reads_pipe() -> None:
    os.read(os.pipe()[0], 1)


def polls() -> None:
    ours, _theirs = socket.socketpair()
    select.select([ours], [], [])


def threads() -> None:
    for _ in range(7):
        threading.Thread(target=asleep).start()
    asleep()


def uninterruptible() -> None:
    """Stand in the D state: the parent of a `vfork` waits until its child runs another program, or ends."""
    if LIBC.syscall(CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(3600)


KINDS = (asleep, stopped, busy, gil_held, backtracks, locked, reads_pipe, polls, threads, uninterruptible)
STATES = {"stopped": "T", "busy": "R", "backtracks": "R", "uninterruptible": "D"}
"""The state in which the kernel has each. Others sleep: S."""


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = os.environ["LOCAL_RANK"]
    Path(sys.argv[1], rank).touch()
    KINDS[int(rank) % len(KINDS)]()


if __name__ == "__main__":
    main()
