"""Hosts that a list, a program or a file names."""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from elastic_rs._durations import Duration, as_seconds
from elastic_rs._elastic_rs import parse_hosts
from elastic_rs.discovery._programs import MOST_BYTES, DiscoveryError, printed_by


class HostDiscovery(ABC):
    """Finds the hosts of a job. A subclass says which there are. It is Horovod's class of that name.

    >>> from elastic_rs.discovery import HostDiscovery, HostManager
    >>> class Mine(HostDiscovery):
    ...     def find_available_hosts_and_slots(self):
    ...         return {"node1": 8, "node2": 8}
    >>> manager = HostManager(Mine())
    >>> manager.update_available_hosts().name
    'added'
    >>> manager.current_hosts.count_available_slots()
    16
    """

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the hosts that may be used now, each with the number of its workers, in the order of their ranks.

        It is called again and again, by one thread. An exception means that nothing is known now: the last list stays.
        The thread of ``elastic-run`` blocks all signals, and programs that this method starts begin with them blocked.
        """


class FixedHosts(HostDiscovery):
    """Hosts that are given, and change only by :meth:`set`. ``elastic-run`` asks for them once.

    Args:
        host_slots: the hosts, each with the number of its workers, in the order of their ranks.
    """

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Give other hosts, as Horovod's tests do.

        Args:
            host_slots: the hosts, each with the number of its workers, in the order of their ranks.
        """
        self._hosts = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that were given last."""
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """Hosts that a program prints: ``HOST`` or ``HOST:SLOTS`` in each line.

    Args:
        discovery_script: the program; a text may have arguments, as on a command line.
        slots: of a host without a number.
        timeout_s: limit for one run: a ``timedelta``, or seconds. A program that takes longer, or prints more than
            1 MiB, is killed with all that it has started.

    Raises:
        ValueError: the text is empty, or has what only a shell understands.
    """

    def __init__(self, discovery_script: str | os.PathLike[str], slots: int = 1, *, timeout_s: Duration = 30.0) -> None:
        text = os.fspath(discovery_script)
        is_path = bool(text) and Path(text).exists()
        self._command = [text] if is_path else shlex.split(text)
        if not self._command:
            raise ValueError("the discovery script is empty, must be a program")
        if not is_path and (sign := _sign_of_a_shell(text)):
            raise ValueError(
                f"the discovery script is `{text}`, and no shell runs it, which `{sign}` is for: make a script of it, "
                f"or use {shlex.join(['sh', '-c', text])}"
            )
        if Path(self._command[0]).exists():
            self._command[0] = os.path.abspath(self._command[0])  # noqa: PTH100 - links stay as they are
        self._slots = slots
        self._timeout_s = as_seconds("timeout_s", timeout_s)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the program, and return what it prints.

        Raises:
            DiscoveryError: it did not start, failed, took too long or printed something else.
        """
        text = printed_by(self._command, self._timeout_s)
        return _parsed(f"`{shlex.join(self._command)}` printed", text, "lines", self._slots)


def _sign_of_a_shell(text: str) -> str | None:
    """Return the first thing in a command line that only a shell understands. Quoted, it is an argument."""
    for part in _PARTS.finditer(text):
        # A shell replaces commands inside double quotes too.
        sign = _REPLACED.search(_ESCAPED.sub("", part[0])) if part.lastgroup == "quoted" else part
        if sign and part.lastgroup:
            return sign[0].strip()
    return None


_REPLACED = re.compile(r"\$\(|`")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_PARTS = re.compile(
    rf"""{_ESCAPED.pattern}|'[^']*'|(?P<quoted>"(?:{_ESCAPED.pattern}|[^"])*")"""
    rf"""|(?P<sign>{_REPLACED.pattern}|[|&;<>()]+|\A\s*[A-Za-z_]\w*=)""",
    re.DOTALL,
)
"""What is quoted or escaped, and what a shell understands elsewhere."""


class FileHosts(HostDiscovery):
    """The hosts in a file, as for ``--hostfile``. The file is read again at each call.

    Args:
        path: the file. A relative one is below the folder of this process as it is now.
        slots: of a host without a number.
    """

    def __init__(self, path: str | os.PathLike[str], slots: int = 1) -> None:
        self._path = Path(path).absolute()
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts in the file.

        Raises:
            DiscoveryError: it cannot be read, or has something else.
        """
        try:
            with self._path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"`{self._path}` cannot be read: {error.strerror}") from None
        if len(content) > MOST_BYTES:
            raise DiscoveryError(f"`{self._path}` has more than {MOST_BYTES} bytes, the limit of a list")
        return _parsed(f"`{self._path}`:", content.decode(errors="replace"), "hostfile", self._slots)


def _parsed(what: str, text: str, form: str, slots: int) -> dict[str, int]:
    try:
        return dict(parse_hosts(text, form=form, default_slots=slots))
    except ValueError as error:
        raise DiscoveryError(f"{what} {error}") from None
