"""Exit codes by kind of failure: the table in docs/agent.md."""

import signal
import socket
import sys
from collections.abc import Sequence

import pytest
from helpers.procs import Job

from .test_elastic_run import LAUNCHERS

pytestmark = [pytest.mark.torchrun]

KINDS = {
    "all workers succeeded": ([], ["true"], 0),
    "a worker ended with 3": ([], ["sh", "-c", "exit 3"], 1),
    "a worker was killed": ([], ["sh", "-c", "kill -KILL $$"], 1),
    "too few nodes came in time": (["--nnodes=2", "--rdzv-conf=join_timeout=0.2"], ["true"], 1),
}


def command(launcher: str, options: Sequence[str], program: Sequence[str], endpoint: str = "127.0.0.1:0") -> list[str]:
    by = ["--rdzv-backend=rust-c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--max-restarts=0"]
    return [sys.executable, "-m", LAUNCHERS[launcher], *by, *options, "--no-python", *program]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_exit_code_says_what_kind_of_failure_it_was(job: Job, launcher: str, kind: str) -> None:
    options, program, code = KINDS[kind]
    node = job.start(command(launcher, options, program))
    assert node.wait() == code, node.tail()


@pytest.mark.parametrize(("launcher", "code"), [("torchrun", 1), ("elastic-run", 2)])
def test_a_program_that_does_not_exist_ends_with_its_own_code(job: Job, launcher: str, code: int) -> None:
    # elastic-run checks the program before it starts anything. Under torchrun the workers fail to start.
    node = job.start(command(launcher, [], ["/no/such/program"]))
    assert node.wait() == code, node.tail()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_invalid_command_line_ends_with_2(job: Job, launcher: str) -> None:
    node = job.start(command(launcher, ["--no-such-flag=1"], ["true"]))
    assert node.wait() == 2, node.tail()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_endpoint_that_cannot_be_hosted_ends_with_1(job: Job, launcher: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        node = job.start(command(launcher, ["--rdzv-conf=is_host=1"], ["true"], endpoint))
        assert node.wait() == 1, node.tail()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_agent_ends_it_with_128_and_its_number(job: Job, launcher: str, number: signal.Signals) -> None:
    node = job.start(command(launcher, [], ["sh", "-c", "echo started; exec sleep 300"]))
    node.line("started")
    node.signal(number)
    assert node.wait() == 128 + number, node.tail()
