"""Warm starts: workers that are forked from a template are what workers that are executed are."""

from __future__ import annotations

import json
import os
import py_compile
import re
import signal
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs.warm import _plan

if TYPE_CHECKING:
    from helpers.procs import Job, Process

SCRIPTS = Path(__file__).parent / "scripts"
DUMP = SCRIPTS / "dump.py"
COLD = "-"
MAIN = _plan.CODE.encode()
# Quickly loaded. What matters is how workers come to be, not what has been imported.
WARM = "json"


def run(
    job: Job,
    modules: str,
    *command: str | Path,
    workers: int = 1,
    restarts: int = 0,
    logs: Path | str = "-",
    env: dict[str, str] | None = None,
) -> Process:
    """Start an agent whose workers execute ``python -u COMMAND``, with a template that imports the modules."""
    agent = [sys.executable, str(SCRIPTS / "warm_agent.py"), modules, str(workers), str(restarts), str(logs)]
    return job.start([*agent, sys.executable, "-u", *map(str, command)], env={"PYTHONUNBUFFERED": "", **(env or {})})


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def template_of(job: Job) -> int:
    """Return the process id of the job's template."""
    found = []
    for pid in job.pids():
        process = Path(f"/proc/{pid}")
        # Guards of workers that came from it show its command too, but have a name of their own.
        if MAIN in (process / "cmdline").read_bytes().split(b"\0") and "guard" not in (process / "comm").read_text():
            found.append(pid)
    assert len(found) == 1
    return found[0]


def dumped(job: Job, modules: str, *command: str | Path, at: int, file: Path) -> dict[str, object]:
    """Have a worker dump what it finds; the file's name is put into the command."""
    agent = run(job, modules, *command[:at], file, *command[at:])
    assert agent.wait() == 0, agent.tail()
    text = file.read_text()
    text = text.replace(json.loads(text)["env"]["MASTER_PORT"], "PORT")
    return json.loads(re.sub(r"object at 0x[0-9a-f]+", "object", text.replace(str(file), "FILE")))


