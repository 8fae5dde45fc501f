"""Fork PyTorch's launcher from a process that has imported it, which saves 3 s of a core for every start.

A forked launcher runs ``torch.distributed.run`` as ``__main__``, with its own arguments, environment, session and
streams. It differs from an executed one in two points. ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are the fork
server's, except for the marker of the job. And the launcher's imports, with this package's entry point, are done
already.

Launchers are executed in tests that are marked ``cold``, behind another command, and with environment variables that
a process reads only when it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

SERVER = Path(__file__).with_name("launcher_server.py")
# A script that changes its process, and then runs the launcher.
SCRIPT = Path(__file__).parents[1] / "scripts" / "launch.py"
# Prefixes of variables that the interpreter, the loader and libraries read before the launcher's first line.
READ_EARLY = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH_", "LOGLEVEL")
REQUEST_BYTES = 1 << 20


def is_launcher(command: list[str]) -> bool:
    """Whether this command runs only PyTorch's launcher."""
    return command[0] == sys.executable and (
        command[1:3] == ["-m", "torch.distributed.run"] or command[1:2] == [str(SCRIPT)]
    )


class Forked:
    """A child of a fork server, with the methods of ``subprocess.Popen`` that ``helpers.procs`` uses."""

    def __init__(self, server: Server, command: list[str], env: dict[str, str], output: int) -> None:
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server.ask({"argv": command[1:], "env": env, "cwd": str(Path.cwd())}, [output, theirs.fileno()])
        pid, (self._pidfd,), _, _ = socket.recv_fds(self._status, 64, 1)
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(64)))
            self._status.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                signal.pidfd_send_signal(self._pidfd, number)


class Server:
    """A fork server of launchers. It ends with this process, because its socket closes then."""

    def __init__(self, env: dict[str, str], marker: str) -> None:
        self._env = env
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        with theirs:
            command = [sys.executable, str(SERVER), str(theirs.fileno()), marker]
            pass_fds, stdin = [theirs.fileno()], subprocess.DEVNULL
            self._process = subprocess.Popen(command, env=env, stdin=stdin, pass_fds=pass_fds, start_new_session=True)

    def can(self, env: dict[str, str]) -> bool:
        """Whether a launcher with this environment can be forked here."""
        return _early(env) == _early(self._env)

    def ask(self, request: dict[str, object], fds: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _early(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_EARLY)}
