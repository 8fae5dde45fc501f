"""Exceptions that a script raises itself, with real nodes: a roll-back on NaN, and a request for another world."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import SCRIPTS, Start
from .test_in_place import COMMIT_EVERY, World, assert_nothing_was_restarted, ended_well, pids, until_step, worlds_of

if TYPE_CHECKING:
    from helpers.procs import Process

pytestmark = [pytest.mark.torchrun]

STEPS = SCRIPTS / "steps.py"
RAISED_AT = 12
LAST_COMMIT = RAISED_AT // COMMIT_EVERY * COMMIT_EVERY
run_alone = pytest.mark.parametrize("agent", ["run"], indirect=True)


@pytest.fixture
def done(tmp_path: Path) -> Path:
    return tmp_path / "done"


def worlds_in(node: Process, generation: int) -> dict[int, World]:
    """Wait until both workers of the node are in that world of four. Return what they say, by rank."""
    found: dict[int, World] = {}
    while len(found) < 2:
        others = "|".join(map(str, found)) or "x"
        said = node.line(
            rf"WORLD rank=(?!(?:{others}) )\d+ world=4 step=\d+ pid=\d+ generation={generation} .*"
        ).group()
        it = {name: int(value) for name, value in (word.split("=") for word in said.split()[1:])}
        found[it["rank"]] = it
    return found


def two_worlds(start: Start, done: Path, *flags: str) -> tuple[list[Process], list[World]]:
    """Start two nodes of two workers without a restart to lose, and return what they say of their second world."""
    flags = ("--until", str(done), "--raise", *flags)
    nodes = [start(number, *flags, nnodes="2", nproc=2, script=STEPS, restarts=0) for number in (2, 3)]
    before = [worlds_in(node, 1) for node in nodes]
    after = [worlds_in(node, 2) for node in nodes]
    assert [pids(worlds) for worlds in after] == [pids(worlds) for worlds in before], "a worker was replaced"
    return nodes, [world for worlds in after for world in worlds.values()]


@run_alone
@pytest.mark.parametrize("ranks", [(), ("--raise-rank", "1"), ("--raise-rank", "2")], ids=["all", "rank 1", "rank 2"])
def test_a_roll_back_on_nan_goes_on_from_the_last_commit_and_costs_no_restart(
    start: Start, done: Path, ranks: tuple[str, ...]
) -> None:
    nodes, every = two_worlds(start, done, "nan", *ranks)
    assert {(world["step"], world["restarts"]) for world in every} == {(LAST_COMMIT, 0)}
    until_step(nodes[0])
    ended_well(done, *nodes)
    assert_nothing_was_restarted(*nodes)
    output = [
        line for node in nodes for line in node.lines if "left its world with HorovodInternalError: loss is nan" in line
    ]
    assert output, nodes[0].tail()
    assert not [line for node in nodes for line in node.lines if "max_restarts" in line]


@run_alone
@pytest.mark.parametrize("ranks", [(), ("--raise-rank", "2")], ids=["all", "rank 2"])
def test_a_script_that_asks_for_another_world_keeps_its_state(start: Start, done: Path, ranks: tuple[str, ...]) -> None:
    nodes, every = two_worlds(start, done, "new-world", *ranks)
    assert {(world["step"], world["restarts"]) for world in every} == {(RAISED_AT, 0)}
    ended_well(done, *nodes)
    assert_nothing_was_restarted(*nodes)


@run_alone
@pytest.mark.parametrize("ranks", [(), ("--raise-rank", "1")], ids=["all", "rank 1"])
def test_a_job_that_always_meets_the_same_nan_ends_and_says_so(
    start: Start, done: Path, ranks: tuple[str, ...]
) -> None:
    flags = ("--until", str(done), "--raise", "same-nan", "--pause", "0", *ranks)
    node = start(2, *flags, nnodes="1", nproc=2, script=STEPS, restarts=0)
    assert node.wait() == 1
    node.line(
        r"and has gone back to the same commit 10 times before: it meets the same again\. Let it do something else"
    )
    assert len([line for line in node.lines if "STEP 12 " in line and "rank=1" in line]) == 11, node.tail()


@run_alone
def test_if_one_rank_alone_commits_all_get_the_reason_before_anything_is_restarted(start: Start, done: Path) -> None:
    flags = ["--until", done, "--commit-rank", "0"]
    nodes = [start(2, *flags, nnodes="1:2", nproc=2, script=STEPS, restarts=0)]
    until_step(nodes[0])
    nodes.append(start(3, *flags, nnodes="1:2", nproc=2, script=STEPS, restarts=0))
    nodes[0].line(r"the other ranks have left this world at their check \d+, this rank has made 0: all ranks must call")
    assert nodes[0].wait() == 1
    nodes[1].wait()


@run_alone
def test_a_node_that_cannot_take_the_state_leaves_and_costs_the_others_no_restart(start: Start, done: Path) -> None:
    first = start(2, "--until", done, nnodes="1:2", nproc=2, script=STEPS, restarts=0)
    until_step(first)
    other = start(3, "--until", done, "--extra-name", "extra", nnodes="1:2", nproc=2, script=STEPS, restarts=0)
    assert other.wait() == 1
    other.line(
        r"with a state of ones, step; this worker runs .* with a state of extra, ones, step: all ranks must make"
    )
    until_step(first, since=first.mark())
    ended_well(done, first)
    assert_nothing_was_restarted(first)
    assert len(first_world := worlds_of(first, 2, workers=2)) == 2
    assert all(world["restarts"] == 0 for world in first_world.values())


@run_alone
def test_a_worker_that_is_replaced_in_a_second_function_gets_an_error_with_both(start: Start, done: Path) -> None:
    node = start(2, "--until", done, "--warm-up", nnodes="1", nproc=2, script=STEPS, restarts=1)
    before = worlds_of(node, 2, workers=2)
    until_step(node)
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert node.wait() == 1
    node.line(
        r"rank 0 runs `in_place.<locals>.train` with a state of ones, step; this worker runs "
        r"`in_place.<locals>.warm_up`"
    )
    node.line("begins with the first one. Use one function of elastic.run for the whole job")
