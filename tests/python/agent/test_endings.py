"""An agent that ends by a signal or an exception leaves no worker."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elastic_rs
import pytest
from helpers import functions
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

if TYPE_CHECKING:
    from helpers.procs import Job

from .conftest import NODE, gone, metrics_of_torch, until


@pytest.mark.parametrize("entry", ["program", "function"])
@pytest.mark.parametrize("backend", ["rust-c10d", "static"])
def test_a_signal_ends_workers_and_agent(agent_of: Any, tmp_path: Path, entry: str, backend: str) -> None:
    agent = (
        agent_of(functions.waits, str(tmp_path), nproc=2, start_method="forkserver", backend=backend)
        if entry == "function"
        else agent_of(
            "sh",
            "-c",
            f"echo $$$$ > {tmp_path}/$RANK.tmp; mv {tmp_path}/$RANK.tmp {tmp_path}/$RANK; sleep 300",
            nproc=2,
            backend=backend,
        )
    )

    def interrupt() -> None:
        until(lambda: all((tmp_path / str(i)).exists() for i in (0, 1)), "workers run")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as caught, metrics_of_torch() as names:
        agent.run()
    thread.join()
    assert caught.value.sigval == signal.SIGTERM
    assert "SimpleElasticAgent.run.failure" in names
    assert not isinstance(caught.value, SystemExit), "the program is not torchrun"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.sigval) == (type(caught.value), str(caught.value), signal.SIGTERM)
    pids = [int((tmp_path / str(i)).read_text()) for i in (0, 1)]
    assert [gone(pid) for pid in pids] == [True, True]


@pytest.mark.parametrize("ends", ["signal", "success"])
def test_a_program_has_its_own_handlers_again_once_the_job_has_ended(agent_of: Any, tmp_path: Path, ends: str) -> None:
    """In a notebook, "interrupt" must interrupt the next cell, and end neither it nor this one with SystemExit."""
    if ends == "success":
        (tmp_path / "go").touch()
    script = f"touch {tmp_path}/runs; until test -e {tmp_path}/go; do sleep 0.1; done"
    agent = agent_of("sh", "-c", script)
    mine: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def interrupt() -> None:
        until((tmp_path / "runs").exists, "the worker runs")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    if ends == "signal":
        thread.start()
        with pytest.raises(SignalException) as caught:
            agent.run()
        thread.join()
        assert (caught.value.sigval, isinstance(caught.value, SystemExit)) == (signal.SIGINT, False)
    else:
        assert agent.run().state == WorkerState.SUCCEEDED
    began = time.monotonic()
    now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert now[:2] == before[:2]
    assert ends == "signal" or now == before
    until(lambda: time.monotonic() > began + 2 * elastic_rs._elastic_rs.SAME_SIGNAL_S, "a signal is another one")
    os.kill(os.getpid(), signal.SIGTERM)
    assert mine == [signal.SIGTERM]
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 2 * elastic_rs._elastic_rs.SAME_SIGNAL_S, "a signal is another one")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_in_the_middle_of_a_start_leaves_no_worker(agent_of: Any, tmp_path: Path) -> None:
    script = f"echo $$$$ > {tmp_path}/$RANK.tmp; mv {tmp_path}/$RANK.tmp {tmp_path}/$RANK; sleep 300"
    agent = agent_of("sh", "-c", script, nproc=16)

    def interrupt() -> None:
        until((tmp_path / "0").exists, "the first worker runs")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    pids = [int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert pids
    assert [pid for pid in pids if not gone(pid)] == []


def test_a_worker_signalled_right_after_its_fork_is_no_second_agent(agent_of: Any) -> None:
    # The agent's signal handler must not raise in the child, in the middle of the agent's stack.
    agent = agent_of(functions.rank, start_method="fork")
    parent, armed = os.getpid(), True

    def stop_child() -> None:
        if armed and os.getppid() == parent:
            os.kill(os.getpid(), signal.SIGTERM)

    os.register_at_fork(after_in_child=stop_child)
    try:
        result = agent.run()
    finally:
        armed = False
    assert result.is_failed()
    assert "SignalException" in str(result.failures[0].message)


@pytest.mark.parametrize("entry", ["program", "function"])
def test_an_exception_from_outside_leaves_no_worker(agent_of: Any, tmp_path: Path, entry: str) -> None:
    # A signal handler of the user raises it, for a signal that agents do not handle.
    class EnoughError(Exception):
        pass

    def handler(*_: object) -> None:
        raise EnoughError

    if entry == "function":
        agent = agent_of(functions.waits, str(tmp_path), start_method="fork")
    else:
        agent = agent_of("sh", "-c", f"echo $$$$ > {tmp_path}/0.tmp; mv {tmp_path}/0.tmp {tmp_path}/0; sleep 300")
    before = signal.signal(signal.SIGUSR1, handler)

    def interrupt() -> None:
        # Not while the agent forks, because that would leave the lock of `logging` held.
        until(
            lambda: (tmp_path / "0").exists() and agent.get_worker_group().state == WorkerState.HEALTHY,
            "the worker runs",
        )
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        agent.run()
    except EnoughError as error:  # noqa: F841 - held on purpose
        # The exception holds the frames of `run`, and their objects.
        pid = int((tmp_path / "0").read_text())
        assert gone(pid)
    else:
        pytest.fail("nothing was raised")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.cold
@pytest.mark.torchrun
def test_python_s_exit_code_names_the_signal(job: Job) -> None:
    node = job.torchrun(
        "--rdzv-backend=rust-c10d",
        f"--rdzv-endpoint={NODE}:0",
        "--no-python",
        "sh",
        "-c",
        "echo started; exec sleep 300",
        name="node",
    )
    node.line("started")
    node.signal(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
