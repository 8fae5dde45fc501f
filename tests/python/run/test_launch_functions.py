"""``elastic_rs.launch`` with functions, and PyTorch's ``elastic_launch`` beside it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job, Process

FOLDER = Path(__file__).parents[1]
EXAMPLE = Path(__file__).parents[3] / "examples" / "launch.py"

HEAD = """
import os, signal, sys, threading
import elastic_rs
from elastic_rs import LaunchConfig
from helpers import functions
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def say(*words):
    print(*words, flush=True)

def add(a, b=0):
    return int(os.environ["RANK"]) + a + b

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

def state():
    return dict(os.environ), {number: signal.getsignal(number) for number in NUMBERS}

def failed(function, args=(), **given):
    try:
        say("RETURNED", elastic_rs.launch(function, LaunchConfig(start_method="fork", **given), args))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        say("FAILED", error.name, rank, failure.exitcode)
        say(str(error))
"""


@pytest.fixture
def program(job: Job, tmp_path: Path) -> Callable[..., Process]:
    """Start a program with the helpers above. Spawned workers import it, too."""

    def program(text: str, *args: str, name: str = "program", env: dict[str, str] | None = None) -> Process:
        file = tmp_path / f"{name}.py"
        main = textwrap.indent(textwrap.dedent(text), "    ")
        file.write_text(
            f'{HEAD}\nif __name__ == "__main__":\n    BEFORE = state()\n{main}\n    say("SAME", state() == BEFORE)'
        )
        return job.start([sys.executable, str(file), *args], name=name, env={"PYTHONPATH": str(FOLDER), **(env or {})})

    return program


def ended(process: Process, *patterns: str) -> None:
    for pattern in patterns:
        process.line(pattern)
    assert process.wait() == 0, process.tail()


def test_a_function_of_the_program_is_spawned_and_returns_by_rank(program: Callable[..., Process]) -> None:
    process = program("""
        config = LaunchConfig(nproc_per_node=2)
        say("FIRST", elastic_rs.launch(add, config, args=(10, 5)))
        say("SECOND", elastic_rs.launch(add, args=[1]))
        """)
    ended(process, r"^FIRST \{0: 15, 1: 16\}$", r"^SECOND \{0: 1\}$", "^SAME True$")


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_other_start_methods(program: Callable[..., Process], start_method: str) -> None:
    process = program(f"""
        config = LaunchConfig(nproc_per_node=2, start_method={start_method!r}, log_dir={os.devnull!r}, role="trainer")
        for _ in range(2):
            values = elastic_rs.launch(functions.environment, config)
            say("ENDED", *(values[rank]["ROLE_NAME"] + values[rank]["RANK"] for rank in (0, 1)))
        """)
    ended(process, "^ENDED trainer0 trainer1$", "^SAME True$")


def test_functions_that_end_in_other_ways_than_returning(program: Callable[..., Process]) -> None:
    process = program("""
        failed(functions.leaves_without_returning, (0,), nproc_per_node=2)
        failed(sys.exit, (3,))
        failed(functions.fails, (1, "raise"), nproc_per_node=2)
        failed(functions.fails, (0, "kill"), nproc_per_node=2)
        failed(functions.unpicklable, nproc_per_node=2)
        failed(functions.fails_at_first, nproc_per_node=2, max_restarts=1)
        """)
    ended(
        process,
        r"^RETURNED \{0: None, 1: 1\}$",
        "^FAILED exit 0 3$",
        "^FAILED fails 1 1$",
        "ValueError: no such luck",
        f"^FAILED fails 0 -{int(signal.SIGKILL)}$",
        r"^FAILED unpicklable \d 1$",
        r"Can't (pickle|get) local object .*unpicklable.<locals>.<lambda>",
        r"^RETURNED \{0: 1, 1: 1\}$",
        "^SAME True$",
    )


def test_a_launch_in_an_except_clause_is_a_job_of_its_own(program: Callable[..., Process]) -> None:
    # The exception that the program handles is not how the second job ended, for the nodes that ask for it later.
    process = program(
        """
        config = LaunchConfig(start_method="fork")
        try:
            elastic_rs.launch(sys.exit, config, (3,))
        except ChildFailedError:
            say("AGAIN", elastic_rs.launch(add, config, (7,)))
        """,
        env={"ELASTIC_RS_LOG": "info"},
    )
    ended(process, r"^AGAIN \{0: 7\}$", "^SAME True$")
    left = [line.rpartition(" left: ")[2] for line in process.lines if " left: " in line]
    assert left == ["its workers failed", "the job is over"]


def test_pytorchs_launcher_in_an_except_clause_starts_a_job_of_its_own(program: Callable[..., Process]) -> None:
    process = program(
        """
        from torch.distributed.launcher.api import LaunchConfig as Theirs, elastic_launch
        def run(function, *args):
            config = Theirs(1, 1, 1, run_id="job", rdzv_backend="rust-c10d", rdzv_endpoint="localhost:0")
            config.start_method, config.max_restarts = "fork", 0
            return elastic_launch(config, function)(*args)
        try:
            run(sys.exit, 3)
        except ChildFailedError:
            say("AGAIN", run(add, 7))
        """,
        env={"ELASTIC_RS_LOG": "info"},
    )
    process.line(r"^AGAIN \{0: 7\}$")
    assert process.wait() == 0, process.tail()
    left = [line.rpartition(" left: ")[2] for line in process.lines if " left: " in line]
    assert left == ["its workers failed", "the job is over"]


@pytest.mark.parametrize("own", ["signal.SIG_DFL", "lambda *_: say('OWN')"])
def test_a_signal_ends_functions_and_the_program_launches_again(program: Callable[..., Process], own: str) -> None:
    process = program(f"""
        signal.signal(signal.SIGTERM, {own})
        BEFORE = state()
        config = LaunchConfig(start_method="fork", signals_to_handle=["SIGTERM"])
        def stops():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            say("READY", os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
            signal.pause()
        try:
            elastic_rs.launch(stops, config)
        except SignalException as error:
            say("SIGNAL", error.sigval.name)
        say("BETWEEN", state() == BEFORE)
        say("AGAIN", elastic_rs.launch(add, config, (7,)))
        """)
    process.line("^READY SIGTERM$")
    process.signal(signal.SIGTERM)
    ended(process, "^SIGNAL SIGTERM$", "^BETWEEN True$", r"^AGAIN \{0: 7\}$", "^SAME True$")
    assert "OWN" not in process.lines


def test_threads_launch_functions_at_once_and_signals_stay_the_programs(program: Callable[..., Process]) -> None:
    process = program("""
        results, config = {}, LaunchConfig(nproc_per_node=2, start_method="forkserver")
        def launch(number):
            results[number] = elastic_rs.launch(add, config, [number])
        threads = [threading.Thread(target=launch, args=(number,)) for number in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say("ENDED", *(results[number] for number in (10, 20)))
        """)
    ended(process, r"^ENDED \{0: 10, 1: 11\} \{0: 20, 1: 21\}$", "^SAME True$")


def test_a_function_of_a_notebook(job: Job) -> None:
    # As a cell: an event loop runs in the main thread, and `__main__` has no file.
    code = textwrap.dedent("""
        import asyncio, os, elastic_rs
        def train(a):
            return int(os.environ["RANK"]) + a
        async def cell(start_method):
            config = elastic_rs.LaunchConfig(nproc_per_node=2, start_method=start_method)
            return elastic_rs.launch(train, config, (3,))
        for start_method in ("spawn", "forkserver"):
            try:
                asyncio.run(cell(start_method))
            except ValueError as error:
                print(f"REFUSED {error}")
        print(f"ENDED {asyncio.run(cell('fork'))}")
        """)
    process = job.start([sys.executable, "-c", code])
    ended(process, r"^ENDED \{0: 3, 1: 4\}$")
    refused = (
        "REFUSED entrypoint is `__main__.train` of a `__main__` that is no file, as in a notebook, where a new process "
        'cannot find it: put it in a module, or give start_method="fork"'
    )
    assert process.lines.count(refused) == 2


def test_a_program_without_a_guard_gets_an_error_that_names_it(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import elastic_rs\ndef train(): pass\nelastic_rs.launch(train)\n")
    process = job.start([sys.executable, str(file)])
    process.line(r"RuntimeError: launch was called while a new process imports this program's main module")
    process.line(r"ChildFailedError")
    assert process.wait() == 1


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_functions_of_two_nodes(program: Callable[..., Process], free_port: Callable[[], int], backend: str) -> None:
    port = free_port()
    where = {
        "c10d": f'rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:{port}"',
        "static": f"master_port={port}, node_rank=int(sys.argv[1])",
    }[backend]
    text = f"""
        config = LaunchConfig(nnodes=2, nproc_per_node=2, start_method="fork", {where})
        say("ENDED", elastic_rs.launch(add, config, (0,)))
        """
    nodes = [program(text, str(rank), name=f"node{rank}") for rank in (0, 1)]
    found = [node.line(r"^ENDED (.*)$")[1] for node in nodes]
    assert [node.wait() for node in nodes] == [0, 0]
    assert sorted(found) == ["{0: 0, 1: 1}", "{2: 2, 3: 3}"]
    assert backend != "static" or found == sorted(found)


def test_the_example_launches_catches_and_launches_again(job: Job) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 30
    process = job.start([sys.executable, str(EXAMPLE)])
    ended(process, r"^rank [01] failed with exit code 1$", r"^\{0: 0.1666\d*, 1: 0.1666\d*\}$")


def test_the_lines_of_the_page_run_with_pytorchs_elastic_launch(job: Job, tmp_path: Path) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "launch.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    (theirs,) = [block for block in blocks if "elastic_launch(" in block]
    (file := tmp_path / "program.py").write_text(theirs)
    process = job.start([sys.executable, str(file)])
    ended(process, r"^\{0: 0, 1: 1\}$")
