"""Our agent as process 1 of a container: it ends on a signal, and reaps orphans."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.parametrize("agent", ["rust", "run"], indirect=True),
]
UNDER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
LIMIT_S = 60.0


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if subprocess.run([*UNDER, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine allows no process namespace")


def until(found: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    lists = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for one in lists for child in one.read_text().split()]


def stranger(process_1: int) -> int:
    """Start a command like `docker exec`, and return the process that it leaves to process 1."""
    before = {*children(process_1)}
    shell = ["setsid", "--wait", "sh", "-c", "sleep 1000 & exit 0"]
    inside = ["nsenter", f"--target={process_1}", "--user", "--preserve-credentials", "--pid", "--mount"]
    # The orphan must not keep a pipe of this process open.
    subprocess.run([*inside, *shell], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    found = {*children(process_1)} - before
    assert len(found) == 1
    return found.pop()


def process_1(node: Process) -> int:
    """Return the first process of the container that `unshare` has started."""
    (child,) = children(node.pid)
    return child


def test_orphans_of_other_programs_are_reaped_as_they_end(start: Start) -> None:
    node = start(2, nnodes="1", script=FAMILY, under=UNDER)
    place(node, 1)
    first = process_1(node)
    for _ in range(3):
        orphan = stranger(first)
        os.kill(orphan, signal.SIGKILL)
        until(functools.partial(_is_gone, orphan), "it is reaped")
    # A signal ends the agent although it is process 1, and its workers end with it.
    os.kill(first, signal.SIGTERM)
    assert node.wait() == 143


def test_ends_of_workers_are_reported_by_process_1(start: Start) -> None:
    node = start(2, "--exit=1:7", nnodes="1", nproc=2, restarts=0, script=FAMILY, under=UNDER)
    assert node.wait() == 1
    text = "\n".join(node.lines)
    assert "exitcode  : 7" in text
    assert "rank      : 1" in text


FUNCTIONS = """
import sys
from helpers import functions
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 2, run_id="job", rdzv_backend="rust-c10d", rdzv_endpoint=sys.argv[1], start_method="fork")
print("returned", elastic_launch(config, functions.rank)())
config.run_id, config.max_restarts = "another", 0
try:
    elastic_launch(config, functions.fails)(1, "exit")
except ChildFailedError as error:
    print("failed", error.failures[1].exitcode)
"""


def test_functions_are_reaped_by_their_parent_alone(job: Job, port: int, agent: str) -> None:
    # Workers that are functions lead sessions, and are children of process 1.
    del agent
    folder = str(Path(__file__).parents[1])
    node = job.start(
        [*UNDER, sys.executable, "-c", FUNCTIONS, f"127.0.0.1:{port}"], name="functions", env={"PYTHONPATH": folder}
    )
    node.line(r"returned \{0: 0, 1: 1\}")
    node.line(r"failed 7")
    assert node.wait() == 0
