"""Fixtures of jobs whose agents a driver starts by ssh."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.procs import MARKER, Job, Process, above
from ssh_server import CannotServeError, SshServer

SCRIPTS = Path(__file__).parents[1] / "scripts"
FAMILY = SCRIPTS / "family.py"

# Rounds close and hosts are asked for soon, and an agent does not wait long for workers that ignore SIGTERM.
FAST = ("--rdzv-conf=last_call_timeout=0.5", "--discovery-interval=0.2", "--shutdown-timeout=5")

Drive = Callable[..., Process]


@pytest.fixture
def server(job: Job, tmp_path: Path, port: int) -> Iterator[SshServer]:
    """Return an SSH server that is node0, node1, ..."""
    program = os.environ.get("SSHD")
    if not program:
        pytest.skip("no sshd: `make test` gets one (tools/find_tool.py), or SSHD=/path/to/sshd names one")
    folder = tmp_path / "ssh"
    folder.mkdir()
    try:
        server = SshServer(program, folder, port, {MARKER: job.id})
    except CannotServeError as error:
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture
def drive(job: Job, tmp_path: Path) -> Drive:
    """Return a function that starts a driver: ``drive(*flags, *worker's arguments)``."""

    def drive(
        *flags: str, worker: tuple[str | Path, ...] = (), script: Path = FAMILY, cwd: Path | None = None, **env: str
    ) -> Process:
        command = [sys.executable, "-m", "elastic_rs.run", *flags, str(script), *map(str, worker)]
        env = {"ELASTIC_RS_LOG": "info", "XDG_CACHE_HOME": str(tmp_path), **env}
        if cwd is not None:
            command = ["env", f"--chdir={cwd}", *command]
        return job.start(command, name=f"driver{len(job.processes)}", env=env)

    return drive


@pytest.fixture
def drive_fast(drive: Drive, server: SshServer) -> Drive:
    """Return ``drive`` with short times, and with ``ssh`` to the server's hosts."""
    return functools.partial(drive, *FAST, f"--ssh={server.command()}")


class Listing:
    """A discovery script, and the list that it prints."""

    def __init__(self, folder: Path) -> None:
        self.list = folder / "list"
        self.script = folder / "hosts.sh"
        self.write_script(f"#!/bin/sh\nexec cat {self.list}\n")
        self.flag = f"--host-discovery-script={self.script}"

    def write(self, *hosts: str) -> None:
        new = self.list.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self.list)

    def write_script(self, text: str) -> None:
        new = self.script.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o755)
        new.rename(self.script)


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    """Return a discovery script that prints what the test says."""
    return Listing(tmp_path)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def agent_of(worker: int) -> int:
    """Return the pid of the agent on a worker's host."""
    # The worker's guard is a fork of the agent, with the same command line, and stands between the two.
    agents = [pid for pid in above(worker) if b"-c\0import sys; from elastic_rs._hosted" in command_line(pid)]
    return agents[-1]
