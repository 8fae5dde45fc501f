"""``elastic-rs stacks``, and what is written down before a worker is killed."""

from __future__ import annotations

import json
import os
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

    def start(
        *kinds: str,
        launcher: str = "elastic_rs.run",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Process:
        command = [
            *(sys.executable, "-m", launcher, "--nnodes=1", f"--nproc-per-node={len(kinds)}"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
            *(f"--log-dir={tmp_path / 'logs'}", "--tee=3", *options, str(HANGS), ",".join(kinds)),
        ]
        node = job.start(command, name="node", env=env)
        for rank in range(len(kinds)):
            node.line(rf"READY {rank} ")
        return node

    return start


def lines(port: int, *patterns: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None) -> list[str]:
    """Return what `stacks` shows, once a line matches each of these: a worker that is ready has not hung yet."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = ask("stacks", f"127.0.0.1:{port}", *options, env=env)
        assert answer.returncode == 0, answer
        if all(re.search(pattern, answer.stdout, re.MULTILINE) for pattern in patterns):
            return answer.stdout.splitlines()
        assert time.monotonic() < deadline, answer.stdout


@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_each_rank_is_shown_where_it_stands(hang: Callable[..., Process], job: Job, port: int, launcher: str) -> None:
    hang("sleep", "stop", "hold_the_gil", "sleep", "raise_beside_a_thread", launcher=launcher)
    shown = lines(
        port,
        rf"^2 ranks +0,3 .* load_batch hangs.py:{LINE} < sleep hangs.py",
        r"^1 rank +1 .* stopped .* stop hangs.py",
        r"^1 rank +2 .* holds the GIL .* hold_the_gil hangs.py",
        r"^1 rank +4 .* main thread ended ",
    )
    assert len(shown) == 4, "the smallest groups first, and nothing else"
    assert shown[-1].startswith("2 ranks")
    machine = ask("stacks", f"127.0.0.1:{port}", "--json")
    assert {group["ranks"] for group in json.loads(machine.stdout)["groups"]} == {"0,3", "1", "2", "4"}
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
    said = rf"worker with rank 0 \(pid {pid}\) has not ended yet, and is killed in 0.6 s if it does not; "
    node.line(said + f".*{re.escape(str(dump))}")


def test_a_rank_that_is_not_there_is_said(hang: Callable[..., Process], job: Job, port: int) -> None:
    hang("sleep")
    answer = ask("stacks", f"127.0.0.1:{port}", "--rank=7")
    assert answer.returncode == 3
    assert "rank 7" in answer.stderr
    lines(port, rf"^  load_batch \({HANGS}:{LINE}\)$", options=("--rank=0",))
    job.kill_leftovers()


def test_a_deep_look_has_what_py_spy_shows(hang: Callable[..., Process], job: Job, port: int, tmp_path: Path) -> None:
    (py_spy := tmp_path / "py-spy").write_text(
        '#!/bin/sh\necho "Process $4: train --key=1"; echo "Python v3.11"; echo "  f (a.py:3) $@"\n'
    )
    py_spy.chmod(0o755)
    node = hang("sleep", "sleep", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    pid = node.line(r"READY 1 (\d+)")[1]
    if (Path(sys.executable).parent / "py-spy").exists():
        pytest.skip("another py-spy is installed beside this Python")
    shown = ask("stacks", f"127.0.0.1:{port}", "--rank=1", "--deep")
    assert shown.returncode == 0, shown
    assert shown.stdout.endswith(f"\npy-spy:\n  Python v3.11\n    f (a.py:3) dump --nonblocking --pid {pid}\n"), (
        shown.stdout
    )
    py_spy.unlink()
    shown = ask("stacks", f"127.0.0.1:{port}", "--rank=0", "--deep")
    assert "\npy-spy:\n  it is not installed on this rank's node" in shown.stdout, shown
    refused = ask("stacks", f"127.0.0.1:{port}", "--deep")
    assert (refused.returncode, "--deep needs --rank=N" in refused.stderr) == (2, True), refused
    job.kill_leftovers()


def test_a_protected_job_shows_where_it_stands_to_those_who_have_its_token(
    hang: Callable[..., Process], job: Job, port: int, tmp_path: Path
) -> None:
    token = tmp_path / "job.token"
    assert ask("token", "new", "-o", token).returncode == 0
    secured = {"ELASTIC_RS_TOKEN_FILE": str(token)}
    hang("sleep", env=secured)
    endpoint = f"127.0.0.1:{port}"
    refused = ask("stacks", endpoint, "--run-id=job")
    assert refused.returncode == 3
    assert not refused.stdout
    lines(port, "^1 rank  0  .* load_batch", options=("--run-id=job",), env=secured)
    job.kill_leftovers()


def test_where_functions_stand_is_shown_and_written_down_too(job: Job, port: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FUNCTIONS.format(port=port, logs=tmp_path / "logs"))
    process = job.start([sys.executable, str(program)], name="program")
    process.line("^IGNORES")
    lines(port, r"^2 ranks +0,1 .* ignore program.py:9")
    process.signal(signal.SIGTERM)
    process.wait()
    dumps = sorted((tmp_path / "logs").rglob("hang-*.txt"))
    assert [dump.parent.name for dump in dumps] == ["0", "1"]
    assert "ignore" in dumps[0].read_text()


FUNCTIONS = """\
import signal, time
import elastic_rs


def ignore() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("IGNORES", flush=True)
    while True:
        time.sleep(600)


if __name__ == "__main__":
    elastic_rs.launch(
        ignore,
        elastic_rs.LaunchConfig(
            nproc_per_node=2, rdzv_backend="rust-c10d", rdzv_endpoint="127.0.0.1:{port}", rdzv_id="job",
            shutdown_timeout=2, log_dir="{logs}",
        ),
    )
"""
