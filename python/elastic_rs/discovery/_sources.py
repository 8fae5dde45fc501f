"""Hosts that a list, a program or a file names."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, TYPE_CHECKING

from elastic_rs._elastic_rs import parse_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DiscoveryError", "FileHosts", "FixedHosts", "HostDiscovery", "HostDiscoveryScript"]

MOST_BYTES = 1 << 20
"""Most bytes that are read of a list."""


class DiscoveryError(RuntimeError):
    """Hosts cannot be found now. The message says why."""


class HostDiscovery(ABC):
    """Finds the hosts of a job."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the hosts that may be used now, each with the number of its workers, in the order of their ranks.

        It is called again and again, by one thread. An exception means that nothing is known now: the last list stays.
        """


class FixedHosts(HostDiscovery):
    """Hosts that never change."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that it was made with."""
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """Hosts that a program prints: ``HOST`` or ``HOST:SLOTS`` in each line.

    Args:
        discovery_script: the program; a text may have arguments, as on a command line.
        slots: of a host without a number.
        timeout_s: limit for one run. A program that takes longer is killed with all that it has started.
    """

    def __init__(self, discovery_script: str | os.PathLike[str], slots: int = 1, *, timeout_s: float = 30.0) -> None:
        text = os.fspath(discovery_script)
        self._command = [text] if text and Path(text).exists() else shlex.split(text)
        if not self._command:
            raise ValueError("the discovery script is empty, must be a program")
        if Path(self._command[0]).exists():
            self._command[0] = os.path.abspath(self._command[0])  # noqa: PTH100 - links stay as they are
        self._slots = slots
        self._timeout_s = timeout_s

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the program, and return what it prints.

        Raises:
            DiscoveryError: it did not start, failed, took too long or printed something else.
        """
        shown = shlex.join(self._command)
        # Files, and not pipes: what the program has started in the background may hold them open.
        with _unnamed_file() as out, _unnamed_file() as err:
            try:
                process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                raise DiscoveryError(f"`{shown}` cannot be run: {error.strerror}") from None
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise DiscoveryError(f"`{shown}` has not ended within {self._timeout_s:g} s, and was killed") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code:
                words = _text(err).strip().splitlines()
                said = f": {words[-1][:200]}" if words else ""
                how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
                raise DiscoveryError(f"`{shown}` has ended with {how}{said}")
            return _parsed(f"`{shown}` printed", _text(out), "lines", self._slots)


class FileHosts(HostDiscovery):
    """Hosts that a file names, as ``--hostfile``. The file may change, and is read again then."""

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
                text = _text(file)
        except OSError as error:
            raise DiscoveryError(f"`{self._path}` cannot be read: {error.strerror}") from None
        return _parsed(f"`{self._path}`:", text, "hostfile", self._slots)


def _unnamed_file() -> IO[bytes]:
    import tempfile

    return tempfile.TemporaryFile()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DiscoveryError(f"a list of hosts has more than {MOST_BYTES} bytes")
    return content.decode(errors="replace")


def _parsed(what: str, text: str, form: str, slots: int) -> dict[str, int]:
    try:
        return dict(parse_hosts(text, form=form, default_slots=slots))
    except ValueError as error:
        raise DiscoveryError(f"{what} {error}") from None
