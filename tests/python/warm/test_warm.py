"""Warm starts: workers that are forked from a template are like executed workers."""

from __future__ import annotations

import py_compile
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.procs import Job
from helpers.warm import COLD, DUMP, SCRIPTS, WARM, dumped, run, said, script


@pytest.mark.parametrize("how", ["script", pytest.param("torch", marks=pytest.mark.long), "relative", "module"])
def test_a_warm_worker_finds_what_a_cold_one_finds(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(SCRIPTS)
    command = {"relative": ["./dump.py"], "module": ["-m", "dump"]}.get(how, [DUMP])
    words = [*command, "--torch" if how == "torch" else "--lr=1", "two words", "${local_rank}"]
    cold = dumped(job, COLD, *words, at=len(command), file=tmp_path / "cold.json")
    warm = dumped(job, "torch" if how == "torch" else WARM, *words, at=len(command), file=tmp_path / "warm.json")
    cold_drawn, warm_drawn = cold.pop("torch"), warm.pop("torch")
    assert {name: (value, warm.get(name)) for name, value in cold.items() if warm.get(name) != value} == {}
    assert warm.keys() == cold.keys()
    if how == "torch":
        # Depending on the version, a process draws its first seed at random, or always has the same.
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
        if ending == "hook_fails":  # the frame that replaces the hook is in the error of the hook
            output[1] = re.sub(r'  File ".*/_warm/_\w+\.py".*\n(    .*\n)+', "", output[1])
        if ending == "fault":  # the dump has the template's frames below the script's
            output[1] = re.sub(r'  File ".*/_warm/_\w+\.py".*\n|  File "<string>".*\n', "", output[1])
        ends[modules] = code, ended, *(re.sub(r"0x[0-9a-f]+", "0x", text) for text in output)
    assert ends[WARM] == ends[COLD]


PROGRAM = """
    import sys
    import __main__
    print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, __main__.__loader__, sorted(globals()))
"""


@pytest.mark.parametrize("form", ["folder", "archive", "bytecode", "package"])
def test_a_program_may_be_a_module_or_code(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
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
    # Values of the template that workers must not inherit.
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
    # Attributes by which modules tell a script from a prompt.
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
def test_side_effects_of_an_import_reach_the_worker(
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


def test_values_of_a_spawned_process_have_the_scripts_classes(job: Job, tmp_path: Path) -> None:
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
    # A module has imported `__main__` before the script was loaded.
    assert said(job, "multiprocessing", script(tmp_path, text), logs=tmp_path / "logs")[0] == "True\n"


def test_an_exception_in_a_module_is_shown_as_in_a_cold_start(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "import sys\nprint(sys.argv)\n1 / 0", "broken.py")
    monkeypatch.chdir(tmp_path)
    texts = []
    for modules in (COLD, WARM):
        logs = tmp_path / f"logs-{modules}"
        assert run(job, modules, "-m", "broken", "x", logs=logs).wait() == 1
        texts.append([(logs / f"0-0.{name}").read_text() for name in ("stdout", "stderr")])
    assert texts[0] == texts[1]


def test_workers_of_a_fork_server_draw_different_numbers(job: Job, tmp_path: Path) -> None:
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
def test_training_scripts_may_use_processes(job: Job) -> None:
    # The agent gives each round another store.
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
