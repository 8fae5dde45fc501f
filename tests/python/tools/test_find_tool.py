"""``tools/find_tool.py``: which programs the tests run with, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "find_tool.py"
NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


class Known(NamedTuple):
    """A program that is looked for, what it prints as its version, and what is said then."""

    name: str
    variable: str
    program: str
    prints: str
    said: str


PROGRAMS = [
    Known("etcd", "ETCD", "etcd", "etcd Version: 9.9.9", "etcd 9.9.9"),
    Known("sshd", "SSHD", "sshd", "unknown option -- V OpenSSH_99.1p1, OpenSSL", "OpenSSH_99.1p1"),
    Known("promtool", "PROMTOOL", "promtool", "promtool, version 9.9.9 (branch: x)", "promtool 9.9.9"),
    Known("chromium", "CHROMIUM", "chromium", "Chromium 999.0.1.2 built on Debian", "Chromium 999.0.1.2"),
    Known("chromium", "CHROMIUM", "google-chrome", "Google Chrome 999.0.1.2 ", "Google Chrome 999.0.1.2"),
]
each_program = pytest.mark.parametrize("known", PROGRAMS, ids=lambda known: known.program)
DAEMONS = ["slurmctld", "slurmd", "slurmstepd", "munged"]
COMMANDS = ["sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel"]


def find(tmp_path: Path, *names: str, **env: str) -> subprocess.CompletedProcess[str]:
    # No network, no cache, and no programs but those in one folder: apt-get is not among them.
    (tmp_path / "bin").mkdir(exist_ok=True)
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path / "bin")}
    variables = {"ETCD", "SLURM", "SSHD", "PROMTOOL", "CHROMIUM", "TORCH_TESTS"}
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    return subprocess.run(
        [sys.executable, TOOL, *names],
        env={**inherited, **NOWHERE, **own, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def made(path: Path, prints: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return path


@each_program
def test_the_one_that_is_named_wins_and_one_on_the_path_is_there_too(tmp_path: Path, known: Known) -> None:
    on_path, named = made(tmp_path / "bin" / known.program, known.prints), made(tmp_path / "mine" / "any", known.prints)
    with_it, without = find(tmp_path, known.name, **{known.variable: str(named)}), find(tmp_path, known.name)
    for done, expected in [(with_it, named), (without, on_path)]:
        assert (done.returncode, done.stdout) == (0, f"{expected}\n")
        assert done.stderr.endswith(f"    {known.said}: {expected}\n")


@each_program
def test_one_that_is_named_and_does_not_run_is_an_error(tmp_path: Path, known: Known) -> None:
    made(tmp_path / "bin" / known.program, known.prints)
    for named in (str(tmp_path / "missing"), str(made(tmp_path / "other", "another program"))):
        done = find(tmp_path, known.name, **{known.variable: named})
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{known.variable} is `{named}`, must be a" in done.stderr


@each_program
@pytest.mark.parametrize("there", [False, True])
def test_without_any_every_way_is_explained(tmp_path: Path, known: Known, *, there: bool) -> None:
    if known.name == "sshd" and Path("/usr/sbin/sshd").exists():
        pytest.skip("an SSH server is installed on this machine")
    if there:
        made(tmp_path / "bin" / known.program, "another program")
    done = find(tmp_path, known.name)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"tests that need it are skipped. {known.variable}=" in done.stderr
    assert "there is no apt-get" in done.stderr
    assert ("does not run as" if there else "PATH: it has no") in done.stderr
    assert known.name != "etcd" or "pip" in done.stderr


def test_a_chromium_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    made(tmp_path / "bin" / "chromium", "install it from somewhere else")
    other = made(tmp_path / "bin" / "google-chrome", "Google Chrome 999.0.1.2 ")
    assert find(tmp_path, "chromium").stdout == f"{other}\n"


def unpacked(folder: Path, *, without: str = "", suffix: str = "") -> Path:
    """Make a folder like that of Slurm's packages of Debian, with programs that only know their version."""
    files = {f"usr/sbin/{name}{suffix}" for name in DAEMONS} | {f"usr/bin/{name}" for name in COMMANDS}
    for name in files | {"usr/lib/x86_64-linux-gnu/slurm-wlm/auth_munge.so"}:
        if not (without and Path(name).name.startswith(without)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            made(folder / name, "slurm-wlm 99.1")
    return folder


def test_a_folder_with_slurm_wins_with_debians_names_and_with_others(tmp_path: Path) -> None:
    for suffix in ("", "-wlm"):
        named = unpacked(tmp_path / f"mine{suffix}", suffix=suffix)
        done = find(tmp_path, "slurm", SLURM=str(named))
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{named}\n", f"    slurm-wlm 99.1: {named}\n")


def test_a_folder_that_lacks_a_program_of_slurm_is_an_error(tmp_path: Path) -> None:
    for named in (str(tmp_path / "missing"), str(unpacked(tmp_path / "part", without="munged"))):
        done = find(tmp_path, "slurm", SLURM=named)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"SLURM is `{named}`, must be a folder with a Slurm that runs here" in done.stderr


@pytest.mark.skipif(any(Path("/usr/sbin").glob("slurmctld*")), reason="Slurm is installed on this machine")
def test_without_slurm_every_way_is_explained(tmp_path: Path) -> None:
    done = find(tmp_path, "slurm")
    assert (done.returncode, done.stdout) == (0, "")
    for text in (
        "tests that need it are skipped",
        "there is no apt-get",
        "the system: Slurm and munge are not installed",
    ):
        assert text in done.stderr


def test_a_folder_of_pytorchs_tests_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "pytorch" / "test"
    (folder / "distributed" / "elastic" / "rendezvous").mkdir(parents=True)
    (folder / "distributed" / "test_store.py").touch()
    done = find(tmp_path, "torch-tests", TORCH_TESTS=str(folder))
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    wrong = find(tmp_path, "torch-tests", TORCH_TESTS=str(tmp_path))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert f"TORCH_TESTS is `{tmp_path}`, must be PyTorch's folder `test`" in wrong.stderr
    none = find(tmp_path, "torch-tests")
    assert (none.returncode, none.stdout) == (0, "")
    assert "no tests of PyTorch" in none.stderr
    assert "there is no apt-get" in none.stderr


def test_all_are_got_without_a_name_and_another_name_is_an_error(tmp_path: Path) -> None:
    done = find(tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    for what in ("no etcd", "no Slurm", "no promtool", "no Chromium", "no tests of PyTorch"):
        assert what in done.stderr
    wrong = find(tmp_path, "etdc")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "etdc, must be one of etcd, slurm, sshd, promtool, chromium, torch-tests" in wrong.stderr
