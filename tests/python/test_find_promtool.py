"""``tools/find_promtool.py``: which promtool the tests run with, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "find_promtool.py"
SAYS = "promtool, version 9.9.9 (branch: x)"


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # No cache, and no programs but those in one folder: apt-get is not among them.
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(programs)}
    inherited = {name: value for name, value in os.environ.items() if name != "PROMTOOL"}
    return subprocess.run(
        [sys.executable, TOOL],
        env={**inherited, **own, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def made(path: Path, says: str = SAYS) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_one_that_is_named_wins_and_one_on_the_path_is_next(tmp_path: Path) -> None:
    on_path = made(tmp_path / "bin" / "promtool")
    named = made(tmp_path / "mine")
    for told, expected in [(find(tmp_path, PROMTOOL=str(named)), named), (find(tmp_path), on_path)]:
        assert (told.returncode, told.stdout) == (0, f"{expected}\n")
        assert told.stderr == f"    promtool 9.9.9: {expected}\n"


def test_one_that_is_named_and_does_not_run_is_an_error(tmp_path: Path) -> None:
    for named in (str(tmp_path / "missing"), str(made(tmp_path / "other", "another program"))):
        told = find(tmp_path, PROMTOOL=named)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"PROMTOOL is `{named}`, must be a promtool that runs here" in told.stderr


@pytest.mark.parametrize("says", [None, "another program"])
def test_without_any_every_attempt_is_explained(tmp_path: Path, says: str | None) -> None:
    if says is not None:
        made(tmp_path / "bin" / "promtool", says)
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, "")
    assert "tests that need it are skipped" in told.stderr
    assert "there is no apt-get" in told.stderr
    assert ("does not run as promtool" if says else "PATH: it has no program `promtool`") in told.stderr
