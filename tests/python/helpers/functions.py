"""Entry points for agents' tests. Workers that are spawned import this module by its name."""

from __future__ import annotations

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
    """Return more than a pipe holds."""
    return bytes([rank()]) * 1_000_000


def fails(who: int, how: str) -> int:
    """Have one worker fail; the others wait until they are stopped."""
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
    """Have rank 0 fail in the first attempt, while rank 1 waits to be stopped."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0:
        fails(0, "exit")
    return restarts


def leaves_without_returning(who: int) -> int:
    """One worker calls ``sys.exit(0)``."""
    if rank() == who:
        sys.exit(0)
    return rank()


class Unreadable:
    """Can be pickled, but not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("this cannot be read")


def unreadable() -> Any:
    return Unreadable() if rank() == 0 else rank()


def waits(folder: str) -> None:
    """Say who this is and wait to be stopped."""
    (Path(folder) / f"{rank()}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{rank()}.tmp").rename(Path(folder) / str(rank()))
    signal.pause()
