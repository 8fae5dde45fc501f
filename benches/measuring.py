"""What the benchmarks have in common: what processes take, and where results go."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().with_name("results")


def machine() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"


def cpu_s(pid: int) -> float:
    """CPU time of a process with all the threads it has had, without its children."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names


def pss_bytes(pid: int) -> int:
    """Memory of a process, as its share of what is mapped: shared pages count once among those who share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def keep(result: dict[str, Any], path: Path) -> None:
    """Write a result, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
