"""``elastic-rs stacks``, and what is written down before a worker is killed."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.observe import ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process

HANGS = Path(__file__).parents[1] / "scripts" / "hangs.py"
LINE = next(number for number, line in enumerate(HANGS.read_text().splitlines(), 1) if "time.sleep" in line)
LIMIT_S = 60.0

pytestmark = [pytest.mark.torchrun]


@pytest.fixture
def hang(job: Job, port: int, tmp_path: Path) -> Callable[..., Process]:
    """Return what starts a node whose ranks hang in these ways, and waits until all run."""

    def start(*kinds: str, launcher: str = "elastic_rs.run", options: tuple[str, ...] = ()) -> Process:
        command = [
            *(sys.executable, "-m", launcher, "--nnodes=1", f"--nproc-per-node={len(kinds)}"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
            *(f"--log-dir={tmp_path / 'logs'}", "--tee=3", *options, str(HANGS), ",".join(kinds)),
        ]
        node = job.start(command, name="node")
        for rank in range(len(kinds)):
            node.line(rf"READY {rank} ")
        return node

    return start


def seen(port: int, *options: str, until: Callable[[dict[str, object]], bool] = lambda _: True) -> dict[str, object]:
    """Return what `stacks --json` says, once that is so: a worker that is ready has not hung yet."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = ask("stacks", f"127.0.0.1:{port}", "--json", *options)
        assert answer.returncode == 0, answer
        found: dict[str, object] = json.loads(answer.stdout)
        if until(found) or time.monotonic() > deadline:
            return found


@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_each_rank_is_shown_where_it_stands(hang: Callable[..., Process], job: Job, port: int, launcher: str) -> None:
    hang("sleep", "stop", "hold_the_gil", "sleep", "raise_beside_a_thread", launcher=launcher)
    answer = ask("stacks", f"127.0.0.1:{port}")
    assert answer.returncode == 0, answer
    lines = answer.stdout.splitlines()
    (sleeps,) = [line for line in lines if re.match(r"2 ranks +0,3 ", line)]
    assert f"load_batch hangs.py:{LINE} < sleep hangs.py" in sleeps
    (stopped,) = [line for line in lines if re.match(r"1 rank +1 ", line)]
    assert " stopped " in stopped
    assert "stop hangs.py" in stopped
    (held,) = [line for line in lines if re.match(r"1 rank +2 ", line)]
    assert " holds the GIL " in held
    assert "hold_the_gil hangs.py" in held
    (ended,) = [line for line in lines if re.match(r"1 rank +4 ", line)]
    assert " main thread ended " in ended
    job.kill_leftovers()


def test_what_a_grace_does_not_end_is_written_down_before_the_kill(
    hang: Callable[..., Process], tmp_path: Path
) -> None:
    node = hang("ignore_sigterm", "sleep", options=("--shutdown-timeout=2",))
    pid = node.line(r"IGNORES (\d+)")[1]
    node.signal(signal.SIGTERM)
    node.wait()
    (dump,) = (tmp_path / "logs").rglob("hang-*.txt")
    assert dump.parent.name == "0", "of the one that has not ended, in its folder"
    text = dump.read_text()
    assert re.search(rf"^pid {pid} \(.*\), state S, \w*nanosleep", text, re.MULTILINE), text
    assert f"load_batch ({HANGS}:{LINE})" in text
    node.line(
        rf"worker with rank 0 \(pid {pid}\) has not ended within its grace, and is killed; .*{re.escape(str(dump))}"
    )


def test_a_rank_that_is_not_there_is_said(hang: Callable[..., Process], job: Job, port: int) -> None:
    hang("sleep")
    answer = ask("stacks", f"127.0.0.1:{port}", "--rank=7")
    assert answer.returncode == 3
    assert "rank 7" in answer.stderr
    whole = seen(port, "--rank=0", until=lambda one: "load_batch" in str(one["lines"]))
    assert any(f"load_batch ({HANGS}:{LINE})" in line for line in whole["lines"])  # type: ignore[attr-defined]
    job.kill_leftovers()
