"""Helpers of workers: an upload in the background that outlives its worker, which has succeeded."""

import signal
import time
from pathlib import Path

import pytest
from helpers.procs import Job, Process

from .conftest import SCRIPTS, Start, shutdown_timeout

pytestmark = [pytest.mark.torchrun, pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)]
LEAVES = SCRIPTS / "leaves.py"
RUNS_ON = (
    r"WARNING agent: .*the worker with local rank 0 \(pid \d+\) has succeeded, "
    r"and processes that it has started may run on"
)


def helper(node: Process) -> int:
    return int(node.line(r"^LEAVES (\d+)")[1])


def test_an_upload_goes_on_and_the_agent_ends_with_it(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, "waits", nnodes="1", script=LEAVES)
    pid = helper(node)
    node.line(rf"{RUNS_ON} for 30s \(--shutdown-timeout\): pid {pid} \(`.*python.*`\)")
    began = time.monotonic()
    (tmp_path / "go").touch()
    assert node.wait() == 0
    assert (tmp_path / "uploaded").exists()
    assert time.monotonic() - began < 20, "well below the grace"


def test_a_helper_that_takes_too_long_gets_sigterm(start: Start, agent: str, tmp_path: Path) -> None:
    node = start(2, tmp_path, "terminated", nnodes="1", script=LEAVES, options=shutdown_timeout(2, agent))
    pid = helper(node)
    node.line(
        rf"processes that it has started have outlived --shutdown-timeout, and are stopped: pid {pid} ", limit_s=120
    )
    assert node.wait() == 0
    assert (tmp_path / "terminated").exists()


def test_a_helper_that_ignores_sigterm_is_killed(start: Start, agent: str, job: Job, tmp_path: Path) -> None:
    node = start(2, tmp_path, "stubborn", nnodes="1", script=LEAVES, options=shutdown_timeout(1, agent))
    pid = helper(node)
    assert node.wait() == 0
    job.until_gone(pid)
    assert not (tmp_path / "uploaded").exists()


def test_a_signal_ends_the_time_of_helpers(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, "terminated", nnodes="1", script=LEAVES)
    helper(node)
    node.line(RUNS_ON)
    node.signal(signal.SIGTERM)
    assert node.wait() in {0, 143}  # the job has succeeded, or this node still waits for the word that it has
    assert (tmp_path / "terminated").exists()


def test_helpers_of_a_worker_that_fails_are_killed_with_it(start: Start, job: Job, tmp_path: Path) -> None:
    node = start(2, tmp_path, "terminated", "3", nnodes="1", restarts=0, script=LEAVES)
    pid = helper(node)
    assert node.wait() == 1
    job.until_gone(pid)
    assert not (tmp_path / "terminated").exists()
    assert not any("may run on" in line for line in node.lines)


def test_what_a_worker_has_left_that_was_killed_gets_no_grace(start: Start, tmp_path: Path) -> None:
    """The agent knows of the death before the worker's guard does."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "import elastic_rs\n"
        "elastic_rs.step()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    held = bytearray(os.urandom(1 << 20) * 256)\n"
        "    ignores = 'import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()'\n"
        "    left = subprocess.Popen([sys.executable, '-c', ignores], stdout=subprocess.PIPE)\n"
        "    left.stdout.readline()\n"
        "    print(f'LEFT {left.pid}', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('AGAIN', flush=True)\n"
    )
    node = start(2, nnodes="1", script=script)
    left = int(node.line(r"^LEFT (\d+)")[1])
    node.line("^AGAIN")
    assert not Path(f"/proc/{left}").exists()
    assert node.wait() == 0
    assert not any("have the rest of its grace" in line for line in node.lines), node.tail()
