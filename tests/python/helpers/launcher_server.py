"""The process that ``helpers.launchers`` forks launchers from: launcher_server.py SOCKET MARKER.

It reads requests from the socket until that is closed. A request has the launcher's arguments, environment and folder,
and two descriptors: the launcher's output, and a socket. The server sends the launcher's process id and a pidfd to that
socket, and later its wait status.
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

import torch.distributed.run  # noqa: F401 - imported once for all launchers

REQUEST_BYTES = 1 << 20
# The field of /proc/self/stat with the address of the environment; see proc(5).
ENV_START = 50


def serve(requests: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Fork a launcher for every request. Returns the request and its output in the child, None in the server."""
    gc.freeze()  # the garbage collector of a child does not touch these objects, whose pages are shared
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
                    inherited.detach()  # `launch` closes all descriptors
                return json.loads(message), output
            os.close(output)
            pidfd = os.pidfd_open(pid)
            tell(status, pid, pidfd)
            launchers[pidfd] = (pid, status)
            poll.register(pidfd, select.POLLIN)


def tell(status: socket.socket, number: int, *fds: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test no longer waits for this launcher
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
        del sys.modules[module]  # it is executed again, as __main__
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        script, *args = request["argv"]
        sys.argv, sys.path[0] = [script, *args], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def mark(name: str, env: dict[str, str]) -> None:
    """Overwrite this process's marker with the job's in `/proc/self/environ`, where the job's processes are found."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENV_START - 3])  # from field 3 on
    ours, theirs = f"{name}={os.environ[name]}".encode(), f"{name}={env[name]}".encode()
    assert len(ours) == len(theirs)
    ctypes.memmove(start + Path("/proc/self/environ").read_bytes().index(ours), theirs, len(theirs))


if __name__ == "__main__":
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked:
        launch(*asked)
