"""The package's types, as mypy sees them, and those of the compiled module."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(*command: str | Path) -> None:
    run = [sys.executable, "-m", *command]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing_in_the_package() -> None:
    check("mypy", "--strict", "python/elastic_rs")


def test_mypy_finds_nothing_in_tests_and_tools() -> None:
    check("mypy", "--config-file", "tests/mypy.ini")


def test_the_stub_is_that_of_the_compiled_module(tmp_path: Path) -> None:
    # The stub needs nothing but the standard library. Without this mypy reads the whole package, and all of torch.
    (config := tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\n")
    options: list[str | Path] = ["--mypy-config-file", config, "--allowlist", "tests/stubtest-allowlist.txt"]
    check("mypy.stubtest", *options, "elastic_rs._elastic_rs")
