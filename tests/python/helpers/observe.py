"""Jobs that are observed: the commands of ``elastic-rs``, and what to wait for before they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .workers import place

if TYPE_CHECKING:
    from .procs import Process


def ask(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_rs", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}, check=False
    )


def again(nodes: list[Process]) -> None:
    """Wait until the workers of the second round run."""
    for node in nodes:
        place(node, 4, since=next(at for at, line in enumerate(node.lines) if line.startswith("WORKER")) + 2)


def is_connected(process: Process, port: int) -> bool:
    """Whether the process has a connection to this port of the machine, by ``/proc``."""
    try:
        open_files = {str(file.readlink()) for file in Path(f"/proc/{process.pid}/fd").iterdir()}
    except OSError:
        return False
    established = "01"
    for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        if state == established and int(remote.partition(":")[2], 16) == port and f"socket:[{inode}]" in open_files:
            return True
    return False
