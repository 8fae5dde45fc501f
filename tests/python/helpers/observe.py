"""Jobs that are observed: the commands of ``elastic-rs``, and what to wait for before they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from .workers import place

if TYPE_CHECKING:
    from pathlib import Path

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
