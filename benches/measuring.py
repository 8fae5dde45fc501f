"""Common functions of the benchmarks: CPU time and memory of processes, and writing results."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().with_name("results")


def machine() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads, ended ones included, without its children."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names


def pss_bytes(pid: int) -> int:
    """Return the memory of a process as its proportional set size (PSS), which divides shared pages among processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def keep(result: dict[str, Any], path: Path) -> None:
    """Write a result, and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
