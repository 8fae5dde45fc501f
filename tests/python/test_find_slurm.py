"""``tools/find_slurm.py``: which Slurm the tests run with, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "find_slurm.py"
PROGRAMS = ["slurmctld", "slurmd", "slurmstepd", "munged"]
COMMANDS = ["sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel"]


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # No cache, and no programs but those in one folder: apt-get is not among them.
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(programs)}
    inherited = {name: value for name, value in os.environ.items() if name != "SLURM"}
    return subprocess.run(
        [sys.executable, TOOL],
        env={**inherited, **own, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def unpacked(folder: Path, *, without: str = "", suffix: str = "") -> Path:
    """Make a folder like that of Debian's packages, with programs that only know their version."""
    files = {f"usr/sbin/{name}{suffix}" for name in PROGRAMS} | {f"usr/bin/{name}" for name in COMMANDS}
    for name in files | {"usr/lib/x86_64-linux-gnu/slurm-wlm/auth_munge.so"}:
        if without and Path(name).name.startswith(without):
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'slurm-wlm 99.1'\n")
        path.chmod(0o755)
    return folder


def test_the_folder_that_is_named_wins_with_debians_names_and_with_others(tmp_path: Path) -> None:
    for suffix in ("", "-wlm"):
        named = unpacked(tmp_path / f"mine{suffix}", suffix=suffix)
        told = find(tmp_path, SLURM=str(named))
        assert (told.returncode, told.stdout) == (0, f"{named}\n")
        assert told.stderr == f"    slurm-wlm 99.1: {named}\n"


def test_a_folder_that_is_named_and_lacks_a_program_is_an_error(tmp_path: Path) -> None:
    for named in (str(tmp_path / "missing"), str(unpacked(tmp_path / "part", without="munged"))):
        told = find(tmp_path, SLURM=named)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"SLURM is `{named}`, must be a folder with a Slurm that runs here" in told.stderr


@pytest.mark.skipif(any(Path("/usr/sbin").glob("slurmctld*")), reason="Slurm is installed on this machine")
def test_without_any_every_attempt_is_explained(tmp_path: Path) -> None:
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, "")
    assert "tests that need it are skipped" in told.stderr
    for tried in ("there is no apt-get", "the system: Slurm and munge are not installed"):
        assert tried in told.stderr
