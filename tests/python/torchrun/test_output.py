"""What workers print: on the consoles of their agents, and in the report of a failure."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from helpers.stores import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.procs import Process

    from .conftest import Start

pytestmark = [pytest.mark.torchrun]
both = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
run_alone = pytest.mark.parametrize("agent", ["run"], indirect=True)

# As tqdm draws it. It draws its last state again when it is collected, after the traceback.
BAR = """
import sys
bar = lambda state: sys.stderr.write(f"\\r{state // 3:3d}%|{'#' * 60}| {state}/300 [00:01<00:02, 99.9it/s]")
for state in range(300):
    bar(state)
"""
RAISES = """
import atexit
atexit.register(lambda: (bar(299), sys.stderr.write("\\n")))
raise ValueError("boom")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def reason_of(node: Process) -> str:
    """Return the failure as the node's log has it: its own as it stops its workers, another's as the job ends."""
    return node.line(r"(?:stopping all workers|the job has failed): (.*)")[1]


def report_of(node: Process) -> list[str]:
    """Return the lines of the report at the end."""
    lines = node.lines
    return lines[next(at for at, line in enumerate(lines) if "Root Cause" in line) :]


@both
@pytest.mark.parametrize("options", [(), ("--redirects=3",)], ids=["console", "file"])
def test_a_progress_bar_does_not_push_the_traceback_out_of_the_report(
    start: Start, script: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    script.write_text(BAR + RAISES)
    logs = [*options, *([f"--log-dir={tmp_path / 'logs'}"] if options else [])]
    nodes = [start(number, nnodes="2", script=script, restarts=0, options=logs) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert "exit code 1: ValueError: boom" in reason_of(node)
        report = report_of(node)
        assert any("ValueError: boom" in line for line in report), report
        assert any("line 9, in <module>" in line for line in report), report
        assert sum("%|###" in line for line in report) <= 2, report


@run_alone
def test_a_worker_that_ends_in_mid_bar_says_one_line(start: Start, script: Path) -> None:
    script.write_text(BAR + "import os; os._exit(3)")
    node = start(2, nnodes="1", script=script, restarts=0)
    assert node.wait() == 1
    reason = reason_of(node)
    assert "exit code 3: 99%|####" in reason, reason
    assert reason.count("%|####") == 1, reason
    assert len(reason) < 500, reason


@both
def test_lines_of_stderr_and_stdout_keep_their_order_in_one_pipe(start: Start, script: Path) -> None:
    script.write_text("""
import os
for number in range(2000):
    os.write(2, f"err {number}\\n".encode())
    os.write(1, f"out {number}\\n".encode())
""")
    node = start(2, nnodes="1", script=script, restarts=0)
    assert node.wait() == 0
    printed = [line for line in node.lines if re.fullmatch(r"(err|out) \d+", line)]
    assert printed == [f"{stream} {number}" for number in range(2000) for stream in ("err", "out")]


def test_two_pipes_get_what_they_are_for(script: Path) -> None:
    script.write_text("import os; os.write(2, b'to stderr\\n'); os.write(1, b'to stdout\\n')")
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "to stdout\n"
    assert "to stderr\n" in done.stderr


LINES = 20_000
PRINTS_MUCH = f"""
import os
for number in range({LINES}):
    os.write(1, f"line {{number}} {{'x' * 60}}\\n".encode())
"""


class Unread:
    """A launcher whose standard output nobody reads, like a pager that waits."""

    def __init__(self, script: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", *options, str(script)]
        self.stdout, theirs = os.pipe()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=theirs, stderr=stderr, stdin=subprocess.DEVNULL)
        os.close(theirs)
        self.log = log

    def read(self) -> bytes:
        with os.fdopen(self.stdout, "rb") as stdout:
            return stdout.read()

    def until_waiting(self) -> None:
        words = "the workers have ended, and the console does not take the rest of their output"
        until("it says that it waits", lambda: words in self.log.read_text())


@pytest.fixture(params=["elastic_rs.run", "torch.distributed.run"])
def unread(request: pytest.FixtureRequest, script: Path, tmp_path: Path) -> Iterator[Unread]:
    script.write_text(PRINTS_MUCH)
    job = ["--rdzv-backend=rust-c10d", "--rdzv-endpoint=localhost:0"]
    unread = Unread(script, tmp_path / "stderr", request.param, *job, "--tee=3", f"--log-dir={tmp_path / 'logs'}")
    yield unread
    unread.process.kill()
    unread.process.wait()


def test_a_pager_that_waits_loses_no_output_at_the_end_of_the_job(unread: Unread) -> None:
    unread.until_waiting()
    assert unread.process.poll() is None
    printed = unread.read().decode().splitlines()
    assert unread.process.wait(60) == 0
    assert printed == [f"[default0]:line {number} {'x' * 60}" for number in range(LINES)]


def test_a_signal_ends_the_wait_for_a_pager(unread: Unread) -> None:
    unread.until_waiting()
    unread.process.send_signal(signal.SIGTERM)
    assert unread.process.wait(60) == 0, "the job has succeeded"
    os.close(unread.stdout)


def test_a_pager_that_is_left_is_not_waited_for(unread: Unread) -> None:
    unread.until_waiting()
    os.close(unread.stdout)
    assert unread.process.wait(60) == 0


PROMPTS = """
import os, pathlib, sys, time
os.write(1, b"ready? ")
os.write(2, b"dots ...")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
os.write(1, b"yes\\n")
os.write(2, b". done\\n")
"""


@pytest.mark.parametrize("options", [("--standalone", "--tee=3"), ("-H", "localhost:1")], ids=["tee", "hosts"])
def test_text_without_a_newline_appears_while_the_worker_waits(
    script: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    script.write_text(PROMPTS)
    done = tmp_path / "done"
    command = [
        sys.executable,
        "-m",
        "elastic_rs.run",
        *options,
        f"--log-dir={tmp_path / 'logs'}",
        str(script),
        str(done),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = {process.stdout: b"", process.stderr: b""}
        deadline = time.monotonic() + 120
        while not (b"ready? " in seen[process.stdout] and b"dots ..." in seen[process.stderr]):
            ready, _, _ = select.select(list(seen), [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"it has not appeared: {seen}"
            for stream in ready:
                seen[stream] += os.read(stream.fileno(), 65536)
        done.touch()
        rest, errors = process.communicate(timeout=120)
    prefix = b"[default0]:" if "--tee=3" in options else b"[localhost] "
    assert prefix + b"ready? yes\n" in seen[process.stdout] + rest
    assert prefix + b"dots .... done\n" in seen[process.stderr] + errors
    assert process.returncode == 0


def test_two_workers_of_a_host_print_whole_lines_without_tee(script: Path) -> None:
    script.write_text("""
import os
rank = os.environ["RANK"]
for number in range(500):
    for part in (f"rank {rank}", f" line {number}", "\\n"):
        os.write(1, part.encode())
        os.write(2, part.encode())
""")
    command = [sys.executable, "-m", "elastic_rs.run", "-H", "localhost:2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    expected = {f"[localhost] rank {rank} line {number}" for rank in range(2) for number in range(500)}
    for printed in (done.stdout, done.stderr):
        lines = [line for line in printed.splitlines() if "rank" in line and "elastic" not in line]
        assert len(lines) == 1000
        assert {*lines} == expected


PAUSED = """
import os
for number in range(20_000):
    print(os.environ["RANK"], number, "x" * 40)
"""


@pytest.mark.parametrize("options", [["--tee=3"], ["--ranks-filter=0,1"]], ids=["tee", "ranks"])
def test_no_lines_of_two_workers_are_torn(script: Path, tmp_path: Path, options: list[str]) -> None:
    script.write_text(PAUSED)
    job = ["elastic_rs.run", "--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}"]
    unread = Unread(script, tmp_path / "stderr", *job, *options)
    if options == ["--tee=3"]:
        unread.until_waiting()  # 5 s after the workers have ended; without files they wait for the reader themselves
    printed = unread.read().decode().splitlines()
    assert unread.process.wait(60) == 0
    lines = [line.removeprefix("[default0]:").removeprefix("[default1]:") for line in printed]
    assert sorted(lines) == sorted(f"{rank} {number} {'x' * 40}" for rank in range(2) for number in range(20_000))
