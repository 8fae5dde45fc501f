"""Notices that a machine is taken away: the others go on without it, and workers save before."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.cgroups import Freezer, freezer
from helpers.stores import until

from .conftest import SCRIPTS, Start
from .test_in_place import STEPS, ended_well, pids, until_step, worlds_of

__all__ = ["freezer"]  # a fixture

pytestmark = [pytest.mark.torchrun]
SAVES = SCRIPTS / "saves.py"
both = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
TAKEN_AWAY = 143


@both
def test_the_world_goes_on_without_a_node_that_is_taken_away(start: Start, tmp_path: Path) -> None:
    done, notice = tmp_path / "done", tmp_path / "notice"
    conf = "last_call_timeout=1,rejoin_limit=1"
    env = {"ELASTIC_RS_PREEMPT_NOTICE": f"file:{notice}"}
    stays = start(2, "--until", done, nnodes="1:2", nproc=2, script=STEPS, conf=conf)
    stays.line("round 1, node rank")
    goes = start(3, "--until", done, nnodes="1:2", nproc=2, script=STEPS, conf=conf, env=env)
    before = worlds_of(stays, 4, workers=2)
    worlds_of(goes, 4, workers=2)
    until_step(stays)
    mark = stays.mark()
    notice.write_text("12 seconds\n")
    goes.line(r"its machine is taken away \(--preempt-notice file:.*\): this node leaves within 1[12]\.\d s")
    # 12 / 3 s, since more notices might follow.
    after = worlds_of(stays, 2, workers=2, since=mark)
    assert goes.wait() == TAKEN_AWAY
    assert sorted(pids(after).values()) == sorted(pids(before).values()), "they live on"
    told = re.compile(r"members leave: 127\.0\.0\.3 \(.*\): its machine is taken away")
    assert any(told.search(line) for line in stays.lines), stays.tail()
    ended_well(done, stays)
    assert not [line for line in stays.lines[mark:] if "restarting all workers" in line]


@both
@pytest.mark.parametrize("how", ["signal", "ignores"])
def test_a_script_saves_by_a_signal_and_is_out_when_its_machine_goes(start: Start, tmp_path: Path, how: str) -> None:
    """The worker's script does not use this package."""
    go, folders = tmp_path / "go", [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
    env = {"ELASTIC_RS_PREEMPT_NOTICE": "signal:USR2@3"}
    if how == "signal":
        env["ELASTIC_RS_PREEMPT_SIGNAL"] = "USR1"
    nodes = [
        start(number, folder, nnodes="1:2", script=SAVES, conf="last_call_timeout=20", env=env)
        for number, folder in zip((2, 3), folders, strict=True)
    ]
    for node in nodes:
        node.line("^READY")
    stays, goes = sorted(nodes, key=lambda node: "which this process hosts" not in "".join(node.lines))
    mark, began = stays.mark(), time.monotonic()
    goes.signal(signal.SIGUSR2)
    goes.line(r"its machine is taken away \(SIGUSR2 sent by pid .*\): this node leaves within 3\.0 s")
    if how == "signal":
        for node in nodes:
            node.line("^CHECKPOINT")
            node.line("the workers get SIGUSR1, to save: ")
        # It has not been told to end before its machine goes.
        assert goes.wait() == TAKEN_AWAY
        assert not any(line.startswith("STOPPING") for line in goes.lines)
    else:
        goes.line("^STOPPING SIGTERM")  # and it waits for a file that never comes
        assert goes.wait() == TAKEN_AWAY
        assert not any(line.startswith("SAVED") for line in goes.lines)
    assert time.monotonic() - began > 2.5, "it may run until then"
    stays.line("^STOPPING", since=mark)
    folder = folders[nodes.index(stays)]
    (folder / "go").touch()
    stays.line("^READY", since=mark)
    (folder / "done").touch()
    assert stays.wait() == 0
    assert not go.exists()


@both
def test_a_command_gives_notice_once_it_says_how_long(start: Start, tmp_path: Path) -> None:
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    os.mkfifo(answer)
    # It fails, then says nothing, then waits for an answer, as a metadata server that is asked for the next change.
    command = f"n=$(cat {asked} 2>/dev/null); echo $n. >{asked}; case $n in '') exit 9;; .) ;; *) cat {answer};; esac"
    node = start(2, tmp_path, nnodes="1", script=SAVES, env={"ELASTIC_RS_PREEMPT_NOTICE": command})
    node.line("^READY")
    node.line("tells nothing, and is asked again: it ended with exit code 9")
    with answer.open("w") as gives:
        gives.write("soon\n")
    node.line(r"begins with `soon`, must begin with the number of seconds that are left: 30s are taken")
    node.line("^STOPPING SIGTERM")
    (tmp_path / "go").touch()
    assert node.wait() == TAKEN_AWAY
    assert any(line.startswith("SAVED") for line in node.lines)


@both
def test_what_gives_notice_ends_with_the_agent(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = f"sleep 1000 & echo $! >{pid}.new; mv {pid}.new {pid}; wait"
    node = start(2, tmp_path, nnodes="1", script=SAVES, env={"ELASTIC_RS_PREEMPT_NOTICE": command})
    node.line("^READY")
    until("the command runs", pid.exists)
    (tmp_path / "done").touch()
    assert node.wait() == 0
    child = Path(f"/proc/{pid.read_text().strip()}")
    until("it is gone", lambda: not child.exists())


@both
def test_a_machine_that_stands_still_after_its_notice_is_out_when_it_goes(
    start: Start, tmp_path: Path, freezer: Freezer
) -> None:
    """Nobody waits until it has been silent for as long as the others."""
    done, notice = tmp_path / "done", tmp_path / "notice"
    conf = "last_call_timeout=1,keep_alive_interval=20,keep_alive_max_attempt=3"  # silent for 60 s
    env = {"ELASTIC_RS_PREEMPT_NOTICE": f"file:{notice}"}
    stays = start(2, "--until", done, nnodes="1:2", script=STEPS, conf=conf)
    stays.line("round 1, node rank")
    goes = start(3, "--until", done, nnodes="1:2", script=STEPS, conf=conf, env=env, under=freezer.under)
    worlds_of(stays, 2, workers=1)
    worlds_of(goes, 2, workers=1)
    until_step(stays)
    mark = stays.mark()
    notice.write_text("12 seconds\n")
    stays.line(r"127\.0\.0\.3 \(.*\) leaves within 1[12]\.\d s")
    freezer.freeze()
    stays.line(r"127\.0\.0\.3 \(.*\) is lost: its machine was taken away, and it had not left by then", since=mark)
    worlds_of(stays, 1, workers=1, since=mark)
    freezer.thaw()
    assert goes.wait() == TAKEN_AWAY
    ended_well(done, stays)


@both
def test_three_notices_are_one_change(start: Start, tmp_path: Path) -> None:
    done, notice = tmp_path / "done", tmp_path / "notice"
    env = {"ELASTIC_RS_PREEMPT_NOTICE": f"file:{notice}"}
    stays = start(2, "--until", done, nnodes="1:4", script=STEPS)
    stays.line("round 1, node rank")
    others = [start(number, "--until", done, nnodes="1:4", script=STEPS, env=env) for number in (3, 4, 5)]
    for node in [stays, *others]:
        worlds_of(node, 4, workers=1)
    until_step(stays)
    mark = stays.mark()
    notice.write_text("30\n")
    worlds_of(stays, 1, workers=1, since=mark)
    assert [node.wait() for node in others] == [TAKEN_AWAY] * 3
    changes = [line for line in stays.lines[mark:] if "changes in place: " in line]
    assert len(changes) == 1, changes
    assert "and 2 more" in changes[0]
    ended_well(done, stays)
    assert not [line for line in stays.lines[mark:] if "restarting all workers" in line]


@both
def test_a_node_that_waits_hears_signals_and_leaves_at_a_notice(start: Start, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    env = {"ELASTIC_RS_PREEMPT_NOTICE": f"file:{notice}", "ELASTIC_RS_FORWARD_SIGNALS": "USR1"}
    node = start(2, tmp_path, nnodes="2", script=SAVES, env=env)
    node.line(r"\(1 of 2 to 2 nodes\)|1 of 2 nodes|waits")
    node.signal(signal.SIGUSR1)
    node.line("received SIGUSR1: no worker runs that could get it")
    notice.write_text("600\n")
    node.line("its machine is taken away .*; this node leaves at once, since its workers are in no world")
    assert node.wait() == TAKEN_AWAY
