"""Why forks of a template would not be as good as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

__all__ = ["Shared", "why_not"]

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""What a process that uses a GPU has open."""

LINES = ("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[io_uring]")
"""What a process talks through. Who opens it when it is forked already has it to itself."""


def why_not() -> str:
    """Say what makes a fork of this process useless, if anything."""
    return _threads() or _device()


def _threads() -> str:
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            threads[int(thread)] = file.read().strip()
    del threads[os.getpid()]
    if not threads:
        return ""
    import threading

    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = ", ".join(f"{known.get(thread, name)} ({thread})" for thread, name in threads.items())
    return f"what it has imported started threads, which no fork takes along: {names}"


def _device() -> str:
    for name in ("torch.cuda", "torch.xpu"):
        device = sys.modules.get(name)
        if device is not None and getattr(device, "is_initialized", bool)():
            return f"what it has imported initialised {name}, which no fork can use"
    for path in _open_files().values():
        if path.startswith(DEVICES):
            return f"what it has imported opened {path}, which no fork can use"
    return ""


class Shared:
    """What forks would have in common, or lose, though processes that import the same do not. Made before imports."""

    def __init__(self) -> None:
        self._folder = os.stat(".")
        self._files = _open_files()
        self._memory = _shared_memory()

    def why_not(self) -> str:
        """Say what that is, if anything: what another worker has read from, or has locked, perhaps for ever."""
        if children := _children():
            return f"what it has imported started processes, which would be no worker's own: {', '.join(children)}"
        for fd, path in _open_files().items():
            if path.startswith(LINES) and self._files.get(fd) != path:
                return f"what it has imported opened {path}, which all workers would share"
        for path in _shared_memory() - self._memory:
            return (
                f"what it has imported made memory that all workers would share, as locks between processes do: {path}"
            )
        if not os.path.samestat(self._folder, os.stat(".")):
            return "what it has imported changed the folder, to which workers are brought back"
        if signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
            return "what it has imported handles SIGCHLD, which this process gets for other workers"
        return ""


def _open_files() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _shared_memory() -> set[str]:
    """Return the files behind memory that is both shared and writable."""
    with open("/proc/self/maps", "rb") as file:
        fields = (os.fsdecode(line).split(maxsplit=5) for line in file)
        return {field[-1].strip() for field in fields if field[1][1] + field[1][3] == "ws"}


def _children() -> list[str]:
    """Return names and numbers of this process's children."""
    try:
        with open("/proc/thread-self/children") as file:
            pids = file.read().split()
    except OSError:  # a kernel without that list
        return []
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            found.append(f"{file.read().strip()} ({pid})")
    return found
