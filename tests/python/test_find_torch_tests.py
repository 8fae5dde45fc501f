"""``tools/find_torch_tests.py``: which of PyTorch's own tests are run, and what is said where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "find_torch_tests.py"


def find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # No cache, and no programs: apt-get is not among them.
    (tmp_path / "bin").mkdir(exist_ok=True)
    own = {"ELASTIC_RS_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path / "bin")}
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_TESTS"}
    command = [sys.executable, TOOL]
    return subprocess.run(
        command, env={**inherited, **own, **env}, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_folder_that_is_named_wins(tmp_path: Path) -> None:
    folder = tmp_path / "pytorch" / "test"
    (folder / "distributed" / "elastic" / "rendezvous").mkdir(parents=True)
    (folder / "distributed" / "test_store.py").touch()
    told = find(tmp_path, TORCH_TESTS=str(folder))
    assert (told.returncode, told.stdout) == (0, f"{folder}\n")


def test_a_named_folder_without_tests_is_an_error(tmp_path: Path) -> None:
    told = find(tmp_path, TORCH_TESTS=str(tmp_path))
    assert (told.returncode, told.stdout) == (1, "")
    assert f"TORCH_TESTS is `{tmp_path}`, must be PyTorch's folder `test`" in told.stderr


def test_without_any_the_reason_is_told(tmp_path: Path) -> None:
    told = find(tmp_path)
    assert (told.returncode, told.stdout) == (0, "")
    assert "no tests of PyTorch: they are not run." in told.stderr
    assert "there is no apt-get" in told.stderr
