"""A sliding budget of restarts: what ends a job, with both launchers, and what ``status`` says of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from helpers.observe import ask

from .conftest import SCRIPTS
from .test_elastic_run import LAUNCHERS

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Job, Process

pytestmark = [pytest.mark.torchrun]


def start(job: Job, launcher: str, restarts: int, *program: str | Path, port: int = 0) -> Process:
    by = ["--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    flags = {
        "torchrun": [f"--max-restarts={restarts}", "--rdzv-conf=restart_window=3600"],
        "elastic-run": [f"--max-restarts={restarts}/1h"],
    }[launcher]
    return job.start(
        [sys.executable, "-m", LAUNCHERS[launcher], *by, *flags, str(SCRIPTS / "crashes.py"), *map(str, program)]
    )


ENDS = {
    "data": (9, "3 restarts in a row brought no step after step 7"),
    "import": (
        9,
        "the same crash twice in a row within 10 s of the start, before any step: ImportError at crashes.py:",
    ),
    "codes": (1, "no restarts left: 1 after crashes within 3600 s (max_restarts, restart_window)"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", ENDS)
def test_a_job_whose_restarts_bring_nothing_ends(job: Job, launcher: str, how: str) -> None:
    restarts, why = ENDS[how]
    node = start(job, launcher, restarts, how)
    assert node.wait() != 0
    assert why in "\n".join(node.lines), node.tail()


def test_what_is_left_is_shown(job: Job, port: int, tmp_path: Path) -> None:
    node = start(job, "elastic-run", 3, "once", tmp_path, port=port)
    node.line("1; 2/3 attempts left within 3600 s; will restart worker group")
    node.line("RUNS")
    lines = ask("status", f"127.0.0.1:{port}").stdout.splitlines()
    (tmp_path / "done").touch()
    assert node.wait() == 0, node.tail()
    assert lines[0].endswith("; restart 1"), lines
    assert "broken  1 crash" in lines
    assert "budget  within 1:00 h: 2 of 3 restarts left after crashes, 3 of 3 after hangs" in lines


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_window_without_restarts_is_refused_before_anything_starts(job: Job, launcher: str) -> None:
    node = start(job, launcher, 0, "import")
    assert node.wait() != 0
    assert "max_restarts is `0`, must be from 1 to 1000 with restart_window" in "\n".join(node.lines), node.tail()
    assert "ImportError" not in "\n".join(node.lines)
