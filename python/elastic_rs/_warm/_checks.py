"""Why workers that are forked from a fork server would differ from executed ones."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""Files that a process which uses a GPU has open."""

HANDLES_FORKS = "jemalloc_bg_thd"
"""Name of jemalloc's thread, which pyarrow starts when it is imported: pandas, datasets, transformers.trainer do that.

jemalloc holds all its locks during a fork, and sets the child to do without that thread (``background_thread.c``,
``jemalloc.c``: ``pthread_atfork``). ``tests/python/warm/test_arrow.py`` forks a thousand times while it allocates.
"""

LINES = ("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[io_uring]")
"""Files through which a process communicates. Those that a worker opens after its fork are its own."""


def why_not() -> str:
    """Return what makes forks of this process useless, if anything."""
    return _device() or _threads()


def _threads() -> str:
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            threads[int(thread)] = file.read().strip()
    del threads[os.getpid()]
    threads = {thread: name for thread, name in threads.items() if name != HANDLES_FORKS}
    if not threads:
        return ""
    import threading

    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = ", ".join(f"{known.get(thread, name)} ({thread})" for thread, name in threads.items())
    return f"its imports started threads, which a fork does not copy: {names}"


def _device() -> str:
    for name in ("torch.cuda", "torch.xpu"):
        device = sys.modules.get(name)
        if device is not None and getattr(device, "is_initialized", bool)():
            return f"its imports initialised {name}, which a fork cannot use"
    for path in _open_files().values():
        if path.startswith(DEVICES):
            return f"its imports opened {path}, which a fork cannot use"
    return ""


class Shared:
    """What forked workers would share or lose, and executed ones would not. Made before imports."""

    def __init__(self) -> None:
        self._folder = os.stat(".")
        self._files = _open_files()
        self._memory = _shared_memory()

    def why_not(self) -> str:
        """Return what that is, if anything. Another worker may have read from it, or have locked it for ever."""
        if children := _children():
            return f"its imports started processes, which would belong to no worker: {', '.join(children)}"
        for fd, path in _open_files().items():
            if path.startswith(LINES) and self._files.get(fd) != path:
                return f"its imports opened {path}, which all workers would share"
        for path in _shared_memory() - self._memory:
            return f"its imports made memory that all workers would share (a lock of multiprocessing, say): {path}"
        if not os.path.samestat(self._folder, os.stat(".")):
            return "its imports changed the working directory, which workers are set back to"
        if signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
            return "its imports handle SIGCHLD, which this process gets for other workers"
        return ""


def _open_files() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _shared_memory() -> set[str]:
    """Return the files behind mappings that are both shared and writable."""
    with open("/proc/self/maps", "rb") as file:
        fields = (os.fsdecode(line).split(maxsplit=5) for line in file)
        return {field[-1].strip() for field in fields if field[1][1] + field[1][3] == "ws"}


def _children() -> list[str]:
    """Return names and process ids of this process's children."""
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
