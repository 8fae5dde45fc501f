"""Tests of tests/python/helpers/procs.py, with which other tests leave no process behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.procs import Job, Process

# It leaves its session and its parent, so neither a signal to the group nor a walk of the process tree finds it.
ORPHAN = """
import os, signal, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)
os.setsid()
print("orphan", os.getpid(), flush=True)
signal.pause()
"""
WORKER = """
import os, signal
# One write, because two workers share a console.
os.write(1, "rank {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
signal.pause()
"""


def python(job: Job, code: str) -> Process:
    return job.start([sys.executable, "-c", code])


def exists(pid: int) -> bool:
    """Whether the process lives. A zombie has an empty environment."""
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False


def test_line_returns_the_match_and_wait_the_exit_code(job: Job) -> None:
    process = python(job, "print('epoch 1'); print('epoch 2'); raise SystemExit(3)")
    assert process.line(r"epoch (\d)")[1] == "1"
    assert process.line(r"epoch (\d)", since=1)[1] == "2"
    assert process.wait() == 3
    assert process.lines == ["epoch 1", "epoch 2"]
    assert process.log.read_text() == "epoch 1\nepoch 2\n"


def test_line_fails_at_once_when_the_output_has_ended_and_shows_it(job: Job) -> None:
    process = python(job, "print('something else')")
    with pytest.raises(AssertionError, match=r"(?s)output ended without a line like `never`.*something else"):
        process.line("never")
    assert process.wait() == 0


def test_line_fails_after_its_limit(job: Job) -> None:
    process = python(job, "import signal; signal.pause()")
    with pytest.raises(AssertionError, match="no line like `never`"):
        process.line("never", limit_s=0.1)
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_an_orphan_is_found_killed_and_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left behind and killed") as caught, Job(tmp_path) as job:
        pid = int(python(job, ORPHAN).line(r"orphan (\d+)")[1])
        assert exists(pid)
    assert f"pid {pid}" in str(caught.value)
    assert not exists(pid)


def test_a_failure_in_the_block_is_not_hidden_by_leftovers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the test's own") as caught, Job(tmp_path) as job:
        pid = int(python(job, ORPHAN).line(r"orphan (\d+)")[1])
        raise ValueError("the test's own")
    assert f"orphan {pid}" in caught.value.__notes__[0]
    assert not exists(pid)


def test_leftovers_that_a_test_expects_are_no_failure(job: Job) -> None:
    pid = int(python(job, ORPHAN).line(r"orphan (\d+)")[1])
    assert [text.split(",")[0] for text in job.kill_leftovers()] == [f"pid {pid}"]
    assert job.pids() == []


@pytest.mark.torchrun
def test_workers_of_torchrun_are_known_by_rank(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    agent = job.torchrun("--standalone", "--nproc-per-node=2", script, name="A")
    agent.line("rank 0 of 2")
    agent.line("rank 1 of 2")
    workers = job.workers(agent)
    assert list(workers) == [0, 1]
    assert workers == job.workers()
    assert {agent.pid, *workers.values()} <= set(job.pids())

    os.kill(workers[1], signal.SIGKILL)
    assert agent.wait() == 1
    assert "exitcode: -9" in "\n".join(agent.lines)
    assert not any(exists(pid) for pid in workers.values())
