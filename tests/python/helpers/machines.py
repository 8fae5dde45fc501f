"""Machines for tests of whole clusters: network namespaces on one switch, with names, and containers on them.

    lan = stack.enter_context(Lan(tmp_path))
    machine = lan.machine("n1")
    agent = job.start(machine.container("elastic-run", ...))  # process 1 of a container whose host name is n1
    lan.lose(machine)                                         # the cable is pulled, and everything on it is killed

A machine's address is in 10.98.0.0/24, and nothing in the namespaces reaches the network of the host. ``Lan.hosts``,
which is each container's ``/etc/hosts``, is the only place where names are looked up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from helpers.holders import hold

# Runs in the container's namespaces. `/proc` is the container's own already.
CONTAINER = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
shift 2
exec "$@"
"""


class NoNamespacesError(Exception):
    """This machine does not allow what is needed. The text says which command failed."""


class Machine:
    """A network namespace with one card. The card is there until the test ends, whatever runs on it."""

    def __init__(self, lan: Lan, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.address = f"10.98.0.{number}"
        self.holder = lan._hold(*lan._under(lan.switch), "unshare", "--net")
        self._lan = lan

    def inside(self) -> list[str]:
        """Return the prefix that runs a command with this machine's network, and the host's files and processes."""
        return self._lan._under(self.holder)

    def container(self, *command: str | Path, name: str | None = None) -> list[str]:
        """Return the command that makes this one process 1 of a container. Killing it kills the whole container."""
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["sh", "-c", CONTAINER, "sh", name or self.name, str(self._lan.folder)]
        return [*self.inside(), *own, *script, *map(str, command)]

    def cut(self) -> None:
        """Pull the cable. Others see silence, not the end of connections."""
        self._lan.ip(self._lan.switch, f"link set port{self.number} down")

    def mend(self) -> None:
        self._lan.ip(self._lan.switch, f"link set port{self.number} up")


class Lan:
    """Machines on one switch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._holders: list[subprocess.Popen[str]] = []
        self._root = os.geteuid() == 0
        self._names: dict[str, str] = {}
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        self._write_hosts()

    def __enter__(self) -> Lan:
        try:
            self.switch = self._hold("unshare", *([] if self._root else ["--map-root-user"]), "--net")
            self.ip(self.switch, "link add switch type bridge", "link set switch up")
            trial = self.machine("trial")
            subprocess.run(trial.container("true"), check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            self.__exit__(None, None, None)
            raise NoNamespacesError(str(error)) from None
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for holder in self._holders:
            holder.communicate()

    def machine(self, name: str, *, known: bool = True) -> Machine:
        """Connect another machine. ``known``: its name means it from now on."""
        number = len(self._holders)
        machine = Machine(self, name, number)
        cable = f"link add port{number} type veth peer name eth0 netns {machine.holder.pid}"
        self.ip(self.switch, cable, f"link set port{number} master switch up")
        self.ip(machine.holder, f"addr add {machine.address}/24 dev eth0", "link set lo up", "link set eth0 up")
        if known:
            self.name(name, machine)
        return machine

    def name(self, name: str, machine: Machine) -> None:
        """Let a name mean this machine from now on."""
        self._names[name] = machine.address
        self._write_hosts()

    def ip(self, holder: subprocess.Popen[str], *commands: str) -> None:
        """Run commands of ``ip`` in a holder's network namespace."""
        batch = [*self._under(holder), "ip", "-batch", "-"]
        subprocess.run(batch, input="\n".join([*commands, ""]), check=True, capture_output=True, text=True)

    def lose(self, machine: Machine, *processes: int) -> None:
        """Let a machine fail: nobody hears of it again, and the containers with these processes are gone."""
        machine.cut()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def _write_hosts(self) -> None:
        # Written in place: a bind mount shows the file that it began with.
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        (self.folder / "hosts").write_text("\n".join([*lines, ""]))

    def _under(self, holder: subprocess.Popen[str]) -> list[str]:
        user = [] if self._root else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={holder.pid}", *user, "--net"]

    def _hold(self, *command: str) -> subprocess.Popen[str]:
        return hold(self._holders, *command)


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    """Give the test a switch. A machine on which there may be none skips the test."""
    try:
        with Lan(tmp_path) as lan:
            yield lan
    except NoNamespacesError as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")