@pytest.mark.parametrize("how", ["script", "torch", "relative", "module"])
def test_a_warm_worker_finds_what_a_cold_one_finds(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(SCRIPTS)
    command = {"relative": ["./dump.py"], "module": ["-m", "dump"]}.get(how, [DUMP])
    words = [*command, "--torch" if how == "torch" else "--lr=1", "two words", "${local_rank}"]
    cold = dumped(job, COLD, *words, at=len(command), file=tmp_path / "cold.json")
    warm = dumped(job, "torch" if how == "torch" else WARM, *words, at=len(command), file=tmp_path / "warm.json")
    cold_drawn, warm_drawn = cold.pop("torch"), warm.pop("torch")
    assert warm == cold
    if how == "torch":
        # A process draws its first seed at random, or has always the same, depending on the version.
        assert (warm_drawn[0] == cold_drawn[0]) == (cold_drawn[0] == 67280421310721)


ENDINGS = {
    "well": "print('done')",
    "code": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('what went wrong')",
    "exception": "def f():\n    raise ValueError('wrong')\nf()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('wrong') from error",
    "group": "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])",
    "syntax": "print('before'\nx = = 1",
    "interrupt": "raise KeyboardInterrupt",
    "at_once": "import os; print('unflushed', end=''); os._exit(4)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "aborted": "import os; os.abort()",
    "fault": "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)",
    "at_exit": "import atexit; atexit.register(print, 'goodbye'); raise SystemExit(5)",
    "thread": "import threading, time\nthreading.Timer(0.1, print, ['late']).start()\nprint('main')",
    "hook": "import sys\nsys.excepthook = lambda *it: print(it[0].__name__, it[2].tb_frame.f_code.co_name)\n1 / 0",
    "hook_fails": "import sys\nsys.excepthook = lambda *args: args[5]\n1 / 0",
    "stack": "import traceback\nprint(traceback.extract_stack()[-1].name, __file__)",
    "closed": "import sys; sys.stdout.close(); sys.stderr.write('still')",
    "broken_pipe": "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.write(write, b'x')",
    "input": "import sys; print(repr(sys.stdin.read()), sys.stdin.buffer.closed)",
    "del": "class A:\n    def __del__(self): print('deleted')\na = A()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_warm_worker_ends_as_a_cold_one(job: Job, tmp_path: Path, ending: str) -> None:
    path = script(tmp_path, ENDINGS[ending])
    ends = {}
    for modules in (COLD, WARM):
        logs = tmp_path / f"logs-{modules}"
        agent = run(job, modules, path, logs=logs)
        code = agent.wait()
        ended = agent.line(r"worker 0 \(\d+\) ended with (.*)")[1]
        output = [(logs / f"0-0.{name}").read_text() for name in ("stdout", "stderr")]
        if ending == "hook_fails":  # the frame that replaces the hook shows in the error of the hook itself
            output[1] = re.sub(r'  File ".*/warm/_\w+\.py".*\n(    .*\n)+', "", output[1])
        if ending == "fault":  # the dump has all frames, those of the template below the script's
            output[1] = re.sub(r'  File ".*/warm/_\w+\.py".*\n|  File "<string>".*\n', "", output[1])
        ends[modules] = code, ended, *(re.sub(r"0x[0-9a-f]+", "0x", text) for text in output)
    assert ends[WARM] == ends[COLD]


def said(job: Job, modules: str, *command: str | Path, logs: Path, env: dict[str, str] | None = None) -> list[str]:
    """Return what a worker prints that ends well."""
    agent = run(job, modules, *command, logs=logs, env=env)
    assert agent.wait() == 0, agent.tail()
    output = [(logs / f"0-0.{name}").read_text() for name in ("stdout", "stderr")]
    return [re.sub(r"object at 0x[0-9a-f]+", "object", text) for text in output]


PROGRAM = """
    import sys
    import __main__
    print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, __main__.__loader__, sorted(globals()))
"""


@pytest.mark.parametrize("form", ["folder", "archive", "bytecode", "package"])
def test_a_program_may_be_no_script(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "program"
    folder.mkdir()
    main = script(folder, PROGRAM, "__main__.py")
    with zipfile.ZipFile("program.zip", "w") as archive:
        archive.write(main, "__main__.py")
    py_compile.compile(str(main), cfile="program.pyc")
    words = {"folder": ["program"], "archive": ["./program.zip"], "bytecode": ["program.pyc"]}
    command = [*words.get(form, ["-m", "program"]), "an argument"]
    cold, warm = (said(job, modules, *command, logs=tmp_path / modules) for modules in (COLD, WARM))
    assert cold[0].startswith("['")
    assert warm == cold


IMPORTED = {
    # What must not become the rank of all workers.
    "sets_default": (
        """
            import os
            for name in ("RANK", "WORLD_SIZE", "SOME_VARIABLE"):
                os.environ.setdefault(name, "77")
            os.environ.pop("TO_BE_REMOVED")
        """,
        "import os; print([os.environ.get(it) for it in ('RANK', 'WORLD_SIZE', 'SOME_VARIABLE', 'TO_BE_REMOVED')])",
    ),
    "wraps_output": (
        """
            import sys
            class Loud:
                def __init__(self, stream): self.stream = stream
                def write(self, text): self.stream.write(text.upper())
                def flush(self): self.stream.flush()
            sys.stdout = Loud(sys.stdout)
        """,
        "import sys; print('loud'); print('quiet', file=sys.stderr)",
    ),
    "recodes_output": (
        "import codecs, sys; sys.stdout = codecs.getwriter('latin-1')(sys.stdout.detach())",
        "print('recoded', flush=True)",
    ),
    # By which modules tell a script from a prompt.
    "looks_at_main": (
        "import sys, __main__; found = [getattr(__main__, '__file__', None), sys.argv, sys.path[0], sys.orig_argv]",
        "print(imported.found)",
    ),
    "keeps_main": (
        "import __main__ as kept",
        "import sys; print(imported.kept is sys.modules['__main__'], imported.kept.imported is imported)",
    ),
}


@pytest.mark.parametrize("form", ["script", "module"])
@pytest.mark.parametrize("what", IMPORTED)
def test_what_an_import_does_is_done_to_the_worker(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module, text = IMPORTED[what]
    script(tmp_path, module, "imported.py")
    script(tmp_path, f"import imported; {text}", "program.py")
    command = ["program.py", "x"] if form == "script" else ["-m", "program", "x"]
    env = {"TO_BE_REMOVED": "1"}
    cold, warm = (
        said(job, modules, *command, logs=tmp_path / modules, env=env) for modules in (COLD, "multiprocessing,imported")
    )
    assert cold[0]
    assert warm == cold


def test_what_a_spawned_process_returns_is_of_the_scripts_own_classes(job: Job, tmp_path: Path) -> None:
    text = """
        import multiprocessing
        class Kept:
            pass
        def send(queue):
            queue.put(Kept())
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=send, args=(queue,))
            process.start()
            print(type(queue.get()) is Kept)
            process.join()
    """
    # Where it knows `__main__` from before the script was there.
    assert said(job, "multiprocessing", script(tmp_path, text), logs=tmp_path / "logs")[0] == "True\n"


def test_an_exception_in_a_module_is_shown_as_always(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "import sys\nprint(sys.argv)\n1 / 0", "broken.py")
    monkeypatch.chdir(tmp_path)
    texts = []
    for modules in (COLD, WARM):
        logs = tmp_path / f"logs-{modules}"
        assert run(job, modules, "-m", "broken", "x", logs=logs).wait() == 1
        texts.append([(logs / f"0-0.{name}").read_text() for name in ("stdout", "stderr")])
    assert texts[0] == texts[1]


def test_workers_of_a_template_draw_different_numbers(job: Job, tmp_path: Path) -> None:
    text = """
        import os, random, sys, tempfile, uuid
        import numpy
        import torch
        from multiprocessing import process
        drawn = [random.random(), numpy.random.rand(), uuid.uuid4().hex, tempfile.mktemp()]
        drawn.append(process.current_process().authkey.hex())
        if torch.initial_seed() != 67280421310721:
            drawn.append(torch.rand(1).item())
        os.write(1, f"drawn: {drawn}\\n".encode())
    """
    agent = run(job, "torch,numpy.random,uuid,multiprocessing", script(tmp_path, text), workers=2)
    assert agent.wait() == 0
    one, two = (line.strip("]").split("[")[1].split(", ") for line in agent.lines if line.startswith("drawn:"))
    assert len(one) >= 5
    assert not {*one} & {*two}


@pytest.mark.long  # `elastic-run` does the same in `torchrun/test_warm_run`
def test_what_training_does_with_processes(job: Job) -> None:
    # The agent gives each round a store of its own.
    agent = run(job, "torch", SCRIPTS / "warm_torch.py", "1", workers=2, restarts=1)
    assert agent.wait() == 0, agent.tail()
    said = sorted(line for line in agent.lines if line.startswith("rank "))
    work = "spawned: [0, 2, 4, 6], served: [0, 2, 4, 6], forked: 7"
    assert said == sorted(
        f"rank {rank}, attempt {attempt}: {text}"
        for rank in range(2)
        for attempt in range(2)
        for text in ("warm", "trained: True", *([work] if attempt == 1 else []))
    )


HOW = """
    import os, sys
    os.write(1, b"warm\\n" if "elastic_rs.warm._template" in sys.modules else b"cold\\n")
"""

FAMILY = """
    import os, signal, subprocess, sys
    code = "import os, signal; os.setsid(); print('child', flush=True); signal.pause()"
    daemon = subprocess.Popen([sys.executable, "-c", code])
    how = "warm" if "elastic_rs.warm._template" in sys.modules else "cold"
    os.write(1, f"{how} {os.getpid()}\\n".encode())  # in one piece
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


def test_a_template_that_is_killed_is_replaced_and_its_workers_live_on(job: Job, tmp_path: Path) -> None:
    agent = run(job, WARM, script(tmp_path, FAMILY), restarts=2)
    first = int(agent.line(r"warm (\d+)")[1])
    os.kill(template_of(job), signal.SIGKILL)
    agent.line("the template that has loaded `json` is restarted: its process has ended: SIGKILL")
    assert first in job.pids()
    mark = agent.mark()
    os.kill(first, signal.SIGKILL)
    # Whether the new one is ready or not: workers wait for it.
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
        from elastic_rs.warm import _checks
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
def test_workers_are_started_cold_when_a_template_cannot_be_used(
    job: Job, tmp_path: Path, module: str, reason: str
) -> None:
    for name, text in MODULES.items():
        script(tmp_path, text, f"{name}.py")
    path = script(tmp_path, HOW)
    agent = run(job, module, path, workers=2)
    assert agent.wait() == 0, agent.tail()
    (told,) = (line for line in agent.lines if "workers are started cold" in line)
    assert re.search(reason, told), told
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
    (told,) = (line for line in started.lines if "workers are started cold" in line)
    assert "a spawn request cannot be sent: its working directory is gone" in told
    assert [line for line in started.lines if line in {"warm", "cold"}] == ["cold", "cold"]


def test_a_variable_without_a_name_does_no_harm(job: Job, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "warm_agent.py"), WARM, "1", "0", "-"]
    words = json.dumps([*command, sys.executable, "-u", str(script(tmp_path, HOW))])
    # Python cannot pass it on.
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


def test_another_program_has_no_template(job: Job) -> None:
    agent = job.start([sys.executable, str(SCRIPTS / "warm_agent.py"), WARM, "1", "0", "-", "/bin/echo", "hello"])
    assert agent.wait() == 0
    agent.line("no template: their program is `/bin/echo`, not this Python")
    agent.line("^hello")


def test_a_script_that_is_changed_is_read_anew(job: Job, tmp_path: Path) -> None:
    text = """
        import pathlib, sys
        pathlib.Path(__file__).write_text("import sys; print('changed', 'elastic_rs.warm._template' in sys.modules)")
        sys.exit(1)
    """
    agent = run(job, WARM, script(tmp_path, text), restarts=1)
    assert agent.wait() == 0, agent.tail()
    agent.line("changed True")
