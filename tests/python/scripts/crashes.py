"""A worker that tells its steps and fails, without torch: ``crashes.py HOW [FOLDER]``.

``data``: always at step 7. ``import``: before any step. ``codes``: with another exit code each time. ``once``: at step
7 of its first life; then it waits for the file ``FOLDER/done``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import elastic_rs

how, restart = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if how == "import":
    raise ImportError("no such module")
if how == "codes":
    sys.exit(11 + restart)
for step in range(1, 8):
    elastic_rs.step(step)
if how == "data" or restart == 0:
    raise ValueError("bad data")
sys.stdout.write("RUNS\n")
sys.stdout.flush()
while not Path(sys.argv[2], "done").exists():
    time.sleep(0.02)
