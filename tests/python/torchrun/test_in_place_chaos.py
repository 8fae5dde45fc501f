"""Random faults on workers that change in place: what they have learnt equals a replay of what they have committed."""

import json
import os
import random
import signal
import time
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from helpers.procs import Job, Process

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]

LEDGER = SCRIPTS / "ledger.py"
FAULTS = int(os.environ.get("ELASTIC_RS_CHAOS_FAULTS", "100"))
SEED = int(os.environ.get("ELASTIC_RS_CHAOS_SEED", "1"))
EPOCHS, LENGTH = 12, 500


def replay(ledger: list[list]) -> int:
    weight = 1
    for _, step in ledger:
        weight = (weight * 3 + sum(index + 1 for index in step)) % 65_521
    return weight


def assert_each_index_was_taken_once(ledger: list[list]) -> None:
    """Check that each index is in one step of each epoch, padding aside: a world's last step may repeat some."""
    for epoch, steps in groupby(ledger, key=lambda entry: entry[0]):
        sizes = [step for _, step in steps]
        seen = Counter(index for step in sizes for index in step)
        assert set(seen) == set(range(LENGTH)), f"epoch {epoch}"
        assert sum(count - 1 for count in seen.values()) < len(sizes[-1]), f"epoch {epoch}: {seen.most_common(3)}"


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.long
@pytest.mark.parametrize("faults", [6, FAULTS])
@pytest.mark.timeout(3000)
def test_random_faults(start: Start, job: Job, tmp_path: Path, faults: int) -> None:
    dice = random.Random(SEED)  # replayable
    result = tmp_path / "result"
    epochs = max(2, EPOCHS * faults // 10)
    conf = "last_call_timeout=0.5,settle_timeout=0.5,rejoin_limit=0"  # nodes leave dozens of times

    def node(number: int) -> Process:
        return start(number, result, epochs, LENGTH, nnodes="1:3", nproc=2, restarts=100_000, script=LEDGER, conf=conf)

    nodes = {number: node(number) for number in (2, 3, 4)}
    host = None
    happened = []
    for _ in range(faults):
        for process in nodes.values():
            process.line(r"WORLD rank=\d+ world=6 ", since=0)
        time.sleep(dice.uniform(0.2, 2.0))  # not to let something happen: faults come at any time
        host = host or next(
            (number for number, it in nodes.items() if any("hosts the coordinator" in line for line in it.lines)), 2
        )
        fault = dice.choice(["worker", "worker", "worker", "two workers", "agent", "leave"])
        happened.append(fault)
        if fault in {"worker", "two workers"}:
            workers = list(job.workers().values())
            for pid in dice.sample(workers, min(len(workers), 1 if fault == "worker" else 2)):
                os.kill(pid, signal.SIGKILL)
        else:
            number = dice.choice([number for number in nodes if number != host])
            nodes[number].signal(signal.SIGKILL if fault == "agent" else signal.SIGTERM)
            nodes[number].wait()
            nodes[number] = node(number)
        if not nodes[host].running:
            break
    assert [process.wait(limit_s=2400) for process in nodes.values()] == [0] * 3, happened
    told = [json.loads(file.read_text()) for file in tmp_path.glob("result.*")]
    assert told, happened
    assert all(one == other for one, other in pairwise(told)), happened
    ledger = told[0]["ledger"]
    assert told[0]["weight"] == replay(ledger), happened
    assert_each_index_was_taken_once(ledger)
    assert {entry[0] for entry in ledger} == set(range(epochs))
