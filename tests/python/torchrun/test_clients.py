"""Programs and libraries of other projects, used as they are (requirements/clients.txt)."""

import re
import sys
from pathlib import Path

import pytest
from helpers.procs import Process

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]
# Beside the environment that runs the test.
CLIENTS = Path(sys.prefix).parent / "clients"


def found(node: Process, pattern: str) -> list[str]:
    return [match[1] for line in node.lines if (match := re.match(pattern, line))]


@pytest.mark.long
@pytest.mark.parametrize(("nnodes", "nproc"), [(2, 1), (1, 2)])
def test_lightning_trains_on_after_a_crash(start: Start, tmp_path: Path, nnodes: int, nproc: int) -> None:
    env = {"PYTHONPATH": str(CLIENTS)}
    nodes = [
        start(number, tmp_path, nnodes=str(nnodes), nproc=nproc, restarts=1, script=SCRIPTS / "fit.py", env=env)
        for number in range(2, 2 + nnodes)
    ]
    assert [node.wait(limit_s=200) for node in nodes] == [0] * nnodes
    epochs = [epoch for node in nodes for epoch in found(node, r"EPOCH (\d rank=\d world=2)")]
    # Lightning finds the agent's ranks and world, and after the crash its checkpoint of two epochs.
    counts = {epoch: epochs.count(epoch) for epoch in epochs}
    assert counts.pop("2 rank=1 world=2") == 2
    assert counts.pop("2 rank=0 world=2") in (1, 2)  # the first attempt may have ended before
    assert counts == {f"{epoch} rank={rank} world=2": 1 for epoch in (0, 1, 3) for rank in (0, 1)}
    fits = [fit for node in nodes for fit in found(node, r"FIT rank=\d (.*)")]
    assert len(fits) == 2
    assert len(set(fits)) == 1, "all ranks trained the same model"
