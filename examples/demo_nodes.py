"""What the demos are made of: their lines on the terminal, and the processes that they start."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
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


def free_endpoint() -> str:
    """Return an endpoint with a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class DemoError(Exception):
    """The job did not do what the demo shows."""


class ShortDemo:
    """A demo of one thing: it starts nodes, follows what they print, and says at the end what held.

    Args:
        args: with ``time_limit``, in seconds.
        folder: for its files, which are removed at the end.
    """

    ENDS: ClassVar = {0}
    """Exit codes with which an agent may end."""
    VARIABLES: ClassVar[dict[str, str]] = {}
    """Further environment variables of the agents."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.account = Account()
        self.marker = uuid.uuid4().hex
        self.nodes: dict[str, Node] = {}
        self.lines: queue.Queue[Line] = queue.Queue()
        self.endpoint = free_endpoint()

    def run(self) -> None:
        """Show it."""
        raise NotImplementedError

    def on_line(self, line: Line) -> None:
        """Act on a line of a node. Its end, here, is said."""
        if line.text is None:
            code = self.nodes[line.node].process.wait()
            self.account.say(line.node, f"agent ended with exit code {code}", "bad" if code else "plain", line.at)

    def say(self, text: str) -> None:
        self.account.say("demo", text, "event")

    def start(self, name: str, address: str, flags: list[str], script: Path, *args: str) -> None:
        """Start a node. The first one's flags are shown."""
        if not self.nodes:
            self.account.say("demo", f"elastic-run {shlex.join(flags)} … {script.name}", "dim")
        command = [
            sys.executable, "-m", "elastic_rs.run", *flags,
            "--rdzv-backend=rust-c10d", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=demo",
            f"--local-addr={address}", str(script), *args,
        ]  # fmt: skip
        env = os.environ | {
            MARKER: self.marker,
            "GLOO_SOCKET_IFNAME": "lo",  # the host name of this machine may not resolve
            "OMP_NUM_THREADS": "1",
            **self.VARIABLES,
        }
        self.nodes[name] = Node.start(name, command, env, self.folder / f"node-{name}.log", self.lines)
        self.account.say(name, f"agent started at {address} (pid {self.nodes[name].process.pid})")

    def follow(self, until: Callable[[], bool]) -> None:
        """Process the nodes' output until the condition holds. Fails if a node fails, or at the time limit."""
        while not until():
            self.check()
            try:
                self.on_line(self.lines.get(timeout=0.2))
            except queue.Empty:
                continue
        while not self.lines.empty():
            self.on_line(self.lines.get())

    def check(self) -> None:
        if time.monotonic() > self.account.started + self.args.time_limit:
            raise DemoError(f"not finished within {self.args.time_limit:.0f} s (--time-limit)")
        for name, node in self.nodes.items():
            if (code := node.process.poll()) is not None and code not in self.ENDS:
                raise DemoError(f"the agent of node {name} ended with exit code {code}")

    def have_ended(self, *names: str) -> bool:
        return all(self.nodes[name].process.poll() is not None for name in names)

    def ask(self, *command: str, shows: str) -> str:
        """Return what a command of ``elastic-rs`` shows about the job, once it shows this."""
        while True:
            self.check()
            words = [sys.executable, "-m", "elastic_rs", *command, self.endpoint]
            shown = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, check=False).stdout
            if re.search(shows, shown):
                self.follow(until=lambda: True)
                return shown

    def show(self, *command: str, shows: str) -> str:
        """The same, and show it."""
        shown = self.ask(*command, shows=shows)
        self.say(f"$ elastic-rs {' '.join(command)} {self.endpoint}")
        for line in shown.splitlines():
            self.account.say("", line)
        return shown

    def verify(self, expectations: list[tuple[object, str]]) -> None:
        """Say what held.

        Raises:
            DemoError: something did not.
        """
        print()
        for held, text in expectations:
            print(self.account.paint(f"  {'ok    ' if held else 'FAILED'}  {text}", "good" if held else "bad"))
        if not all(held for held, _ in expectations):
            raise DemoError("not everything happened as it should")


def present(demo_of: Callable[[argparse.Namespace, Path], ShortDemo], args: argparse.Namespace) -> int:
    """Run a demo, and return the exit code. No process of it is left then."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # end in the same orderly way as for Ctrl-C
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="elastic_rs-demo-", ignore_cleanup_errors=True) as folder:
        demo = demo_of(args, Path(folder))
        try:
            demo.run()
        except DemoError as error:
            for node in demo.nodes.values():
                print(f"\n--- node {node.name}: the last lines ---", *node.log.read_text().splitlines()[-30:], sep="\n")
            print(demo.account.paint(f"\nFAILED: {error}", "bad"))
            return 1
        except KeyboardInterrupt:
            demo.account.say("demo", "interrupted", "bad")
            return 130
        finally:
            # A second Ctrl-C must not leave processes behind.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            stop(list(demo.nodes.values()), demo.marker)
    print(f"\ndone in {time.monotonic() - demo.account.started:.0f} s")
    return 0
