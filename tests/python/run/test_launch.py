"""``elastic_rs.launch`` with scripts, modules and programs: in real programs, which go on afterwards."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job, Process

FOLDER = Path(__file__).parents[1]

HEAD = r"""
import os, pathlib, signal, socket, sys, threading
from dataclasses import replace
import elastic_rs
from elastic_rs import LaunchConfig

FOLDER = pathlib.Path(sys.argv[1])

# Whole lines: several workers write to one pipe.
SAYS = r'''
import os, pathlib, signal, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
'''
exec(SAYS)

def script(text):
    file = FOLDER / f"script{len(list(FOLDER.glob('script*')))}.py"
    file.write_text(SAYS + text)
    return file

def waits():
    return script(f'''
def stop(number, _):
    say("STOPPED", number)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
say("READY", os.environ["RANK"])
while not os.path.exists({str(FOLDER / "go")!r}):
    time.sleep(0.02)
''')

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

def state():
    return dict(os.environ), {number: signal.getsignal(number) for number in NUMBERS}

BEFORE = state()

def same():
    say("SAME", state() == BEFORE, "threads", sum(not thread.daemon for thread in threading.enumerate()))
"""


@pytest.fixture
def program(job: Job, tmp_path: Path) -> Callable[..., Process]:
    """Start a program with the helpers above."""

    def program(text: str, *args: str, name: str = "program", env: dict[str, str] | None = None) -> Process:
        file = tmp_path / f"{name}.py"
        file.write_text(HEAD + re.sub("^ {8}", "", text, flags=re.MULTILINE))
        command = [sys.executable, str(file), str(tmp_path), *args]
        return job.start(command, name=name, env={"PYTHONPATH": str(FOLDER), **(env or {})})

    return program


def ended(process: Process, *patterns: str, code: int = 0) -> None:
    for pattern in patterns:
        process.line(pattern)
    assert process.wait() == code, process.tail()


def test_a_script_returns_none_for_each_rank_and_the_program_goes_on(program: Callable[..., Process]) -> None:
    process = program("""
        names = "RANK WORLD_SIZE OMP_NUM_THREADS TORCHELASTIC_SIGNALS_TO_HANDLE".split()
        file = script(f"say(*sys.argv[1:], *map(os.getenv, {names}))")
        del os.environ["OMP_NUM_THREADS"]
        BEFORE = state()
        config = LaunchConfig(nproc_per_node=2, signals_to_handle=["SIGTERM"])
        say("FIRST", elastic_rs.launch(file, config, ["--lr", 0.1, file]))
        same()
        say("SECOND", elastic_rs.launch(str(file)))
        same()
        """)
    ended(process, r"^FIRST \{0: None, 1: None\}$", r"^SECOND \{0: None\}$", "^SAME True threads 1$")
    assert "SAME False" not in process.tail()
    for rank in "01":
        process.line(rf"^--lr 0.1 \S+script0.py {rank} 2 1 SIGTERM$")
    process.line(r"^0 1 None SIGTERM,SIGINT,SIGHUP,SIGQUIT$")


@pytest.mark.parametrize(
    ("entrypoint", "config", "args", "line"),
    [
        ("helpers.launched", "module=True", '["a"]', "^HERE helpers.launched a 0$"),
        ("echo", "no_python=True", '["HERE", "b"]', "^HERE b$"),
        (str(FOLDER / "helpers" / "launched.py"), "run_path=True", '["c"]', "^HERE None c 0$"),
    ],
)
def test_modules_programs_and_paths(
    program: Callable[..., Process], entrypoint: str, config: str, args: str, line: str
) -> None:
    process = program(f"say('ENDED', elastic_rs.launch({entrypoint!r}, LaunchConfig({config}), {args}))")
    ended(process, line, r"^ENDED \{0: None\}$")


def test_a_failed_script_raises_pytorchs_exception_and_the_program_launches_again(
    program: Callable[..., Process],
) -> None:
    process = program("""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        config = LaunchConfig(nproc_per_node=2)
        bad = script("sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()")
        raises = script("raise ValueError('no such luck')")
        for file in (bad, raises):
            try:
                elastic_rs.launch(file, config)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                say("FAILED", error.name == str(file), len(error.failures), rank, failure.exitcode)
                say(str(error))
        same()
        say("AGAIN", elastic_rs.launch(script("sys.exit(0)"), config))
        """)
    ended(process, "^FAILED True 1 1 3$", r"^FAILED True \d [01] 1$", r"^AGAIN \{0: None, 1: None\}$", "^SAME True")
    process.line(r"ValueError: no such luck")
    process.line(r"Root Cause \(first observed failure\)")


def test_an_error_file_that_pytorch_cannot_read_is_reported(program: Callable[..., Process]) -> None:
    process = program("""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        for text in ('{"message": {"extraInfo": 3}}', "no JSON", '{"message": {"message": 5}}', '{"message": "a"}'):
            file = f"pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text({text!r}); 1/0"
            try:
                elastic_rs.launch(script(file))
            except ChildFailedError as error:
                say("FAILED", error.failures[0].exitcode, error.get_first_failure()[0], len(str(error)) > 100)
        """)
    assert process.wait() == 0, process.tail()
    assert [line for line in process.lines if line.startswith("FAILED")] == ["FAILED 1 0 True"] * 4


def test_restarts_are_the_jobs(program: Callable[..., Process]) -> None:
    process = program("""
        file = script("sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
        say("ENDED", elastic_rs.launch(file, LaunchConfig(max_restarts=1)))
        """)
    ended(process, r"^ENDED \{0: None\}$")


@pytest.mark.parametrize("own", ["signal.SIG_DFL", "lambda *_: say('OWN')"])
def test_a_signal_ends_the_workers_and_the_programs_handlers_stand_again(
    program: Callable[..., Process], own: str
) -> None:
    process = program(f"""
        from torch.distributed.elastic.multiprocessing import SignalException
        signal.signal(signal.SIGTERM, {own})
        signal.signal(signal.SIGUSR1, lambda *_: say("USER"))
        BEFORE = state()
        config = LaunchConfig(nproc_per_node=2)
        file = waits()
        try:
            elastic_rs.launch(file, config)
        except SignalException as error:
            say("SIGNAL", error.sigval.name)
        same()
        signal.raise_signal(signal.SIGUSR1)
        if callable(BEFORE[1][signal.SIGTERM]):
            signal.raise_signal(signal.SIGTERM)
        (FOLDER / "go").touch()
        say("AGAIN", elastic_rs.launch(file, config))
        """)
    process.line("^READY 0")
    process.line("^READY 1")
    process.signal(signal.SIGTERM)
    ended(process, "^STOPPED 15", "^SIGNAL SIGTERM$", "^SAME True", "^USER$", r"^AGAIN \{0: None, 1: None\}$")
    assert ("OWN" in process.lines) == ("lambda" in own)


def test_in_another_thread_signals_stay_the_programs(program: Callable[..., Process]) -> None:
    process = program("""
        signal.signal(signal.SIGTERM, lambda *_: say("OWN"))
        BEFORE = state()
        results = []
        thread = threading.Thread(target=lambda: results.append(elastic_rs.launch(waits())))
        thread.start()
        signal.pause()
        same()
        say("ALIVE", thread.is_alive())
        (FOLDER / "go").touch()
        thread.join()
        say("ENDED", results)
        """)
    process.line("^READY 0")
    process.signal(signal.SIGTERM)
    ended(process, "^OWN$", "^SAME True", "^ALIVE True$", r"^ENDED \[\{0: None\}\]$")
    assert "STOPPED" not in process.tail()


def test_launches_leave_no_descriptors_and_no_threads(program: Callable[..., Process]) -> None:
    process = program("""
        counts = []
        for _ in range(12):
            elastic_rs.launch("true", LaunchConfig(no_python=True))
            counts.append(len(os.listdir("/proc/self/fd")) + threading.active_count())
        # Some are closed a moment later. One that each launch leaves would be many.
        say("LEFT", min(counts[6:]) - min(counts[:2]) < 4, counts)
        """)
    ended(process, "^LEFT True ")


def test_several_threads_launch_at_once(program: Callable[..., Process]) -> None:
    process = program("""
        together = script(f'''
folder = pathlib.Path({str(FOLDER)!r})
(folder / f"pid{{os.getpid()}}").touch()
while len(list(folder.glob("pid*"))) < 7:
    time.sleep(0.02)
''')
        results = {}
        def launch(count):
            try:
                results[count] = elastic_rs.launch(together, LaunchConfig(nproc_per_node=count))
            except Exception as error:
                results[count] = error
        threads = [threading.Thread(target=launch, args=(count,)) for count in (2, 3, 1)]
        for thread in threads:
            thread.start()
        say("MAIN", elastic_rs.launch(together))
        for thread in threads:
            thread.join()
        say("ENDED", results[1], results[2], results[3])
        same()
        """)
    ended(
        process,
        r"^MAIN \{0: None\}$",
        r"^ENDED \{0: None\} \{0: None, 1: None\} \{0: None, 1: None, 2: None\}$",
        "^SAME True",
    )


def test_a_running_event_loop_is_no_obstacle(job: Job) -> None:
    # A notebook's main thread runs one, and its `__main__` has no file.
    code = (
        "import asyncio, elastic_rs\n"
        "async def cell():\n"
        "    config = elastic_rs.LaunchConfig(nproc_per_node=2, no_python=True)\n"
        "    return [elastic_rs.launch('true', config) for _ in range(2)]\n"
        "print(f'ENDED {asyncio.run(cell())}')\n"
    )
    process = job.start([sys.executable, "-c", code])
    ended(process, r"^ENDED \[\{0: None, 1: None\}, \{0: None, 1: None\}\]$")


def test_a_worker_cannot_launch(program: Callable[..., Process]) -> None:
    process = program("""
        inner = script('''
import elastic_rs
try:
    elastic_rs.launch("true", elastic_rs.LaunchConfig(no_python=True))
except RuntimeError as error:
    say("REFUSED", error)
''')
        elastic_rs.launch(inner, LaunchConfig(rdzv_backend="c10d", rdzv_id="outer"))
        """)
    text = (
        r"^REFUSED launch was called in a worker \(rank 0 of run `outer`\), which cannot launch workers: call it in a "
        "process that no launcher has started$"
    )
    ended(process, text)


def test_nodes_meet_and_each_has_the_results_of_its_workers(
    program: Callable[..., Process], free_port: Callable[[], int]
) -> None:
    text = """
        config = LaunchConfig(
            nnodes=2, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint=sys.argv[2], no_python=True
        )
        say("ENDED", elastic_rs.launch("true", config))
        """
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [program(text, endpoint, name=name) for name in ("a", "b")]
    found = sorted(node.line(r"^ENDED (.*)$")[1] for node in nodes)
    assert [node.wait() for node in nodes] == [0, 0]
    assert found == ["{0: None, 1: None}", "{2: None, 3: None}"]


def test_a_job_that_has_no_place_for_this_node_is_an_error(
    program: Callable[..., Process], free_port: Callable[[], int]
) -> None:
    process = program(
        """
        from elastic_rs import errors
        config = LaunchConfig(
            nnodes=2, rdzv_backend="c10d", rdzv_endpoint=sys.argv[2], rdzv_conf={"join_timeout": 1}, no_python=True
        )
        try:
            elastic_rs.launch("true", config)
        except errors.RendezvousTimeoutError as error:
            say("LATE", error)
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                taken = f"127.0.0.1:{server.getsockname()[1]}"
                elastic_rs.launch("true", replace(config, rdzv_endpoint=taken, rdzv_conf={"is_host": True}))
        except errors.RendezvousConnectionError as error:
            say("HOST", error)
        same()
        """,
        f"127.0.0.1:{free_port()}",
    )
    ended(process, "^LATE ", r"^HOST cannot host the coordinator at 127.0.0.1:\d+: ", "^SAME True")


def test_variables_of_elastic_run_do_not_count(program: Callable[..., Process]) -> None:
    process = program(
        "say('ENDED', elastic_rs.launch('true', LaunchConfig(no_python=True)))", env={"PET_NPROC_PER_NODE": "3"}
    )
    ended(process, r"^ENDED \{0: None\}$")


def test_python_exec_and_other_variables_of_pytorchs_count(program: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\necho WRAPPED\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    process = program(
        "say('ENDED', elastic_rs.launch(script('1')))", env={"PYTHON_EXEC": os.fspath(tmp_path / "python")}
    )
    ended(process, "^WRAPPED$", r"^ENDED \{0: None\}$")
