"""Fixtures for tests of the recipes in ``examples``: machines on a separate network, and the engines' packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.machines import Lan, NoNamespacesError

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SCRIPTS = ROOT / "tests" / "python" / "scripts"
WORKER = SCRIPTS / "worker.py"
# Beside the environment that runs the test (requirements/engines.txt).
ENGINES = Path(sys.prefix).parent / "engines"


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    try:
        with Lan(tmp_path) as lan:
            yield lan
    except NoNamespacesError as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test import the engines' packages."""
    if not ENGINES.exists():
        pytest.skip("the packages of requirements/engines.txt could not be installed: tools/environment.py says why")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ENGINES)])
    return ENGINES
