"""Functions as workers, for tests of agents. Spawned workers import this module by its name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any


def environment() -> dict[str, str]:
    return dict(os.environ)


def rank() -> int:
    return int(os.environ["RANK"])


def large() -> bytes:
    """Return more bytes than a pipe holds."""
    return bytes([rank()]) * 1_000_000


def fails(who: int, how: str) -> int:
    """Fail in one worker. The others wait until they are stopped."""
    if rank() != who:
        signal.pause()
    match how:
        case "raise":
            raise ValueError("no such luck")
        case "exit":
            sys.exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return rank()


def fails_at_first() -> int:
    """Fail in rank 0 in the first attempt, while rank 1 waits to be stopped."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0:
        fails(0, "exit")
    return restarts


def leaves_without_returning(who: int) -> int:
    """Call ``sys.exit(0)`` in one worker."""
    if rank() == who:
        sys.exit(0)
    return rank()


def leaves_at_once() -> None:
    """Leave by ``os._exit(0)``, which PyTorch's wrapper does not notice."""
    os._exit(0)


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("this cannot be read")


def unreadable() -> Any:
    return Unreadable() if rank() == 0 else rank()


def fails_over_a_name_that_is_no_text() -> None:
    raise ValueError("no file " + os.fsdecode(b"\xff"))


def unpicklable() -> Any:
    return lambda: None


def waits(folder: str) -> None:
    """Write the process id to a file, and wait to be stopped."""
    (Path(folder) / f"{rank()}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{rank()}.tmp").rename(Path(folder) / str(rank()))
    signal.pause()


def cpus() -> list[int]:
    """Return the CPUs this worker may run on."""
    return sorted(os.sched_getaffinity(0))


def is_late_at_first() -> int:
    """Exceed a PyTorch timer in rank 1, in the first attempt."""
    from torch.distributed.elastic import timer

    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0:
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=0.1 if rank() == 1 else 1000):
            signal.pause()
    return restarts


def sleeps_uninterruptibly(folder: str) -> None:
    """Wait in uninterruptible sleep in rank 1, as for a device: for a vfork child that lives on."""
    (Path(folder) / f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    libc = ctypes.CDLL(None)
    if rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torch's handler would run in the child
        libc.vfork()
    libc.pause()
