"""Signals as users, schedulers and wrappers send them: twice, to ignored handlers, to programs with threads."""

import functools
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.stores import until

from .conftest import SCRIPTS, Start, older_lacks

pytestmark = [pytest.mark.torchrun]
SAVES, EMBEDS, LOADS = SCRIPTS / "saves.py", SCRIPTS / "embeds.py", SCRIPTS / "loads.py"
both = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
IGNORES_HANGUP = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]


def saved(node: Process, folder: Path, code: int) -> None:
    """Check that the worker has all the time that it needs, and that the agent ends with this code."""
    node.line("^STOPPING")
    (folder / "go").touch()
    assert node.wait() == code
    assert any(line.startswith("SAVED") for line in node.lines), node.tail()


def shows(node: Process, expected: list[str]) -> bool:
    return sorted(line for line in node.lines if line.startswith("CHECKPOINT")) == expected


@both
def test_two_signals_at_once_are_one_and_the_checkpoint_is_saved(start: Start, tmp_path: Path) -> None:
    # A scheduler that sends SIGTERM to all processes of a job, of which one is a wrapper that passes SIGINT on.
    node = start(2, tmp_path, nnodes="1", script=SAVES)
    node.line("^READY")
    node.signal(signal.SIGTERM)
    node.signal(signal.SIGINT)
    got = node.line("^STOPPING (SIG[A-Z]+)")[1]
    saved(node, tmp_path, 128 + signal.Signals[got])


@both
def test_a_trainer_with_data_workers_saves_before_they_get_the_signal(start: Start, tmp_path: Path) -> None:
    # With PyTorch's launcher they end at once, and the trainer fails in `next(batches)`.
    node = start(2, tmp_path, nnodes="1", nproc=2, script=LOADS)
    for rank in range(2):
        node.line(f"^READY {rank}")
    node.signal(signal.SIGTERM)
    assert node.wait() == 143
    steps = [re.search(rf"^SAVED {rank} in step (\d+)$", "\n".join(node.lines), re.MULTILINE) for rank in range(2)]
    assert all(steps), node.tail()
    assert [(tmp_path / f"checkpoint-{rank}").read_text() for rank in range(2)] == [step and step[1] for step in steps]
    assert not any("DataLoader worker" in line for line in node.lines), node.tail()


@both
@pytest.mark.parametrize("how", ["each", "ends", "none"])
def test_a_signal_to_forward_reaches_the_workers_and_ends_nothing(
    start: Start, tmp_path: Path, agent: str, how: str
) -> None:
    if agent == "rust":
        older_lacks("--signals-to-handle")
    # Of two lists that name it, the one of signals that end the agent counts.
    options = ["--signals-to-handle=SIGTERM,SIGUSR1"] if how == "ends" else []
    env = {"ELASTIC_RS_FORWARD_SIGNALS": "" if how == "none" else "USR1", "ELASTIC_RS_LOG": "info"}
    node = start(2, tmp_path, nnodes="1", nproc=2, script=SAVES, options=options, env=env)
    for rank in range(2):
        node.line(f"^READY .*rank={rank}")
    if how == "each":
        for count in range(1, 4):  # at once: none of them repeats another
            node.signal(signal.SIGUSR1)
            expected = sorted([f"CHECKPOINT rank={rank}" for rank in range(2)] * count)
            until(f"{count} checkpoints of each rank", functools.partial(shows, node, expected))
        node.line(rf"received SIGUSR1: passed on to the workers; it was sent by pid {os.getpid()} ")
        node.signal(signal.SIGTERM)
        node.line("^STOPPING SIGTERM")
        (tmp_path / "go").touch()
        assert node.wait() == 143
        return
    node.signal(signal.SIGUSR1)
    if how == "ends":
        node.line("SIGUSR1 ends the agent, so that ELASTIC_RS_FORWARD_SIGNALS has no effect on it")
        assert node.line("Received 10 death signal")
        (tmp_path / "done").touch()
    assert node.wait() == (138 if how == "ends" else -signal.SIGUSR1)


