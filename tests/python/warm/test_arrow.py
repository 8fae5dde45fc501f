"""Forks beside the thread of pyarrow's allocator, which warm starts allow. Needs pyarrow, which is in `build/ray`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RAY = Path(__file__).parents[3] / "build" / "ray"
FORKS = """
import os, signal, sys, threading
sys.path.append(sys.argv[1])
import pyarrow
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
assert "jemalloc_bg_thd" in names, names
pool = pyarrow.jemalloc_memory_pool()

def allocate(count):
    kept = []
    for number in range(count):
        kept.append(pyarrow.allocate_buffer(1000 + number * 7919 % 200_000, memory_pool=pool))
        del kept[:-50]

def churn():
    while True:
        allocate(1000)

for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
for number in range(1000):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a lock that a thread of the parent held would be waited for
        allocate(300)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, number
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.skipif(not (RAY / "pyarrow").is_dir(), reason="pyarrow is not installed: tools/environment.py --ray")
def test_jemalloc_allocates_in_a_thousand_forks_of_a_process_that_allocates() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, str(RAY)], timeout=1200, check=True)
