"""What examples/demo.py is made of: its lines on the terminal, and the processes that it starts."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

# Every process of the demo inherits this variable, also workers and their children, so that all are found at the end.
MARKER = "ELASTIC_DEMO_ID"


class Account:
    """Prints events, one aligned line each: elapsed time, node, text."""

    STYLES: ClassVar = {"plain": "", "dim": "\033[2m", "event": "\033[1;36m", "good": "\033[32m", "bad": "\033[1;31m"}

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def say(self, who: str, text: str, style: str = "plain", at: float | None = None) -> None:
        line = f"{(at or time.monotonic()) - self.started:6.1f} s  {who:<4}  {text}"
        print(self.paint(line, style), flush=True)

    def paint(self, text: str, style: str) -> str:
        return f"{self.STYLES[style]}{text}\033[0m" if self.coloured and self.STYLES[style] else text


@dataclass
class Line:
    """A line of output of a node or its workers. Without a text, the node's output has ended."""

    node: str
    text: str | None
    at: float


@dataclass
class Node:
    """One torchrun process. Its output goes to a file and, line by line, to the queue."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    started_at: float

    @classmethod
    def start(cls, name: str, command: list[str], env: dict[str, str], log: Path, lines: queue.Queue[Line]) -> Node:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the demo, which then stops the nodes
        )
        node = cls(name, log, process, time.monotonic())
        threading.Thread(target=node._read, args=(lines,), name=f"reader-{name}", daemon=True).start()
        return node

    def _read(self, lines: queue.Queue[Line]) -> None:
        assert self.process.stdout is not None
        with self.log.open("wb", buffering=0) as log:
            for raw in self.process.stdout:
                log.write(raw)
                lines.put(Line(self.name, raw.decode(errors="replace").rstrip(), time.monotonic()))
        lines.put(Line(self.name, None, time.monotonic()))


def processes_of(marker: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the id and the environment of each living process that was started with the marker."""
    needle = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                variables = (entry / "environ").read_bytes().split(b"\0")
                if needle in variables:
                    pairs = (variable.decode(errors="replace").partition("=") for variable in variables if variable)
                    yield int(entry.name), {name: value for name, _, value in pairs}


def parent_of(pid: int) -> int:
    # The second field of `stat` is the program's name, which may contain anything, so parse the fields after it.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stop(nodes: list[Node], marker: str, grace_s: float = 12.0) -> None:
    """End the nodes and their descendants: SIGTERM to each torchrun, then SIGKILL to all remaining processes."""
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
    deadline = time.monotonic() + grace_s
    for node in nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(max(0.0, deadline - time.monotonic()))
    # Workers lead sessions, and outlive a killed torchrun. Repeat, because a process may be forking.
    while left := [pid for pid, _ in processes_of(marker)]:
        for pid in left:
            with contextlib.suppress(OSError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        time.sleep(0.05)
    for node in nodes:
        node.process.wait()
