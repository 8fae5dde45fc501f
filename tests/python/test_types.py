"""The package's types, as mypy sees them, and those of the compiled module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["mypy", "--strict", "python/elastic_rs"],
        ["mypy.stubtest", "--allowlist", "tests/stubtest-allowlist.txt", "elastic_rs._elastic_rs"],
    ],
    ids=["package", "stub"],
)
def test_mypy_finds_nothing(command: list[str], tmp_path: Path) -> None:
    # Two of them at once must not share a cache.
    env = {**os.environ, "MYPY_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-m", *command]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
