"""What workers answer when their agent looks where they stand, and who starts the thread that does it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.observe import ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process

COLLECTIVES = Path(__file__).parents[1] / "scripts" / "collectives.py"
THREAD = "elastic_rs-watc"
"""As the kernel cuts its name."""
LIMIT_S = 60.0


@pytest.fixture
def hang(job: Job, port: int) -> Callable[..., Process]:
    """Return what starts a node whose ranks hang in these ways, and waits until all are about to."""

    def start(*kinds: str, launcher: str = "elastic_rs.run", options: tuple[str, ...] = ()) -> Process:
        command = [
            *(sys.executable, "-m", launcher, "--nnodes=1", f"--nproc-per-node={len(kinds)}", "--tee=3"),
            *("--rdzv-backend=rust-c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
            *(*options, str(COLLECTIVES), ",".join(kinds)),
        ]
        node = job.start(command, name="node")
        for rank in range(len(kinds)):
            node.line(rf"READY {rank} ")
        return node

    return start


def shown(port: int, *patterns: str) -> str:
    """Return what `stacks` shows, once a line matches each of these: a rank that is ready has not hung yet."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = ask("stacks", f"127.0.0.1:{port}")
        assert answer.returncode == 0, answer
        if all(re.search(pattern, answer.stdout, re.MULTILINE) for pattern in patterns):
            return answer.stdout
        assert time.monotonic() < deadline, answer.stdout


@pytest.mark.torchrun
@pytest.mark.parametrize("launcher", ["elastic_rs.run", "torch.distributed.run"])
def test_the_collective_is_named_in_which_ranks_wait(
    hang: Callable[..., Process], job: Job, port: int, launcher: str
) -> None:
    hang("enter", "sleep", "enter", launcher=launcher)
    shown(port, r"^1 rank +1 .* sleep collectives.py:", r"^2 ranks +0,2 .* waits +all_reduce #3 of default_pg .* enter")
    job.kill_leftovers()


@pytest.mark.torchrun
def test_a_warm_worker_answers_too(hang: Callable[..., Process], job: Job, port: int) -> None:
    hang("enter", "sleep", options=("--warm-start",))
    shown(port, r"^1 rank +0 .* waits +all_reduce #3 of default_pg ")
    job.kill_leftovers()


@pytest.mark.torchrun
def test_who_holds_the_gil_is_shown_whether_it_sleeps_or_not(hang: Callable[..., Process], job: Job, port: int) -> None:
    node = hang("hold_the_gil", "search", "enter")
    lines = shown(
        port,
        r"^1 rank +0 .* holds the GIL .* hold_the_gil collectives.py",
        r"^1 rank +1 .* holds the GIL .* search collectives.py",
        r"^1 rank +2 .* waits +all_reduce #3 of default_pg",
    )
    assert len(lines.splitlines()) == 3
    pids = [int(node.line(rf"READY {rank} (\d+)")[1]) for rank in (0, 1)]
    threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]  # noqa: PTH208
    shown(port)
    assert [len(os.listdir(f"/proc/{pid}/task")) for pid in pids] == threads  # noqa: PTH208
    job.kill_leftovers()


@pytest.mark.torchrun
def test_data_workers_have_no_such_thread(hang: Callable[..., Process], job: Job, port: int) -> None:
    node = hang("load")
    for method in ("fork", "spawn", "forkserver"):
        assert THREAD not in node.line(rf"DATA WORKER {method}: (.*)")[1]
    assert node.line("WORKER: (.*)")[1].split(",").count(THREAD) == 1
    shown(port, r"^1 rank +0 .* load collectives.py:")
    job.kill_leftovers()


@pytest.mark.torchrun
def test_functions_answer_too(job: Job, port: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FUNCTIONS.format(port=port))
    process = job.start([sys.executable, str(program)], name="program")
    process.line("^READY")
    shown(port, r"^1 rank +0 .* waits +all_reduce #1 of default_pg .* train program.py")
    job.kill_leftovers()


FUNCTIONS = """\
import os, time
import elastic_rs


def train() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        print("READY", flush=True)
        time.sleep(600)
    dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    elastic_rs.launch(
        train,
        elastic_rs.LaunchConfig(
            nproc_per_node=2, rdzv_backend="rust-c10d", rdzv_endpoint="127.0.0.1:{port}", rdzv_id="job"
        ),
    )
"""


def run(code: str, env: dict[str, str] | None = None) -> str:
    """Return what Python prints for this code, in an environment with these variables of ours alone."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_RS_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=own | (env or {}),
        timeout=LIMIT_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OURS = "print(*sorted(name for name in sys.modules if name.startswith('elastic_rs')))"


def test_elsewhere_than_in_a_worker_torch_loads_the_entry_point_alone() -> None:
    assert run(f"import sys, torch\n{OURS}").split() == [
        "elastic_rs",
        "elastic_rs._integration",
        "elastic_rs._integration._watch",
    ]
    assert run(f"import sys, torch\n{OURS}", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ELASTIC_RS_WATCH": "@x"}) == ""


def test_an_entry_point_that_fails_does_not_fail_the_import_of_torch() -> None:
    code = "import sys; sys.modules['elastic_rs._elastic_rs'] = None; import torch; print(torch.ones(1).item())"
    assert run(code, {"ELASTIC_RS_WATCH": "@x"}) == "1.0"


@pytest.mark.parametrize("address", ["@elastic_rs-of-nobody", "no address", "@" + "x" * 200])
def test_without_an_agent_a_script_runs_on_and_ends(address: str) -> None:
    assert run("import torch; print(torch.ones(1).item())", {"ELASTIC_RS_WATCH": address}) == "1.0"


def test_the_answer_of_a_process_without_groups_is_empty_and_imports_no_torch() -> None:
    code = "import sys; from elastic_rs._watch import report; print(report(), 'torch' in sys.modules)"
    assert run(code) == "(False, [], {}) False"


def test_collectives_of_groups_that_are_being_destroyed_are_reported() -> None:
    # A thread of gloo may wait for one of them while the main thread joins it.
    code = """
        import torch, torch.distributed as dist
        from elastic_rs._watch import report
        from elastic_rs import _torch_private

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        raised, recorders, members = report()
        print(raised, [b"all_reduce" in recorder for recorder in recorders], members)
    """
    assert run(code) == "False [True] {}"


def test_an_exception_that_has_ended_the_program_is_reported() -> None:
    # Threads that are no daemons run after the traceback was printed.
    code = """
        import sys, threading
        from elastic_rs._watch import report

        def wait() -> None:
            threading.main_thread().join()
            print(report()[0])

        threading.Thread(target=wait).start()
        {ending}
    """
    assert run(code.format(ending="pass")) == "False"
    assert run(code.format(ending="sys.excepthook = print; sys.last_value = ValueError()")) == "True"
