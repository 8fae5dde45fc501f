"""``examples/torchx``: run by TorchX on this machine, and what TorchX makes of it for Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.procs import Job, Process

from .conftest import ENGINES, EXAMPLES, WORKER

COMPONENT = EXAMPLES / "torchx" / "elastic.py"
PAGE = EXAMPLES.parent / "docs" / "clusters.md"
TORCHX = [sys.executable, "-c", "from torchx.cli.main import main; main()"]
pytestmark = pytest.mark.usefixtures("engines")


def environment() -> dict[str, str]:
    # Without a login, TorchX asks for one; its caches belong to nobody.
    return {"PYTHONPATH": str(ENGINES), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(job: Job, tmp_path: Path, port: int, *args: str | Path) -> Process:
    options = ["--scheduler=local_cwd", "--wait", "--log", "-cfg", f"log_dir={tmp_path / 'logs'}"]
    component = [f"{COMPONENT}:ddp", "--rdzv_port", str(port), "--rdzv_conf", "last_call_timeout=1"]
    component += ["--log_dir", str(tmp_path / "agents"), *map(str, args)]
    return job.start([*TORCHX, "run", *options, *component], name="torchx", env=environment())


def test_two_replicas_train_on_this_machine(job: Job, tmp_path: Path, port: int) -> None:
    torchx = run(job, tmp_path, port, "-j", "2x2", "--script", WORKER)
    assert torchx.wait() == 0
    for rank in range(4):
        torchx.line(rf"DONE rank={rank}")


def test_a_failure_is_torchxs_failure(job: Job, tmp_path: Path, port: int) -> None:
    options: list[str | Path] = ["-j", "1:2x1", "--max_restarts", "0", "--script", WORKER]
    torchx = run(job, tmp_path, port, *options, "--", "--fail", "1:7")
    assert torchx.wait() != 0
    torchx.line(r"exitcode\s*: 7")


def test_what_the_page_says_about_slurm_is_true_of_torchxs_script() -> None:
    component = [f"{COMPONENT}:ddp", "-j", "2:3x8", "--script", "train.py", "--", "--lr", "0.1"]
    command = [*TORCHX, "run", "--scheduler=slurm", "--dryrun", *component]
    env = os.environ | environment()
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout
    assert made.count("#SBATCH --job-name=") == 3, "a group of one node for each replica"
    assert '--rdzv-endpoint="${SLURM_JOB_NODELIST_HET_GROUP_0:-localhost}:29400"' in made.replace("'\"'\"'", "'")
    assert "--kill-on-bad-exit=1" in made
    # The page has the command that changes it.
    (change,) = re.findall(r"sed '(s/[^']*)'", PAGE.read_text())
    changed = subprocess.run(["sed", change], input=made, capture_output=True, text=True, check=True).stdout
    assert changed.count("--kill-on-bad-exit=0") == 3
    assert "--kill-on-bad-exit=1" not in changed
