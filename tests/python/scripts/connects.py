"""A worker that connects to the worker store when its world has restarted; rank 1 of the first one kills itself."""

import os
import signal
import socket

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
store.sendall(b"\x00\xce\xf7\x85\x3c")  # a client of PyTorch's begins so
signal.pause()