@both
def test_timeout_which_signals_twice_leaves_workers_their_grace(start: Start, tmp_path: Path) -> None:
    # GNU timeout signals its child and then its own group.
    node = start(2, tmp_path, nnodes="1", script=SAVES, under=["timeout", "600"])
    node.line("^READY")
    node.signal(signal.SIGTERM)
    saved(node, tmp_path, 143)


@both
def test_a_job_under_nohup_lives_on_when_its_terminal_goes(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, nnodes="1", script=SAVES, under=IGNORES_HANGUP)
    worker = int(node.line(r"^READY hangup=ignored pid=(\d+)")[1])
    node.line("SIGHUP stays ignored, as it was when this process was started")
    node.signal(signal.SIGHUP)
    os.kill(worker, signal.SIGHUP)
    (tmp_path / "done").touch()
    assert node.wait() == 0
    assert not any("received SIGHUP" in line or "Received 1 death" in line for line in node.lines)


@both
def test_without_nohup_the_end_of_the_terminal_ends_the_job(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, nnodes="1", script=SAVES)
    node.line("^READY hangup=default")
    node.signal(signal.SIGHUP)
    saved(node, tmp_path, 129)


@both
@pytest.mark.parametrize("given", ["flag", "variable"])
def test_under_nohup_sighup_is_handled_if_it_is_named(start: Start, tmp_path: Path, agent: str, given: str) -> None:
    if agent == "rust":
        older_lacks("--signals-to-handle")
    names = "SIGTERM,SIGHUP"
    options = [f"--signals-to-handle={names}"] if given == "flag" else []
    env = {"PET_SIGNALS_TO_HANDLE": names} if given == "variable" else {}
    node = start(2, tmp_path, nnodes="1", script=SAVES, under=IGNORES_HANGUP, options=options, env=env)
    node.line("^READY hangup=default")
    node.signal(signal.SIGHUP)
    saved(node, tmp_path, 129)


def test_elastic_run_takes_pytorchs_own_default_for_named_if_it_is_given(job: Job, tmp_path: Path) -> None:
    flags = ["--standalone", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT"]
    command = [*IGNORES_HANGUP, sys.executable, "-m", "elastic_rs.run", *flags, str(SAVES), str(tmp_path)]
    node = job.start(command)
    node.line("^READY hangup=default")
    node.signal(signal.SIGHUP)
    saved(node, tmp_path, 129)


@both
def test_ctrl_c_ends_a_background_job_of_a_script(start: Start, tmp_path: Path) -> None:
    # A shell without job control starts its background jobs with SIGINT and SIGQUIT ignored.
    under = ["sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh"]
    node = start(2, tmp_path, nnodes="1", script=SAVES, under=under)
    node.line("^READY")
    node.signal(signal.SIGINT)
    saved(node, tmp_path, 130)


@both
def test_the_log_says_who_sent_a_signal(start: Start, tmp_path: Path) -> None:
    node = start(2, tmp_path, nnodes="1", script=SAVES, env={"ELASTIC_RS_LOG": ""})
    node.line("^READY")
    node.signal(signal.SIGTERM)
    name = Path("/proc/self/comm").read_text().strip()
    pattern = rf"Received 15 death signal, .*; it was sent by pid {os.getpid()} \(`{re.escape(name)}`\), user "
    node.line(pattern)
    saved(node, tmp_path, 143)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["main", "another"])
def test_a_program_with_threads_that_runs_a_job_gets_its_signals(
    job: Job, tmp_path: Path, number: signal.Signals, where: str
) -> None:
    node = job.start([sys.executable, str(EMBEDS), where, "--standalone", str(SAVES), str(tmp_path)])
    node.line("^READY")
    node.signal(number)
    saved(node, tmp_path, 128 + number)
    node.line(f"^ENDED {128 + number} default$")
