"""``Dockerfile``: what it copies is there, and is all that cargo needs to read the workspace."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def copied() -> list[str]:
    """Return what is copied from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def test_what_it_copies_is_part_of_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for name in copied():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name


def test_cargo_finds_the_workspace_in_what_it_copies(tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("there is no cargo")
    for name in copied():
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "results"))
        else:
            shutil.copy(source, target)
    command = ["cargo", "metadata", "--no-deps", "--offline", "--locked", "--format-version=1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert {package["name"] for package in json.loads(result.stdout)["packages"]} >= {"elastic_rs", "elastic_rs_py"}
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    for file in (project["project"]["readme"], *project["project"]["license-files"]):
        assert list(tmp_path.glob(file)), file


def test_its_compiler_and_maturin_are_those_that_the_project_asks_for() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    assert f"FROM rust:{workspace['package']['rust-version']}-" in TEXT
    (maturin,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"'{maturin}'" in TEXT
