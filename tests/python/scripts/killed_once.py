"""A worker that prints a line when its world has restarted; rank 1 of the first one kills itself."""

import os
import signal

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
os.write(1, b"a worker's line\n")  # in one piece
