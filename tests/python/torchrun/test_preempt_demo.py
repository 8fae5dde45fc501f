"""``make demo DEMO_ARGS=--preempt``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job

DEMO = Path(__file__).parents[3] / "examples" / "demo_preempt.py"


@pytest.mark.torchrun
@pytest.mark.long
def test_the_demo_of_notices_loses_no_step_and_leaves_nothing_behind(job: Job) -> None:
    demo = job.start([sys.executable, str(DEMO)], name="demo")
    assert demo.wait() == 0
    assert "\n".join(demo.lines).count("  ok  ") == 5
