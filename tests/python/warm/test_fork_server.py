"""Warm starts: ends of templates and their workers, and reasons for cold starts."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job
from helpers.warm import SCRIPTS, WARM, run, script, template_of

HOW = """
    import os, sys
    os.write(1, b"warm\\n" if "elastic_rs._warm._fork_server" in sys.modules else b"cold\\n")
"""

FAMILY = """
    import os, signal, subprocess, sys
    code = "import os, signal; os.setsid(); print('child', flush=True); signal.pause()"
    daemon = subprocess.Popen([sys.executable, "-c", code])
    how = "warm" if "elastic_rs._warm._fork_server" in sys.modules else "cold"
    os.write(1, f"{how} {os.getpid()}\\n".encode())  # one write
    signal.pause()
"""


def test_an_agent_that_is_killed_takes_everything_along(job: Job, tmp_path: Path) -> None:
    agent = run(job, WARM, script(tmp_path, FAMILY), workers=2)
    for _ in range(2):
        agent.line("warm")
    agent.line("child")
    agent.signal(signal.SIGKILL)
    agent.wait()
    job.until_gone(*job.pids())


def test_a_signal_reaches_the_workers_and_nothing_is_left(job: Job, tmp_path: Path) -> None:
    agent = run(job, WARM, script(tmp_path, FAMILY))
    agent.line("warm")
    agent.line("child")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 1
    assert job.pids() == []


def test_a_killed_fork_server_is_replaced_and_its_workers_run_on(job: Job, tmp_path: Path) -> None:
    agent = run(job, WARM, script(tmp_path, FAMILY), restarts=2)
    first = int(agent.line(r"warm (\d+)")[1])
    os.kill(template_of(job), signal.SIGKILL)
    agent.line("`json` has ended and is started again; workers run on: its process has ended: SIGKILL")
    assert first in job.pids()
    mark = agent.mark()
    os.kill(first, signal.SIGKILL)
    # Workers wait for the new template until it is ready.
    second = int(agent.line(r"warm (\d+)", since=mark)[1])
    agent.signal(signal.SIGTERM)
    agent.wait()
    assert first != second
    assert job.pids() == []


def test_a_guard_that_is_killed_takes_its_worker_along(job: Job, tmp_path: Path) -> None:
    agent = run(job, WARM, script(tmp_path, FAMILY))
    worker = int(agent.line(r"warm (\d+)")[1])
    agent.line("child")
    guard = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGKILL)
    assert agent.wait() == 1
    assert job.pids() == []


MODULES = {
    "with_thread": """
        import threading
        threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
    """,
    "with_device": """
        from elastic_rs._warm import _checks
        _checks.DEVICES = (__file__,)
        kept = open(__file__)
    """,
    "with_process": "import subprocess, sys; kept = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)",
    "with_fork": "import os; os.fork()",
    "with_socket": "import socket; kept = socket.socketpair()",
    "with_lock": "import multiprocessing; kept = multiprocessing.Lock()",
    "with_folder": "import os; os.chdir('/')",
    "with_handler": "import signal; signal.signal(signal.SIGCHLD, print)",
    "with_exit": "raise SystemExit(3)",
    "with_end": "import os; os._exit(9)",
}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("no_such_module", r"`import no_such_module` failed: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("with_thread", r"imports started threads, which a fork does not copy: helper \(\d+\)$"),
        ("with_device", r"imports opened .*/with_device.py, which a fork cannot use$"),
        ("with_process", r"imports started processes, which would belong to no worker: python.* \(\d+\)$"),
        ("with_fork", r"imports started processes, which would belong to no worker: python.* \(\d+\)$"),
        ("with_socket", r"imports opened socket:\[\d+\], which all workers would share$"),
        ("with_lock", r"memory that all workers would share \(a lock of multiprocessing, say\): /dev/shm/sem\."),
        ("with_folder", r"imports changed the working directory, which workers are set back to$"),
        ("with_handler", r"imports handle SIGCHLD, which this process gets for other workers$"),
        ("with_exit", r"`import with_exit` failed: SystemExit: 3$"),
        ("with_end", r"its process has ended: exit code 9$"),
    ],
)
def test_workers_are_started_cold_when_a_fork_server_cannot_be_used(
    job: Job, tmp_path: Path, module: str, reason: str
) -> None:
    for name, text in MODULES.items():
        script(tmp_path, text, f"{name}.py")
    path = script(tmp_path, HOW)
    agent = run(job, module, path, workers=2)
    assert agent.wait() == 0, agent.tail()
    (output,) = (line for line in agent.lines if "workers are started cold" in line)
    assert re.search(reason, output), output
    assert [line for line in agent.lines if line in {"warm", "cold"}] == ["cold", "cold"]


def test_workers_can_start_in_a_folder_that_is_gone(job: Job, tmp_path: Path) -> None:
    path = script(tmp_path, HOW)
    gone = tmp_path / "gone"
    in_gone = ["sh", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"', str(gone)]
    probe = "import contextlib, json\nwith contextlib.suppress(AttributeError): json.nothing"
    if job.start([*in_gone, sys.executable, "-c", probe]).wait():
        pytest.skip("this Python (3.13.0) cannot ask a module for what it has not there")
    agent = [sys.executable, str(SCRIPTS / "warm_agent.py"), WARM, "2", "0", "-", sys.executable, "-u", str(path)]
    started = job.start([*in_gone, *agent])
    assert started.wait() == 0, started.tail()
    (output,) = (line for line in started.lines if "workers are started cold" in line)
    assert "a spawn request cannot be sent: its working directory is gone" in output
    assert [line for line in started.lines if line in {"warm", "cold"}] == ["cold", "cold"]


def test_a_variable_without_a_name_does_no_harm(job: Job, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "warm_agent.py"), WARM, "1", "0", "-"]
    words = json.dumps([*command, sys.executable, "-u", str(script(tmp_path, HOW))])
    # Python cannot pass such a variable on.
    execute = f"""
        import ctypes, json, os
        words = [word.encode() for word in json.loads({words!r})]
        env = [name + b"=" + value for name, value in os.environb.items()] + [b"=nameless"]
        array = lambda texts: (ctypes.c_char_p * (len(texts) + 1))(*texts, None)
        ctypes.CDLL(None).execve(words[0], array(words), array(env))
    """
    agent = job.start([sys.executable, "-c", textwrap.dedent(execute)])
    assert agent.wait() == 0, agent.tail()
    agent.line("workers are started cold.*: a variable of its environment has no name")


def test_a_worker_with_another_variable_is_started_cold(job: Job, tmp_path: Path) -> None:
    path = script(tmp_path, HOW)
    agent = run(job, WARM, path, env={"TEST_WORKER_VARIABLE": "PYTHONDEVMODE=1"})
    assert agent.wait() == 0, agent.tail()
    agent.line("workers are started cold.*: worker of local rank 0 differs: its variable `PYTHONDEVMODE` differs$")
    agent.line("^cold")


def test_another_program_has_no_fork_server(job: Job) -> None:
    agent = job.start([sys.executable, str(SCRIPTS / "warm_agent.py"), WARM, "1", "0", "-", "/bin/echo", "hello"])
    assert agent.wait() == 0
    agent.line("no template: the workers' program is `/bin/echo`, not this Python")
    agent.line("^hello")


def test_a_changed_script_is_read_again(job: Job, tmp_path: Path) -> None:
    text = """
        import pathlib, sys
        text = "import sys; forked = 'elastic_rs._warm._fork_server' in sys.modules; print(f'changed {forked}')"
        pathlib.Path(__file__).write_text(text)
        sys.exit(1)
    """
    agent = run(job, WARM, script(tmp_path, text), restarts=1)
    assert agent.wait() == 0, agent.tail()
    agent.line("changed True")


# A thread with the name of jemalloc's, which pyarrow starts.
ALLOCATOR = """
    import ctypes, threading
    named = threading.Event()
    def work():
        ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd")  # PR_SET_NAME
        named.set()
        threading.Event().wait()
    threading.Thread(target=work, daemon=True).start()
    named.wait()
"""

LAZY = """
    import sys, types
    class _LazyModule(types.ModuleType): pass
    sys.modules[__name__] = _LazyModule(__name__)
"""


def test_workers_are_warm_beside_an_allocator_whose_thread_handles_forks(job: Job, tmp_path: Path) -> None:
    script(tmp_path, ALLOCATOR, "allocator.py")
    agent = run(job, "allocator", script(tmp_path, HOW), workers=2)
    assert agent.wait() == 0, agent.tail()
    assert [line for line in agent.lines if line in {"warm", "cold"}] == ["warm", "warm"]


@pytest.mark.parametrize(("name", "part"), [("transformers", "transformers.trainer"), ("lazy", "lazy.MODULE")])
def test_a_package_that_imports_its_parts_later_says_to_name_them(
    job: Job, tmp_path: Path, name: str, part: str
) -> None:
    script(tmp_path, LAZY, f"{name}.py")
    agent = run(job, name, script(tmp_path, HOW))
    assert agent.wait() == 0, agent.tail()
    assert "warm" in agent.lines
    agent.line(rf"--warm-modules={name} saves little: .* such as --warm-modules={part}$")
