"""``tools/find_etcd.py``: which etcd the tests run with, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "find_etcd.py"


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # No network, no cache, and no programs but those in one folder.
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(programs)}
    inherited = {name: value for name, value in os.environ.items() if name != "ETCD"}
    return subprocess.run(
        [sys.executable, TOOL],
        env={**inherited, **nowhere, **own, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def program(path: Path, text: str = "etcd Version: 9.9.9") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def test_the_one_that_is_named_wins(tmp_path: Path) -> None:
    named = program(tmp_path / "mine" / "etcd")
    program(tmp_path / "bin" / "etcd")
    told = find(tmp_path, ETCD=str(named))
    assert (told.returncode, told.stdout) == (0, f"{named}\n")
    assert told.stderr == f"    etcd 9.9.9: {named}\n"


def test_one_that_is_named_and_does_not_run_is_an_error(tmp_path: Path) -> None:
    for named in (str(tmp_path / "missing"), str(program(tmp_path / "bin" / "other", "hello"))):
        told = find(tmp_path, ETCD=named)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"ETCD is `{named}`, must be an etcd program that runs here" in told.stderr


def test_the_path_is_the_last_resort(tmp_path: Path) -> None:
    there = program(tmp_path / "bin" / "etcd")
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, f"{there}\n")


def test_without_any_every_attempt_is_explained(tmp_path: Path) -> None:
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, "")
    assert "tests that need it are skipped" in told.stderr
    for tried in ("pip", "apt-get", "PATH: it has no program `etcd`"):
        assert tried in told.stderr
