"""Processes that a worker starts: which of them is the worker, and what becomes of the agent's socket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from helpers.stores import until

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Job

    from .conftest import Start

pytestmark = [pytest.mark.torchrun, pytest.mark.parametrize("agent", ["run"], indirect=True)]

# What each script begins with.
BEGIN = """
import os, pathlib, subprocess, sys, time
import elastic_rs
def at(number):
    os.write(1, f"AT {number}\\n".encode())
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""
EVALUATION = """
from elastic_rs import elastic
@elastic.run
def evaluate(state):
    raise SystemExit("it was taken for a worker")
evaluate(elastic.ObjectState(step=0))
"""


@pytest.fixture
def done(tmp_path: Path) -> Path:
    return tmp_path / "done"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def status(port: int) -> str:
    command = [sys.executable, "-m", "elastic_rs", "status", f"127.0.0.1:{port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_steps_of_an_evaluation_are_not_those_of_the_training(
    start: Start, port: int, script: Path, done: Path
) -> None:
    script.write_text(
        BEGIN
        + """
elastic_rs.step(5)
subprocess.run([sys.executable, "-c", "import elastic_rs; elastic_rs.step(900000)"], check=True)
at(5)
"""
    )
    node = start(2, done, nnodes="1", script=script)
    node.line("^AT 5")
    until("the status tells the step", lambda: re.search(r"\nstep    5\b(?!,)", status(port)) is not None)
    done.touch()
    assert node.wait() == 0


def test_the_programs_of_a_shell_are_the_worker_one_after_another(
    start: Start, port: int, tmp_path: Path, done: Path
) -> None:
    (tmp_path / "first.py").write_text(BEGIN + "elastic_rs.step(3)")
    (tmp_path / "second.py").write_text(BEGIN + "elastic_rs.step(7); at(7)")
    shell = tmp_path / "train.sh"
    shell.write_text(f'#!/bin/sh\ncd {tmp_path}\n"{sys.executable}" first.py\n"{sys.executable}" second.py "$1"\n')
    shell.chmod(0o755)
    node = start(2, done, nnodes="1", script=shell, options=["--no-python"])
    node.line("^AT 7")
    until("the status tells the step", lambda: re.search(r"\nstep    7\b(?!,)", status(port)) is not None)
    done.touch()
    assert node.wait() == 0


@pytest.mark.parametrize("trains", ["elastic_rs.step(1)", "from elastic_rs import elastic; elastic.init('gloo')"])
def test_elastic_run_in_an_evaluation_says_that_another_process_trains(
    start: Start, script: Path, done: Path, trains: str
) -> None:
    script.write_text(
        BEGIN
        + f"{trains}\nEVALUATION = {EVALUATION!r}\n"
        + """
child = subprocess.run([sys.executable, "-c", EVALUATION], stderr=subprocess.PIPE, text=True)
os.write(1, f"CHILD {os.getpid()} {child.returncode} {child.stderr.splitlines()[-1]}\\n".encode())
"""
    )
    node = start(2, done, nnodes="1", nproc=2, script=script)
    said = [
        node.line(
            rf"^CHILD (\d+) 1 RuntimeError: process \d+ was started by the worker of local rank {rank}, "
            r"whose process (\d+) trains"
        )
        for rank in range(2)
    ]
    assert all(line[1] == line[2] for line in said)
    assert node.wait() == 0


def test_a_cleaner_of_temporary_folders_does_not_keep_a_worker_from_being_replaced(
    start: Start, tmp_path: Path, done: Path
) -> None:
    from .test_in_place import STEPS, until_step, worlds_of

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    node = start(2, "--until", done, nnodes="1", nproc=2, script=STEPS, env={"TMPDIR": str(temporary)})
    before = worlds_of(node, 2, workers=2)
    until_step(node)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchelastic_")] == []
    mark = node.mark()
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = worlds_of(node, 2, workers=2, since=mark)
    assert after[0]["pid"] == before[0]["pid"]
    until_step(node, since=node.mark())
    done.touch()
    assert node.wait() == 0


def test_a_killed_agent_leaves_no_socket_behind(start: Start, job: Job, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    node = start(2, "--quiet", nnodes="1", env={"TMPDIR": str(temporary)}, options=[f"--log-dir={tmp_path / 'logs'}"])
    node.line("WORKER rank=0")
    workers = list(job.workers().values())
    node.signal(signal.SIGKILL)
    node.wait()
    job.until_gone(*workers)
    assert [path.name for path in temporary.iterdir()] == []
