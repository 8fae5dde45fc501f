"""Our agent where ``pidfd_open`` is missing or refused: gVisor, old seccomp profiles, kernels before 5.3."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.procs import Job
from helpers.workers import place

from .conftest import FAMILY, SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]

WITHOUT = [sys.executable, str(SCRIPTS / "without_pidfd.py")]
cases = pytest.mark.parametrize(
    ("agent", "error"),
    [
        ("run", "ENOSYS"),
        ("run", "EPERM"),
        ("rust", "ENOSYS"),
        ("rust", "EPERM"),
    ],
    indirect=["agent"],
)


@cases
def test_a_failed_worker_is_restarted_without_its_descendants_and_ends_well(
    start: Start, error: str, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    args = ["--children", tmp_path, "--exit", "0:3", "--until", done]
    node = start(2, *args, nnodes="1", script=FAMILY, under=[*WITHOUT, error])
    assert place(node, 1)["restarts"] == "0"
    assert node.line(r"LEFT rank=0 (.*)")[1] == "[]"
    node.line("WORKER rank=0 .* restarts=1")
    done.touch()
    assert node.wait() == 0, node.tail()


@cases
def test_nothing_outlives_a_killed_agent(start: Start, job: Job, error: str, tmp_path: Path) -> None:
    node = start(2, "--children", tmp_path, nnodes="1", script=FAMILY, under=[*WITHOUT, error])
    place(node, 1)
    family = [*map(int, (tmp_path / "rank0").read_text().split()), *job.workers().values()]
    assert len(family) == 3
    node.signal(signal.SIGKILL)
    job.until_gone(*family)
    node.wait()


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_workers_come_from_a_fork_server_and_end_with_a_killed_agent(start: Start, job: Job, tmp_path: Path) -> None:
    under, warm = [*WITHOUT, "ENOSYS"], ["--warm-modules=json"]
    args = ["--children", tmp_path, "--exit", "0:3"]
    node = start(2, *args, nnodes="1", script=FAMILY, under=under, options=warm)
    node.line("a fork server has loaded `json`")
    # The end of the first attempt is noticed, and the second worker is forked from the same template.
    assert node.line(r"LEFT rank=0 (.*)")[1] == "[]"
    node.line("WORKER rank=0 .* restarts=1")
    family = [*map(int, (tmp_path / "rank0").read_text().split()), *job.workers().values()]
    assert len(family) == 3
    node.signal(signal.SIGKILL)
    job.until_gone(*family)
    node.wait()
    assert not any("started cold" in line for line in node.lines), node.tail()


@pytest.mark.long
@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_functions_work_as_workers(job: Job, error: str) -> None:
    tests = SCRIPTS.parent / "agent" / "test_functions.py"
    names = "test_functions_are_restarted and spawn and static"
    node = job.start(
        [*WITHOUT, error, sys.executable, "-m", "pytest", "-q", "-m", "long or not long", str(tests), "-k", names]
    )
    assert node.wait() == 0, node.tail()
    node.line("1 passed")


def test_doctor_names_missing_system_calls() -> None:
    doctor = [sys.executable, "-m", "elastic_rs.run", "doctor"]
    found = subprocess.run([*WITHOUT, "ENOSYS", *doctor], capture_output=True, text=True, check=False)
    assert "ok    supervision" in found.stdout
    assert "without pidfds (pidfd_open: Function not implemented), which are not needed" in found.stdout
    found = subprocess.run([*WITHOUT, "--nor-signalfd", "EPERM", *doctor], capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout
    assert "the system call `signalfd4` has failed: Operation not permitted" in found.stdout


@pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
def test_a_missing_system_call_that_is_needed_is_named(start: Start) -> None:
    # elastic-run's agent reads signals from a signalfd itself, and fails before it starts a worker.
    node = start(2, nnodes="1", script=FAMILY, under=[*WITHOUT, "--nor-signalfd", "EPERM"])
    assert node.wait() != 0
    assert any("signalfd4" in line for line in node.lines), node.tail()
