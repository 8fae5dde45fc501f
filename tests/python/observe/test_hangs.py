"""A training that hangs is named: on rank 0's terminal, to observers, and in files."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.observe import ask
from helpers.stores import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process

TRAINS = Path(__file__).parents[1] / "scripts" / "hangs_in_training.py"
SOURCE = TRAINS.read_text().splitlines()
LIMIT_S = 60.0
WATCHES = "elastic_rs-watc"
"""The thread that answers looks. The kernel keeps 15 bytes of a name."""

pytestmark = [pytest.mark.torchrun]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE, 1) if text in line)


def threads_of(pid: int) -> set[str]:
    return {comm.read_text().strip() for comm in Path(f"/proc/{pid}/task").glob("*/comm")}


@pytest.fixture
def train(job: Job, port: int, tmp_path: Path) -> Callable[..., Process]:
    """Return what starts a node of three ranks, of which one hangs after some steps."""

    def start(
        kind: str, rank: int, *options: str, launcher: str = "elastic_rs.run", env: dict[str, str] | None = None
    ) -> Process:
        command = [
            *(sys.executable, "-m", launcher, "--nnodes=1", "--nproc-per-node=3"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
            *(f"--log-dir={tmp_path / 'logs'}", "--tee=3", *options, str(TRAINS), kind, str(rank)),
        ]
        return job.start(command, name="node", env={"GO": str(tmp_path / "go"), **(env or {})})

    return start


def state(port: int, wanted: Callable[[Any], bool]) -> Any:
    """Return what `status` says of the standstill, once that is wanted."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = ask("status", f"127.0.0.1:{port}", "--json")
        assert answer.returncode == 0, answer
        hang = json.loads(answer.stdout)["state"].get("hang")
        if wanted(hang):
            return hang
        assert time.monotonic() < deadline, answer.stdout


