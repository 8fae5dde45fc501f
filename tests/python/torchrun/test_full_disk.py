"""Logs on a full file system: the messages, and which workers run on."""

import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.procs import Job, Process

pytestmark = [pytest.mark.torchrun]

UNDER = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
# $1: options of the file system; $2: its mount point; $3: a command to run there first; then the launcher.
MOUNT = 'mount -t tmpfs -o "$1" none "$2" && (cd "$2" && eval "$3") && shift 3 && exec "$@"'
FULL = "head -c 64k /dev/zero > other"


@functools.cache
def _may_mount() -> bool:
    probe = [*UNDER, "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, check=False, capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return the mount point of a small file system that only the launcher and its workers see."""
    if not _may_mount():
        pytest.skip("file systems cannot be mounted in namespaces here")
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def run(
    job: Job,
    disk: Path,
    script: str,
    *flags: str,
    launcher: str = "elastic_rs.run",
    size: str = "size=64k",
    before: str = ":",
    env: dict[str, str] | None = None,
) -> tuple[int, Process]:
    worker = disk.with_name("worker.py")
    worker.write_text(script)
    under: Sequence[str] = [*UNDER, MOUNT, "sh", size, str(disk), before]
    command = [sys.executable, "-m", launcher, "--rdzv-backend=rust-c10d", "--rdzv-id=job", *flags, str(worker)]
    node = job.start([*under, *command], env=env)
    return node.wait(), node


FLOODS = """
import os, signal
if os.environ["RANK"] == "0":
    for number in range(5000):
        print("x" * 99, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_a_worker_that_died_because_its_log_filled_the_disk_says_so(job: Job, disk: Path, launcher: str) -> None:
    # The worker's own write fails, so it dies as under PyTorch's agent. PyTorch's report does not name the cause.
    code, node = run(job, disk, FLOODS, "--nproc-per-node=2", "-r3", f"--log-dir={disk}", launcher=launcher)
    assert code == 1
    text = "\n".join(node.lines)
    said = (
        rf"its log folder `{disk}/job_\w+/attempt_0/0` is full: No space left on device \(os error 28\) "
        r"\(0 bytes and \d+ files left\); what it printed there last is lost, and printing fails: make room, or choose "
        r"another --log-dir"
    )
    # The text is in the report, and in the earlier line about the end.
    assert re.search(said, text[text.index("Root Cause") :])
    assert re.search(rf"stopping all workers: rank 0 .* ended with exit code 1: {said}", text)


def test_a_full_disk_is_not_named_for_a_failure_with_another_cause(job: Job, disk: Path) -> None:
    # The worker's output is on the console, so its log folder does not matter.
    code, node = run(job, disk, "raise ValueError('the sky fell')", f"--log-dir={disk}", before=FULL)
    assert code == 1
    text = "\n".join(node.lines)
    assert "ended with exit code 1: ValueError: the sky fell" in text
    assert "is full" not in text


SPEAKS = """
import os
for number in range(100):
    print("line", number, "x" * 1000, flush=True)
"""


def test_workers_with_teed_output_outlive_a_disk_that_was_full_at_their_start(job: Job, disk: Path) -> None:
    code, node = run(job, disk, SPEAKS, "-t3", f"--log-dir={disk}", before=FULL)
    assert code == 0
    assert len([line for line in node.lines if re.match(r"\[default0\]:line \d+ x", line)]) == 100
    file = rf"{disk}/job_\w+/attempt_0/0/stdout.log"
    node.line(rf"log file `{file}` cannot be written: No space left on device \(os error 28\)")


def test_a_job_without_log_files_runs_without_a_log_folder(job: Job, disk: Path) -> None:
    # The file system has three inodes: the root and two files. None is left for the temporary folder.
    env = {"TMPDIR": str(disk)}
    code, node = run(
        job, disk, "import os; os.write(1, b'ran\\n')", size="size=1m,nr_inodes=3", before="touch a b", env=env
    )
    assert code == 0
    node.line(
        r"cannot make or remove log folder `.*`: No space left on device .*; exceptions of workers are not recorded"
    )
    assert "ran" in node.lines


def test_a_requested_log_folder_that_cannot_be_made_ends_the_job_with_its_name(job: Job, disk: Path) -> None:
    options: dict[str, Any] = {"size": "size=1m,nr_inodes=3", "before": "touch a b"}
    code, node = run(job, disk, "print('ran')", "-r3", f"--log-dir={disk}", **options)
    assert code == 1
    node.line(rf"cannot make or remove log folder `{disk}/job_\w+`: No space left on device")
    assert "ran" not in node.lines
