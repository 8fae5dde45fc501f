"""Errors of command lines that ``elastic-run`` rejects."""

from __future__ import annotations

import pytest
from elastic_rs import run


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the error of a command line that is rejected."""
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("elastic-run: error: ")
    assert lines[1:] == ["elastic-run --help lists all flags"]
    return lines[0].removeprefix("elastic-run: error: ")
