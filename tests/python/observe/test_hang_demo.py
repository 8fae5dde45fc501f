"""``make demo DEMO_ARGS=--hang``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job

DEMO = Path(__file__).parents[3] / "examples" / "demo_hang.py"


@pytest.mark.torchrun
@pytest.mark.long
def test_the_demo_of_a_hang_shows_who_hangs_and_leaves_nothing_behind(job: Job) -> None:
    demo = job.start([sys.executable, str(DEMO), "--rank=2"], name="demo")
    assert demo.wait() == 0
    shown = "\n".join(demo.lines)
    for words in (
        r"waits +[\d.]+ s for rank 2 at reads_shards.py:\d+",
        r"1 rank +2 .* read\(/.*rank-2-shard-1",
        r"training stands still for .*: 3 of 4 ranks wait for rank 2",
        r"training goes on, after",
    ):
        assert re.search(words, shown), words
    assert shown.count("  ok  ") == 5
