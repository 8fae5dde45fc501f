"""Fixtures for tests of the recipes in ``examples``: machines on a separate network, and the engines' packages."""

import sys
from pathlib import Path

import pytest
from helpers.machines import lan

__all__ = ["lan"]  # a fixture

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SCRIPTS = ROOT / "tests" / "python" / "scripts"
WORKER = SCRIPTS / "worker.py"
# Beside the environment that runs the test (requirements/engines.txt).
ENGINES = Path(sys.prefix).parent / "engines"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the test import the engines' packages."""
    if not ENGINES.exists():
        pytest.skip("the packages of requirements/engines.txt could not be installed: tools/environment.py says why")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ENGINES)])
    return ENGINES