SLEEPS = line_of("time.sleep(0.05)")
NAMES = {
    "sleep": rf"rank 1 has not entered all_reduce #\d+ of default_pg.*\n  at read_shard {TRAINS.name}:{SLEEPS} < ",
    "stop": rf"rank 1 was stopped by a signal \(state T\)\n  at hang hangs_in_training.py:{line_of('SIGSTOP')} < main ",
    "gil": rf"rank 1 holds the GIL in C.*\n  at hang hangs_in_training.py:{line_of('PyDLL')} < main ",
    "loader": rf"rank 1 waits for its data worker \d+: read_shard hangs_in_training.py:{SLEEPS}",
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_rank_that_holds_others_up_is_named_with_its_line(
    train: Callable[..., Process], job: Job, port: int, tmp_path: Path, kind: str
) -> None:
    node = train(kind, 1, "--hang-timeout=5", "--warm-start")
    node.line(r"training stands still for [\d.]+ s \(step \d; a step took 0\.\d+ s\): 2 of 3 ranks wait for rank 1 ")
    node.line(r"nothing is stopped \(--hang=report\)")
    shown = "\n".join(node.lines)
    assert re.search(NAMES[kind], shown), shown
    hang = state(port, lambda hang: hang and hang["found"])
    assert (hang["ranks"], hang["still_s"] >= 5) == ([1], True)
    dumps = {dump.parent.name for dump in (tmp_path / "logs").rglob("hang-1.txt")}
    assert dumps == {"0", "1", "2"}
    answer = {"0", "2"} if kind in ("stop", "gil") else {"0", "1", "2"}

    def recorded() -> dict[str, Any]:
        dumps = sorted((tmp_path / "logs").rglob("hang-1.fr.json"))
        return {dump.parent.name: dump.read_text() for dump in dumps}

    until("the flight recorders of all that can answer are written", lambda: answer == {*recorded()})
    until("they are whole", lambda: all(text.rstrip().endswith("}") for text in recorded().values()))
    entries = json.loads(recorded()["0"])["entries"]
    assert entries[-1]["profiling_name"] == "gloo:all_reduce", entries[-1]
    job.kill_leftovers()


def test_steps_of_optimizers_show_that_a_script_without_steps_goes_on(
    train: Callable[..., Process], port: int, tmp_path: Path
) -> None:
    node = train("unreported", 1)
    node.line("READY 0 ")
    hang = state(port, lambda hang: hang and hang["ranks"] == [1])
    assert re.search(r"waits +\d.* s for rank 1 at .* \(usually [\d.]+ s\)$", hang["text"]), hang
    assert re.search(r"\(a step took [\d.]+ s\)", hang["lines"][0]), hang
    answer = ask("status", f"127.0.0.1:{port}")
    assert not re.search("^step ", answer.stdout, re.MULTILINE), "nobody has reported one"
    (tmp_path / "go").touch()
    assert node.wait() == 0


def test_a_training_that_goes_on_is_said_to(train: Callable[..., Process], tmp_path: Path) -> None:
    node = train("sleep", 2, "--hang-timeout=3", "--warm-start")
    assert WATCHES in threads_of(int(node.line(r"READY 2 (\d+)")[1]))
    node.line("training stands still for ")
    (tmp_path / "go").touch()
    node.line(r"training goes on, after [\d.]+ s without progress")
    assert node.wait() == 0


def test_workers_are_restarted_if_that_is_wanted(train: Callable[..., Process], tmp_path: Path) -> None:
    node = train("stop", 0, "--hang=restart", "--warm-start")
    first = node.line(r"READY 0 (\d+)")[1]
    mark = node.mark()
    node.line(r"the workers are restarted \(--hang=restart\)")
    node.line("the training hung: rank 0 was stopped by a signal")
    again = node.line(r"READY 0 (\d+)", since=mark)[1]
    assert first != again, "without --max-restarts"
    (dump, *_) = sorted((tmp_path / "logs").rglob("0/hang-1.txt"))
    assert re.search(r", state T", dump.read_text())
    node.signal(signal.SIGTERM)
    node.wait()


def test_nobody_looks_if_that_is_off(train: Callable[..., Process], job: Job, port: int) -> None:
    node = train("sleep", 1, "--hang=off", "--warm-start")
    for rank in range(3):
        pid = int(node.line(rf"READY {rank} (\d+)")[1])
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"ELASTIC_RS_WATCH=" not in environ
        assert b"TORCH_FR_BUFFER_SIZE=" not in environ
        assert WATCHES not in threads_of(pid)
    assert state(port, lambda _: True) is None
    job.kill_leftovers()


def test_a_command_tells_somebody_of_a_hang(train: Callable[..., Process], job: Job, tmp_path: Path) -> None:
    told = tmp_path / "told"
    about = "$ELASTIC_RS_HANG_KIND $ELASTIC_RS_HANG_RANKS $TORCHELASTIC_RUN_ID"
    command = f"(cat; echo {about}) > {told}; echo TOLD; exit 3"
    node = train("sleep", 1, "--hang-timeout=3", "--warm-start", f"--on-hang={command}")
    node.line("^TOLD$")
    node.line(r"the command of --on-hang \(`\(cat; .*`\) ended with exit code 3 after ")
    text = told.read_text()
    assert re.match(r"training stands still for .*: 2 of 3 ranks wait for rank 1 .*\n  rank 1 has not entered ", text)
    assert text.endswith("\n  nothing is stopped (--hang=report)\nnot_entered 1 job\n"), text
    job.kill_leftovers()


def test_lines_are_progress_of_a_training_without_steps(train: Callable[..., Process], job: Job) -> None:
    node = train("prints", 1, "--hang-timeout=4", "--warm-start", "--progress-log=shard [0-9]+$")
    begun, mark = time.monotonic(), node.mark()
    node.line("reads shard 60$")
    assert time.monotonic() - begun > 10, "more than twice the limit"
    assert not [line for line in node.lines[mark:] if "stands still" in line]
    node.line("training stands still for ")
    job.kill_leftovers()


def test_torchrun_has_the_same_by_rdzv_conf_and_a_variable(train: Callable[..., Process], job: Job) -> None:
    node = train(
        *("prints", 1, "--rdzv-conf=hang=restart,hang_timeout=3"),
        launcher="torch.distributed.run",
        env={"ELASTIC_RS_PROGRESS_LOG": "shard [0-9]+$"},
    )
    node.line("reads shard 60$")
    assert not [line for line in node.lines if "stands still" in line], "its lines are progress"
    mark = node.mark()
    node.line(r"training stands still for [\d.]+ s .*: 2 of 3 ranks wait for rank 1 ")
    node.line("the training hung: rank 1 has not entered ")
    node.line("READY 1 ", since=mark)
    job.kill_leftovers()
