"""Real processes in tests: start torchrun, wait for lines of its output, signal it, and leave no process behind.

    def test_two_nodes(job):
        a = job.torchrun("--nnodes=2", "--rdzv-backend=rust-c10d", ..., script, name="A")
        b = job.torchrun(..., name="B")
        a.line(r"epoch 3/")
        b.signal(signal.SIGKILL)
        assert a.wait() == 0

Every process of a job and its descendants have the same environment variable. It identifies orphans too, whatever
their parent is. At the end of the test all remaining processes are killed. If there were any although the test had
passed, the test fails. So a test must end its processes, with ``wait`` or ``kill_leftovers``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType

import pytest

from .launchers import Forked, Server, is_launcher

MARKER = "ELASTIC_RS_TEST_ID"
# Generous, because six processes that import torch on two cores take a while. A test that passes does not wait for it.
LIMIT_S = 240.0
# Time for workers to end after the last torchrun of a job has ended.
SETTLE_S = 3.0
TAIL_LINES = 40


DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",  # the host name of the machine may not resolve
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@functools.cache
def _fork_server() -> Server:
    server = Server({**os.environ, **DEFAULTS, MARKER: "0" * len(uuid.uuid4().hex)}, MARKER)
    atexit.register(server.close)
    return server


class Process:
    """A process of a job. Its stdout and stderr are kept, and written to one log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes] | Forked, output: int, log: Path) -> None:
        self.name = name
        self.log = log
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._process = process
        self._output = output
        self._reader = threading.Thread(target=self._read, name=f"reader-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._output, "rb") as output, self.log.open("wb", buffering=0) as log:
            for raw in output:
                log.write(raw)
                with self._changed:
                    self._lines.append(raw.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def lines(self) -> list[str]:
        """The lines so far."""
        with self._changed:
            return list(self._lines)

    def mark(self) -> int:
        """Return the index of the next line of output, for ``line(..., since=mark)``."""
        with self._changed:
            return len(self._lines)

    def line(
        self,
        pattern: str,
        *,
        since: int = 0,
        limit_s: float = LIMIT_S,
        where: Callable[[re.Match[str]], bool] = lambda _: True,
    ) -> re.Match[str]:
        """Wait for a line that matches the pattern, and return the match.

        Lines before ``since`` do not count, nor matches of which ``where`` is false.
        """
        wanted = re.compile(pattern)
        deadline = time.monotonic() + limit_s
        position = since
        with self._changed:
            while True:
                for text in self._lines[position:]:
                    position += 1
                    if (match := wanted.search(text)) and where(match):
                        return match
                if self._ended:
                    raise AssertionError(f"{self.name}: output ended without a line like `{pattern}`\n{self._tail()}")
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise AssertionError(f"{self.name}: no line like `{pattern}` in {limit_s} s\n{self._tail()}")

    def wait(self, *, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the process and return its exit code (the negated number of a signal that ended it)."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended in {limit_s} s\n{self.tail()}") from None
        # Complete `lines`. The wait has a limit, because an orphan may hold the pipe open.
        self._reader.join(SETTLE_S)
        return code

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tail(self) -> str:
        """Return the last lines of the output, for a failure message."""
        with self._changed:
            return self._tail()

    def _tail(self) -> str:
        return (
            "\n".join(f"    {self.name}| {text}" for text in self._lines[-TAIL_LINES:]) or f"    {self.name}| (nothing)"
        )

    def _reap(self) -> None:
        self._process.wait()
        self._reader.join()


class Job:
    """The processes of one test. Leaving the ``with`` block ends all of them, and checks that none was left."""

    def __init__(self, log_directory: Path, *, cold: bool = False) -> None:
        self.log_directory = log_directory
        self.cold = cold
        self.id = uuid.uuid4().hex
        self.processes: list[Process] = []

    def torchrun(self, *args: str | Path, name: str | None = None, env: dict[str, str] | None = None) -> Process:
        """Start ``torchrun`` with these arguments."""
        return self.start([sys.executable, "-m", "torch.distributed.run", *map(str, args)], name=name, env=env)

    def start(self, command: list[str], *, name: str | None = None, env: dict[str, str] | None = None) -> Process:
        """Start any other program."""
        name = name or f"process-{len(self.processes)}"
        env = {**os.environ, **DEFAULTS, MARKER: self.id, **(env or {})}
        output, theirs = os.pipe()
        if not self.cold and is_launcher(command) and _fork_server().can(env):
            process: subprocess.Popen[bytes] | Forked = Forked(_fork_server(), command, env, theirs)
        else:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to its group does not reach pytest
            )
        os.close(theirs)
        self.processes.append(Process(name, process, output, self.log_directory / f"{name}.log"))
        return self.processes[-1]

    def pids(self) -> list[int]:
        """Return every living process of the job: the started ones, their descendants, and orphans."""
        return [pid for pid, _ in self._marked()]

    def workers(self, agent: Process | None = None) -> dict[int, int]:
        """Return the workers' process ids by global rank, of one torchrun or of the whole job."""
        agents = {process.pid for process in self.processes if agent in (None, process)}
        marked = dict(self._marked())
        found = {}
        for pid, env in marked.items():
            parent = _parent(pid)
            # A worker's own children inherit RANK too.
            if "RANK" in env and "RANK" not in marked.get(parent, {}) and {*above(pid)} & agents:
                found[int(env["RANK"])] = pid
        return dict(sorted(found.items()))

    def until_gone(self, *pids: int) -> None:
        """Wait until these processes have ended."""
        _wait_for_end(list(pids), LIMIT_S)
        left = {*pids} & {*self.pids()}
        assert not left, f"still alive: {[_describe(pid) for pid in left]}"

    def kill_leftovers(self) -> list[str]:
        """Kill every process of the job, and return a description of each."""
        killed: dict[int, str] = {}
        while left := self.pids():
            for pid in left:
                killed.setdefault(pid, _describe(pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_for_end(left, SETTLE_S)  # and look again: one of them may have been forking
        for process in self.processes:
            process._reap()
        return list(killed.values())

    def _marked(self) -> Iterator[tuple[int, dict[str, str]]]:
        needle = f"{MARKER}={self.id}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                variables = (entry / "environ").read_bytes().split(b"\0")
                if needle in variables:
                    pairs = (variable.decode(errors="replace").partition("=") for variable in variables if variable)
                    yield int(entry.name), {name: value for name, _, value in pairs}

    def finish(self, *, passed: bool) -> None:
        """End the job. Raises if the test has passed but processes had to be killed."""
        if passed and not any(process.running for process in self.processes):
            _wait_for_end(self.pids(), SETTLE_S)
        killed = self.kill_leftovers()
        if killed and passed:
            tails = "\n".join(process.tail() for process in self.processes)
            raise AssertionError("left behind and killed:\n    " + "\n    ".join(killed) + "\n" + tails)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            for process in self.processes:
                error.add_note(process.tail())
        self.finish(passed=kind is None)


def above(pid: int) -> Iterator[int]:
    """Yield the ancestors that may be a worker's agent: between them are guards and, with warm starts, a template."""
    for _ in range(4):
        pid = _parent(pid)
        yield pid


def _parent(pid: int) -> int:
    try:
        # The name in parentheses may contain anything, so parse the fields after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = ["(ended)"]
    return f"pid {pid}, child of {_parent(pid)}: {' '.join(words).strip()[:200]}"


def _wait_for_end(pids: list[int], limit_s: float) -> None:
    """Return when all processes have ended, or after the limit. They need not be children of this process."""
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                stack.callback(os.close, fd)
                poll = select.poll()
                poll.register(fd, select.POLLIN)  # readable once the process has ended
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


_PASSED = pytest.StashKey[bool]()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """Give the test a job. Its processes are gone when the test ends, however it ends."""
    job = Job(tmp_path, cold=request.node.get_closest_marker("cold") is not None)
    yield job
    job.finish(passed=request.node.stash.get(_PASSED, False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record for the fixture whether the test passed, and show the output of its processes if it did not."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
        job = getattr(item, "funcargs", {}).get("job")
        if report.failed and isinstance(job, Job):
            report.sections += [(f"{process.name}: {process.log}", process.tail()) for process in job.processes]
    return report
