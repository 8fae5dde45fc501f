"""The process that ``helpers.launchers`` forks launchers from: launcher_server.py SOCKET MARKER.

It reads requests from the socket until that ends. A request has the launcher's arguments, environment and folder, and
comes with two descriptors: what the launcher writes to, and a socket. The server sends the launcher's process id and a
pidfd to that socket, and its wait status when it has ended.
"""

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import socket
import sys
from pathlib import Path
from typing import Any

import torch.distributed.run  # noqa: F401 - what this process is for

REQUEST_BYTES = 1 << 20
# The field of /proc/self/stat that says where /proc/self/environ begins; see proc(5).
ENV_START = 50


def serve(requests: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Fork a launcher for every request. Return the request and its output in the launcher, None at their end."""
    gc.freeze()  # collections in children leave alone what is there now, which is shared with this process
    launchers: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in launchers:
                pid, status = launchers.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                with status:
                    tell(status, os.waitpid(pid, 0)[1])
                continue
            message, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 2)
            if not message:
                return None
            output, status = fds[0], socket.socket(fileno=fds[1])
            pid = os.fork()
            if pid == 0:
                for inherited in (requests, status, *(other for _, other in launchers.values())):
                    inherited.detach()  # it is closed below, once
                return json.loads(message), output
            os.close(output)
            pidfd = os.pidfd_open(pid)
            tell(status, pid, pidfd)
            launchers[pidfd] = (pid, status)
            poll.register(pidfd, select.POLLIN)


def tell(status: socket.socket, number: int, *fds: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this launcher any more
        socket.send_fds(status, [str(number).encode()], fds)


def launch(request: dict[str, Any], output: int) -> None:
    """Become the launcher."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    mark(sys.argv[2], request["env"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["argv"][0] == "-m":
        _, module, *args = request["argv"]
        sys.argv, sys.path[0] = [module, *args], request["cwd"]
        del sys.modules[module]  # it is executed anew, as __main__
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        script, *args = request["argv"]
        sys.argv, sys.path[0] = [script, *args], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def mark(name: str, env: dict[str, str]) -> None:
    """Write the job's marker over this process's own, where `/proc` shows it: the job's processes are found by it."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENV_START - 3])  # field 2 ends there
    ours, theirs = f"{name}={os.environ[name]}".encode(), f"{name}={env[name]}".encode()
    assert len(ours) == len(theirs)
    ctypes.memmove(start + Path("/proc/self/environ").read_bytes().index(ours), theirs, len(theirs))


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked:
        launch(*asked)
