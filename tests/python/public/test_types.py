"""A user's file with each public name, as mypy and pyright see it, and one with mistakes that they have to find."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.public import MODULES, names_of

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
USER, WRONG = HERE / "user.py", HERE / "wrong.py"
CHECKS = ROOT / "build" / "checks"


def mypy(file: Path) -> str:
    options = ["--strict", "--config-file", "", "--no-error-summary", "--explicit-package-bases"]
    options.append(f"--cache-dir={ROOT / '.mypy_cache'}")
    env = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    command = [sys.executable, "-m", "mypy", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env, check=False, timeout=900).stdout


def pyright(file: Path, folder: Path) -> list[dict[str, object]]:
    """Return what pyright finds in one file, by its standard rules."""
    if not (CHECKS / "basedpyright").is_dir():
        pytest.skip("basedpyright could not be installed (requirements/checks.txt)")
    config = {
        "include": [str(file)],
        "extraPaths": [str(ROOT / "python")],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    env = {**os.environ, "PYTHONPATH": str(CHECKS)}
    done = subprocess.run(
        [*command, "--project", str(folder)], capture_output=True, text=True, env=env, check=False, timeout=900
    )
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    return [one for one in found["generalDiagnostics"] if one["severity"] == "error"]


def expected() -> set[int]:
    return {number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# wrong")}


def test_mypy_finds_nothing_in_a_users_file() -> None:
    assert mypy(USER) == ""


def test_mypy_finds_each_mistake() -> None:
    found = mypy(WRONG)
    assert {int(number) for number in re.findall(r"wrong\.py:(\d+): error", found)} == expected(), found


def test_pyright_finds_nothing_in_a_users_file(tmp_path: Path) -> None:
    assert pyright(USER, tmp_path) == []


def test_pyright_finds_each_mistake(tmp_path: Path) -> None:
    found = pyright(WRONG, tmp_path)
    lines = {one["range"]["start"]["line"] + 1 for one in found}  # type: ignore[index]
    assert lines == expected(), found


def test_the_users_file_has_each_public_name() -> None:
    used = {node.attr for node in ast.walk(ast.parse(USER.read_text())) if isinstance(node, ast.Attribute)}
    used |= {
        name.name
        for node in ast.walk(ast.parse(USER.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    missing = {f"{module}.{name}" for module in MODULES for name in names_of(module) if name not in used}
    assert missing <= {"elastic_rs.rendezvous.etcd_store.Leases"}
