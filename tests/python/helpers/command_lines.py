"""Command lines of ``elastic-run``: errors of those that are rejected, and the end of those that are not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic_rs import run
from elastic_rs.run._node import End

ENDED = End(cast("Any", SimpleNamespace(outcome="succeeded")), "true", {})
"""How a job ended that a test did not run."""


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the error of a command line that is rejected."""
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("elastic-run: error: ")
    assert lines[1:] == ["elastic-run --help lists all flags"]
    return lines[0].removeprefix("elastic-run: error: ")
