"""Random faults on workers that change in place: what they have learnt equals a replay of what they have committed."""

import hashlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.procs import Job, Process

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]

LEDGER = SCRIPTS / "ledger.py"
FAULTS = int(os.environ.get("ELASTIC_RS_CHAOS_FAULTS", "100"))
SEED = int(os.environ.get("ELASTIC_RS_CHAOS_SEED", "1"))
LENGTH = 500


def replay(ledger: list[list[Any]]) -> int:
    weight = 1
    for _, step in ledger:
        weight = (weight * 3 + sum(index + 1 for index in step)) % 65_521
    return weight


def assert_each_index_was_taken_once(ledger: list[list[Any]]) -> None:
    """Check that each index is in one step of each epoch, padding aside: a world's last step may repeat some."""
    for epoch, steps in groupby(ledger, key=lambda entry: entry[0]):
        sizes = [step for _, step in steps]
        seen = Counter(index for step in sizes for index in step)
        assert set(seen) == set(range(LENGTH)), f"epoch {epoch}"
        assert sum(count - 1 for count in seen.values()) < len(sizes[-1]), f"epoch {epoch}: {seen.most_common(3)}"


def assert_commits_are_kept(lines: list[str], ledger: list[str]) -> None:
    """Check that no worker that lives has lost a commit: each of its worlds, and the end, have its last one before."""
    commits: dict[str, tuple[str, str]] = {}
    worlds = 0
    for line in lines:
        if found := re.match(r"COMMIT at=(\d+) digest=(\w+) pid=(\d+)", line):
            at, digest, pid = found.groups()
            commits[pid] = at, digest
        elif found := re.match(r"WORLD .* committed=(\d+) digest=(\w+) pid=(\d+)", line):
            at, digest, pid = found.groups()
            if pid in commits:
                worlds += 1
                assert (at, digest) == commits[pid], f"after {line}"
    assert worlds > 0, "no worker has lived through a change of the world"
    at_end = [re.match(r"DONE .* pid=(\d+)", line) for line in lines]
    for pid in [found[1] for found in at_end if found]:
        at, digest = commits.get(pid, ("0", prefix_digest(ledger, 0)))
        assert prefix_digest(ledger, int(at)) == digest, pid


def prefix_digest(ledger: list[str], length: int) -> str:
    """As in ``scripts/ledger.py``."""
    return hashlib.sha256("\n".join(ledger[:length]).encode()).hexdigest()[:16]


def last_workers(node: Process) -> list[int]:
    """Return the node's two workers of the last world that it has told. Standbys are none."""
    told = [line for line in node.lines if line.startswith("WORLD ")]
    return [int(line.rpartition("pid=")[2]) for line in told[-2:]]


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.long
@pytest.mark.parametrize(("faults", "standbys"), [(6, 0), (6, 2), (FAULTS, 1)])
@pytest.mark.timeout(3000)
def test_random_faults(start: Start, job: Job, tmp_path: Path, faults: int, standbys: int) -> None:
    dice = random.Random(SEED)  # replayable
    result, until = tmp_path / "result", tmp_path / "until"
    conf = f"last_call_timeout=0.5,settle_timeout=0.5,rejoin_limit=0,standby={standbys}"  # nodes leave dozens of times

    def node(number: int) -> Process:
        return start(number, result, until, LENGTH, nnodes="1:3", nproc=2, restarts=100_000, script=LEDGER, conf=conf)

    def until_complete() -> None:
        for number, process in nodes.items():
            process.line(r"WORLD rank=\d+ world=6 ", since=marks[number])

    nodes = {number: node(number) for number in (2, 3, 4)}
    ended: list[Process] = []
    marks = dict.fromkeys(nodes, 0)
    until_complete()
    host = next(number for number, it in nodes.items() if any("hosts the coordinator" in line for line in it.lines))
    happened: list[str] = []
    while len(happened) < faults:
        if dice.random() < 0.7:  # else the next fault may hit the change that the last one has caused
            until_complete()
        time.sleep(dice.uniform(0.2, 2.0))  # not to let something happen: faults come at any time
        assert nodes[host].running, f"{happened}\n{nodes[host].tail()}"
        marks = {number: it.mark() for number, it in nodes.items()}
        fault = dice.choice(["worker", "worker", "worker", "two workers", "agent", "leave"])
        if fault in {"worker", "two workers"}:
            running = {*job.pids()}
            workers = [pid for it in nodes.values() for pid in last_workers(it) if pid in running]
            for pid in dice.sample(workers, min(len(workers), 1 if fault == "worker" else 2)):
                with suppress(ProcessLookupError):  # of the change that the last fault has caused
                    os.kill(pid, signal.SIGKILL)
        else:
            number = dice.choice([number for number in nodes if number != host])
            nodes[number].signal(signal.SIGKILL if fault == "agent" else signal.SIGTERM)
            nodes[number].wait()
            ended.append(nodes[number])
            nodes[number], marks[number] = node(number), 0
        happened.append(fault)
    until_complete()
    until.touch()
    assert [process.wait(limit_s=2400) for process in nodes.values()] == [0] * 3, happened
    assert len(happened) == faults
    output = [json.loads(file.read_text()) for file in tmp_path.glob("result.*")]
    assert len(output) == 6, happened
    assert all(one == other for one, other in pairwise(output)), happened
    ledger = output[0]["ledger"]
    assert output[0]["weight"] == replay(ledger), happened
    assert_each_index_was_taken_once(ledger)
    assert {entry[0] for entry in ledger} == set(range(ledger[-1][0] + 1))
    # A worker's lines are in one process's output, in its order.
    assert_commits_are_kept([line for it in [*ended, *nodes.values()] for line in it.lines], output[0]["text"])
