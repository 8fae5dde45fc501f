"""`elastic_rs.should_checkpoint`: all ranks of a script save at one check, and it is started anew."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.procs import Process

from .conftest import SCRIPTS, Start
from .test_notices import TAKEN_AWAY, both

pytestmark = [pytest.mark.torchrun]
CHECKPOINTS = SCRIPTS / "checkpoints.py"
BEGINS = r"BEGINS rank \d of {size} at (\d+), pid (\d+)"
SAVED = re.compile(r"SAVED rank (\d) at (\d+)")


def saved(*nodes: Process) -> dict[int, int]:
    """Return the step at which each rank has saved."""
    found = [SAVED.search(line) for node in nodes for line in node.lines]
    return {int(match[1]): int(match[2]) for match in found if match}


@both
@pytest.mark.parametrize("slow", ["stays", "goes"])
def test_all_ranks_save_at_one_check_before_a_machine_is_taken_away(start: Start, tmp_path: Path, slow: str) -> None:
    """One rank takes two seconds to save, and the others wait for it."""
    notice = tmp_path / "notice"
    conf = "last_call_timeout=1,rejoin_limit=1"
    slowly = {"SAVING_S": "2"}
    env = {"ELASTIC_RS_PREEMPT_NOTICE": f"file:{notice}"} | (slowly if slow == "goes" else {})
    host = start(2, tmp_path, nnodes="1:3", script=CHECKPOINTS, conf=conf)
    host.line("round 1, node rank")
    goes = start(3, tmp_path, nnodes="1:3", script=CHECKPOINTS, conf=conf, env=env)
    other = start(4, tmp_path, nnodes="1:3", script=CHECKPOINTS, conf=conf, env=slowly if slow == "stays" else {})
    stays = [host, other]
    for node in [*stays, goes]:
        node.line(BEGINS.format(size=3))
    marks = [node.mark() for node in stays]
    host.line("STEP", since=marks[0])
    before = saved(*stays, goes)
    notice.write_text("30\n")
    again = [node.line(BEGINS.format(size=2), since=mark) for node, mark in zip(stays, marks, strict=True)]
    assert goes.wait() == TAKEN_AWAY
    steps = saved(*stays, goes)
    assert sorted(steps) == [0, 1, 2], steps
    assert steps != before
    assert set(steps.values()) == {int(begins[1]) for begins in again}, "no step is lost, and none is made twice"
    (tmp_path / "done").touch()
    assert [node.wait() for node in stays] == [0, 0]
    for node in stays:
        assert any("the workers save, and wait to be replaced: " in line for line in node.lines)
        assert not [line for line in node.lines if "restarts left" in line or "the connection of a worker" in line]


@both
def test_a_node_that_is_alone_saves_too(start: Start, tmp_path: Path) -> None:
    env = {"ELASTIC_RS_PREEMPT_NOTICE": "signal:USR2@60"}
    node = start(2, tmp_path, nnodes="1", nproc=2, script=CHECKPOINTS, env=env)
    node.line("STEP")
    node.signal(signal.SIGUSR2)
    assert node.wait() == TAKEN_AWAY
    steps = saved(node)
    assert sorted(steps) == [0, 1]
    assert (tmp_path / "saved").read_text() == str(steps[0])


@both
@pytest.mark.parametrize("then", ["waits", "exits"])
def test_all_ranks_save_before_a_node_joins(start: Start, tmp_path: Path, then: str) -> None:
    """A script that ends when it has saved has not finished the job."""
    conf = "last_call_timeout=1"
    first = start(2, tmp_path, then, nnodes="1:2", nproc=2, script=CHECKPOINTS, conf=conf)
    first.line("STEP")
    mark = first.mark()
    second = start(3, tmp_path, then, nnodes="1:2", nproc=2, script=CHECKPOINTS, conf=conf)
    begins = first.line(BEGINS.format(size=4), since=mark)
    assert saved(first) == {0: int(begins[1]), 1: int(begins[1])}
    # A handler that ignores SIGTERM keeps nobody.
    (tmp_path / "done").touch()
    assert [first.wait(), second.wait()] == [0, 0]


@both
def test_a_worker_that_dies_costs_a_restart_as_ever(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, nnodes="1", nproc=2, script=CHECKPOINTS, restarts=1)
    begins = node.line(BEGINS.format(size=2))
    node.line("STEP")
    mark = node.mark()
    os.kill(int(begins[2]), signal.SIGKILL)
    node.line(BEGINS.format(size=2), since=mark)
    (tmp_path / "done").touch()
    assert node.wait() == 0
    assert not saved(node)
