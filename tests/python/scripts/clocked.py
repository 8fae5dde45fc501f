"""A worker that writes down when it ran: ``clocked.py FOLDER``. With ``--stubborn`` it ignores SIGTERM.

The file ``FOLDER/PID`` has the instants of its first and of its last step, on the machine's monotonic clock.
"""

import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
path = Path(sys.argv[1]) / str(os.getpid())
path.write_bytes(struct.pack("dd", time.monotonic(), time.monotonic()))
with path.open("r+b") as file:
    steps = mmap.mmap(file.fileno(), 16)
# One write for the whole line: the agent logs into the same pipe.
os.write(1, f"WORKER world={os.environ['WORLD_SIZE']} rank={os.environ['RANK']} pid={os.getpid()}\n".encode())
while True:
    struct.pack_into("d", steps, 8, time.monotonic())
    time.sleep(0.002)
