"""The template of warm starts: a process that imports modules and then forks the workers that import them too.

The agent executes ``python -u -c CODE MODULES ARGS``, where CODE is that of ``_plan``, which calls :func:`main`, and
ARGS are what workers have behind ``python``. In a worker :func:`main` runs the script as the interpreter would, and
returns, so that the interpreter ends as always. Facts: ``Modules/main.c`` and ``Python/pythonrun.c`` of CPython.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_rs._elastic_rs import Nest
from elastic_rs.warm import _checks, _program
from elastic_rs.warm._program import Program, UnreadableError

if TYPE_CHECKING:
    from elastic_rs._elastic_rs import Egg

ROOM = "ELASTIC_RS_TEMPLATE_ROOM"
"""Set by the agent so that ``/proc`` has room for variables that workers have and a template has not."""

STREAMS = ("stdin", "stdout", "stderr")
"""By their descriptors."""

TORCH_SEED = 67280421310721
"""What PyTorch's generator begins with in versions that do not draw it: ``default_rng_seed_val``."""


def main() -> None:
    """Serve as a template; in a worker, run its program."""
    program = serve()
    try:
        program.run()
    except UnreadableError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except BaseException as error:
        _hide_template(error)
        raise


def serve() -> Program:
    """Fork workers until the agent ends, which ends the process. Return in a worker: what it is to run."""
    modules, args = sys.argv[1].split(","), sys.argv[2:]
    nest = Nest(_take_socket())
    os.environ.pop(ROOM, None)
    before = Before(dict(os.environ), [_Stream.of(name) for name in STREAMS])
    # Modules are found where workers find them, and see the command line as they do.
    program = Program(args)
    shared = _checks.Shared()
    if reason := _nameless() or _load(modules) or shared.why_not() or _checks.why_not():
        nest.refuse(reason)
        os._exit(0)
    nest.ready()
    egg = _next_worker(nest)
    _begin(egg, before, program)
    return program


class Before(NamedTuple):
    """What the template began with, and imports may have changed."""

    env: dict[str, str]
    streams: list[_Stream]


def _nameless() -> str:
    """Say if there is a variable that a process may inherit and not set."""
    return "a variable of its environment has no name, so that workers cannot set it" if "" in os.environ else ""


def _take_socket() -> int:
    """Take standard input, which is the agent's socket, and leave an empty one behind."""
    socket = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return socket


def _load(modules: list[str]) -> str:
    """Import the modules; a text says why one cannot be."""
    main, pid = sys.modules["__main__"], os.getpid()
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - workers that are started cold will show it
            return f"`import {name}` failed: {type(error).__name__}: {error}"
        if os.getpid() != pid:
            os._exit(0)  # there is one template; that it has a child, it says itself
    sys.modules["__main__"] = main
    # Threads of libraries that know of forks (OpenBLAS's) end before one and begin anew when they are needed. So fork
    # once, and who is left does not.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return ""


def _next_worker(nest: Nest) -> Egg:
    """Fork guards, each of which forks its worker; return in workers only."""
    while (egg := nest.next_egg()) is not None:
        if reason := _checks.why_not():
            nest.refuse(reason)
            break
        guard = os.fork()
        if guard:
            nest.forked(egg, guard)
            continue
        try:
            egg.become_guard(nest)
        except OSError:
            os._exit(1)  # the agent has been told
        try:
            worker = os.fork()
        except OSError:
            worker = -1
        if worker:
            egg.watch(worker)
        egg.become_worker()
        return egg
    os._exit(0)


def _begin(egg: Egg, before: Before, program: Program) -> None:
    """Make the worker's own what the template has in its stead."""
    env = egg.env | _changes(before.env, egg.env)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if value is not None})
    egg.show()
    program.show(egg.argv)
    for stream in before.streams:
        stream.open()
    _forget_randomness()
    importlib.invalidate_caches()
    time.tzset()


def _changes(before: dict[str, str], worker: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that imports have set, or removed (None).

    Not those that the agent sets: ``setdefault("RANK", "0")`` leaves them alone where they are set when it runs.
    """
    names = before.keys() | os.environ.keys()
    changed = {name: os.environ.get(name) for name in names if before.get(name) != os.environ.get(name)}
    return {name: value for name, value in changed.items() if worker.get(name) == before.get(name)}


class _Stream(NamedTuple):
    """A standard stream, as the interpreter has made it."""

    fd: int
    file: Any
    encoding: str
    errors: str

    @classmethod
    def of(cls, name: str) -> _Stream:
        file = getattr(sys, name)
        return cls(STREAMS.index(name), file, file.encoding, file.errors)

    def open(self) -> None:
        """Make it as ``python -u`` does, unless imports have: what it can do depends on the worker's descriptors."""
        name, mode = STREAMS[self.fd], "r" if self.fd == 0 else "w"
        file: Any = open(self.fd, f"{mode}b", -1 if self.fd == 0 else 0, closefd=False)  # noqa: SIM115
        (file.raw if self.fd == 0 else file).name = f"<{name}>"
        stream: Any = io.TextIOWrapper(file, self.encoding, self.errors, "\n", write_through=True)
        stream.mode = mode
        for place in (name, f"__{name}__"):
            if getattr(sys, place) is self.file:
                setattr(sys, place, stream)


def _forget_randomness() -> None:
    """Draw anew what a process draws when it imports. ``random`` does so itself at a fork."""
    if (torch := sys.modules.get("torch")) and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _hide_template(error: BaseException) -> None:
    """Let an uncaught exception be shown as if the script were all there is."""
    if isinstance(error, SystemExit):
        return
    hook, ours = sys.excepthook, {__file__, _program.__file__, "<string>"}

    def show(kind: Any, error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
