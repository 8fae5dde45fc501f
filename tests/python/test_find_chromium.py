"""``tools/find_chromium.py``: which Chromium the tests run with, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "find_chromium.py"
SAYS = "Chromium 999.0.1.2 built on Debian"


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # No cache, and no programs but those in one folder: apt-get is not among them.
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(programs)}
    inherited = {name: value for name, value in os.environ.items() if name != "CHROMIUM"}
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


@pytest.mark.parametrize("name", ["chromium", "google-chrome", "chromium-headless-shell"])
def test_the_one_that_is_named_wins_and_one_on_the_path_is_next(tmp_path: Path, name: str) -> None:
    on_path = made(tmp_path / "bin" / name)
    named = made(tmp_path / "mine")
    for told, expected in [(find(tmp_path, CHROMIUM=str(named)), named), (find(tmp_path), on_path)]:
        assert (told.returncode, told.stdout) == (0, f"{expected}\n")
        assert told.stderr == f"    Chromium 999.0.1.2: {expected}\n"


def test_one_on_the_path_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    made(tmp_path / "bin" / "chromium", "install it from somewhere else")
    other = made(tmp_path / "bin" / "google-chrome", "Google Chrome 999.0.1.2 ")
    told = find(tmp_path)
    assert (told.stdout, told.stderr) == (f"{other}\n", f"    Google Chrome 999.0.1.2: {other}\n")


def test_one_that_is_named_and_does_not_run_is_an_error(tmp_path: Path) -> None:
    for named in (str(tmp_path / "missing"), str(made(tmp_path / "other", "another program"))):
        told = find(tmp_path, CHROMIUM=named)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"CHROMIUM is `{named}`, must be a Chromium that runs here" in told.stderr


@pytest.mark.parametrize("says", [None, "another program"])
def test_without_any_every_attempt_is_explained(tmp_path: Path, says: str | None) -> None:
    if says is not None:
        made(tmp_path / "bin" / "chromium", says)
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, "")
    assert "tests that need it are skipped" in told.stderr
    assert "there is no apt-get" in told.stderr
    assert ("does not run as Chromium" if says else "PATH: it has none of chromium-headless-shell") in told.stderr
