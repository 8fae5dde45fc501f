"""Exit codes by kind of failure: the tables in docs/exit-codes.md."""

import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.procs import Job, Process

from .test_elastic_run import LAUNCHERS

pytestmark = [pytest.mark.torchrun]

KINDS = {
    "all workers succeeded": ([], ["true"], 0),
    "a worker ended with 3": ([], ["sh", "-c", "exit 3"], 1),
    "a worker was killed": ([], ["sh", "-c", "kill -KILL $$$$"], 1),
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


FAILS = ["sh", "-c", "exit 3"]
# One step again and again, and a failure that names no place in the program.
IN_VAIN = [sys.executable, "-c", "import elastic_rs, os; elastic_rs.step(5); os._exit(3)"]
WANTED = {
    "class: success": ("exit_code=class", ["true"], 0),
    "worker: an exit code": ("exit_code=worker", FAILS, 3),
    "worker: a signal": ("exit_code=worker", ["sh", "-c", "kill -KILL $$$$"], 137),
    "class: no restart is left": ("exit_code=class", FAILS, 92),
    "class: a signal": ("exit_code=class", ["sh", "-c", "kill -KILL $$$$"], 92),
    "class: out of resets": ("exit_code=class,reset_limit=0", FAILS, 93),
    "no progress": ("restart_window=3600", IN_VAIN, 93),
    "worker: no progress": ("restart_window=3600,exit_code=worker", IN_VAIN, 3),
    "class: nobody else came": ("exit_code=class,join_timeout=0.2", ["true"], 1),
    "worker: nobody else came": ("exit_code=worker,join_timeout=0.2", ["true"], 1),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", WANTED)
def test_the_exit_code_is_the_one_that_is_wanted(job: Job, launcher: str, kind: str) -> None:
    conf, program, code = WANTED[kind]
    nodes = "2" if "nobody" in kind else "1"
    restarts = "9" if code in {3, 93} else "0"
    node = job.start(
        command(launcher, [f"--nnodes={nodes}", f"--max-restarts={restarts}", f"--rdzv-conf={conf}"], program)
    )
    assert node.wait() == code, node.tail()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exit_code_that_is_never_restarted_ends_the_job_and_its_report_is_printed_once(
    job: Job, launcher: str
) -> None:
    options = ["--max-restarts=3", "--rdzv-conf=no_restart_on=3+4,exit_code=class"]
    node = job.start(command(launcher, options, ["sh", "-c", "echo started; exit 3"]))
    assert node.wait() == 92, node.tail()
    node.line(r"exit code 3 is never restarted \(no_restart_on\)")
    lines = [line for line in node.lines if line.startswith("torch.distributed.elastic.multiprocessing.errors.Child")]
    assert (len(lines), node.lines.count("started")) == (1, 1)
    node.line(r"^  exitcode  : 3 ")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("number", "wanted", "code"),
    [
        (signal.SIGTERM, "class", 91),
        (signal.SIGTERM, "worker", 143),
        (signal.SIGINT, "class", 130),
    ],
)
def test_sigterm_is_a_preemption(job: Job, launcher: str, number: signal.Signals, wanted: str, code: int) -> None:
    options = [f"--rdzv-conf=exit_code={wanted}"]
    node = job.start(command(launcher, options, ["sh", "-c", "echo started; exec sleep 300"]))
    node.line("started")
    node.signal(number)
    assert node.wait() == code, node.tail()


def pair(job: Job, launcher: str, program: Sequence[str], conf: str, port: int) -> list[Process]:
    """Start two nodes. The second one does not host the coordinator."""
    nodes = []
    for rank in (0, 1):
        options = ["--nnodes=2", f"--rdzv-conf=node_rank={rank},is_host={1 - rank},keep_alive_interval=1,{conf}"]
        nodes.append(job.start(command(launcher, options, program, f"127.0.0.1:{port}"), name=f"node{rank}"))
    return nodes


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("wanted", "code"), [("class", 92), ("worker", 7)])
def test_all_nodes_end_with_the_code_of_the_same_failure(
    job: Job, port: int, launcher: str, wanted: str, code: int
) -> None:
    program = ["sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 300"]
    nodes = pair(job, launcher, program, f"exit_code={wanted}", port)
    assert [node.wait() for node in nodes] == [code, code], nodes[0].tail()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("lost", ["a member", "the coordinator"])
def test_a_node_that_is_left_without_the_others_says_that_it_was_a_machine(
    job: Job, port: int, launcher: str, lost: str
) -> None:
    conf = "exit_code=class,join_timeout=1,coordinator_timeout=1"
    host, other = pair(job, launcher, ["sh", "-c", "echo started; exec sleep 300"], conf, port)
    for node in (host, other):
        node.line("started")
    killed, left = (other, host) if lost == "a member" else (host, other)
    killed.signal(signal.SIGKILL)
    assert left.wait() == 90, left.tail()
    killed.wait()


CALLS = """
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

config = LaunchConfig(
    1, 1, 1, run_id="job", rdzv_backend="rust-c10d", rdzv_endpoint="127.0.0.1:0", rdzv_configs={"exit_code": "class"}
)
try:
    elastic_launch(config, "sh")("-c", "exit 3")
except ChildFailedError:
    print("caught", flush=True)
"""


def test_a_program_that_calls_pytorchs_launcher_goes_on(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    program = job.start([sys.executable, str(script)])
    assert program.wait() == 0, program.tail()
    program.line("^caught$")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_code_that_does_not_exist_is_refused_in_one_sentence(job: Job, launcher: str) -> None:
    node = job.start(command(launcher, ["--rdzv-conf=no_restart_on=3+256"], ["true"]))
    assert node.wait() == (2 if launcher == "elastic-run" else 1), node.tail()
    node.line(re.escape("--rdzv-conf no_restart_on is `3+256`, must be 1 to 32 exit codes from 1 to 255"))
