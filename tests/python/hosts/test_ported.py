"""The examples that are ported scripts of Horovod's, under a driver: a NaN, a killed worker, and a host that comes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import FAST, Drive, Listing

if TYPE_CHECKING:
    from helpers.procs import Process

EXAMPLES = Path(__file__).parents[3] / "examples"


def world_of(driver: Process, size: int, since: int) -> dict[int, tuple[int, int]]:
    """Wait until all workers are in a world of that size. Return the process id and the batch of each rank."""
    found: dict[int, tuple[int, int]] = {}
    while len(found) < size:
        others = "|".join(map(str, found)) or "x"
        pattern = rf"world of {size}, rank (?!(?:{others}),)(\d+), pid (\d+): .*batch (\d+)"
        rank, pid, batch = map(int, driver.line(pattern, since=since).groups())
        found[rank] = pid, batch
    return found


def pids(world: dict[int, tuple[int, int]]) -> dict[int, int]:
    return {rank: pid for rank, (pid, _) in world.items()}


@pytest.mark.parametrize("name", ["horovod_images.py", "horovod_benchmark.py"])
def test_a_ported_script_survives_a_nan_a_kill_and_a_host_that_comes(
    drive: Drive, listing: Listing, tmp_path: Path, name: str
) -> None:
    until = tmp_path / "until"
    many = "--epochs" if "images" in name else "--batches"
    worker = (many, "1000000", "--pause", "0.02", "--nan-at", "12", "--until", until)
    listing.write("localhost:2")
    flags = (*FAST, listing.flag, "--min-np=2", "--max-restarts=1")
    driver = drive(*flags, script=EXAMPLES / name, worker=worker)
    first = world_of(driver, 2, 0)
    raised = driver.line("left its world with HorovodInternalError: the loss of batch 12 is nan")
    assert raised
    mark = next(at for at, line in enumerate(driver.lines) if "left its world" in line)
    again = world_of(driver, 2, mark)
    assert pids(again) == pids(first), "no worker was replaced"
    assert {batch for _, batch in again.values()} == {10}, "the last commit"

    mark = driver.mark()
    os.kill(first[1][0], signal.SIGKILL)
    after = world_of(driver, 2, mark)
    assert first[0][0] in pids(after).values()
    assert first[1][0] not in pids(after).values()
    assert min(batch for _, batch in after.values()) >= 10

    mark = driver.mark()
    listing.write("localhost:2", "127.0.0.1:1")
    larger = world_of(driver, 3, mark)
    assert set(pids(after).values()) < set(pids(larger).values()), "survivors keep their processes"
    until.touch()
    assert driver.wait() == 0, driver.tail()
    assert any(re.search(r"\bdone\b.*(batches|3 workers)", line) for line in driver.lines)
