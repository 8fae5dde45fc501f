"""The fork server of warm starts (the *template*): a process that has imported the workers' modules.

The agent executes ``python -u -c CODE MODULES ARGS``. CODE is that of ``_plan``, which calls :func:`main`, and ARGS
are the workers' arguments of ``python``. In a worker :func:`main` runs the script as the interpreter would, and
returns, so that the interpreter ends as usual. Facts: ``Modules/main.c`` and ``Python/pythonrun.c`` of CPython.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
import time
from typing import Any, NamedTuple

from elastic_rs._elastic_rs import ForkServer, SpawnRequest
from elastic_rs._warm import _checks, _program
from elastic_rs._warm._program import Program, UnreadableError

ROOM = "ELASTIC_RS_TEMPLATE_ROOM"
"""Set by the agent to reserve memory in ``/proc`` for variables that workers have and a fork server has not."""

STREAMS = ("stdin", "stdout", "stderr")
"""Names of the standard streams, indexed by descriptor."""

LAZY_IMPORTS = {"torch": ("torch._dynamo", "elastic_rs.elastic._group", "elastic_rs.elastic._torch_state")}
"""What a module imports at first use, if that takes long: torch with the first optimizer or wrap, for 1.5 s. A worker
with torch may use ``elastic_rs.elastic``, too."""

LAZY_PARTS = {"transformers": "transformers.trainer"}
"""Of packages that import their parts at first use: the part that most scripts use."""

TORCH_SEED = 67280421310721
"""Initial seed of PyTorch's generator in versions that do not draw it at random: ``default_rng_seed_val``."""


def main() -> None:
    """Serve as a fork server; in a worker, run its program."""
    program = serve()
    try:
        program.run()
    except UnreadableError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except BaseException as error:
        _hide_fork_server(error)
        raise
    finally:
        gc.unfreeze()  # the interpreter ends as usual: it collects what it still has


def serve() -> Program:
    """Fork workers until the agent ends, which ends the process. Return in a worker, with its program."""
    modules, args = sys.argv[1].split(","), sys.argv[2:]
    server = ForkServer(_take_socket())
    os.environ.pop(ROOM, None)
    before = Before(dict(os.environ), [_Stream.of(name) for name in STREAMS])
    # Imported modules are found as in a worker, and see the worker's command line.
    program = Program(args)
    shared = _checks.Shared()
    if reason := _nameless() or _load(modules) or _checks.why_not() or shared.why_not():
        server.refuse(reason)
        os._exit(0)
    # A worker's collection would write to each object, and so copy its page: 0.2 s and 100 MB with torch.
    gc.freeze()
    server.ready()
    request = _next_worker(server)
    _begin(request, before, program)
    return program


class Before(NamedTuple):
    """State at the start of the fork server, which imports may change."""

    env: dict[str, str]
    streams: list[_Stream]


def _nameless() -> str:
    """Return whether a variable can be inherited but not set."""
    return "a variable of its environment has no name, so that workers cannot set it" if "" in os.environ else ""


def _take_socket() -> int:
    """Take standard input, which is the agent's socket, and replace it with ``/dev/null``."""
    socket = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return socket


def _load(modules: list[str]) -> str:
    """Import the modules. Return why one cannot be imported, if so."""
    main, pid = sys.modules["__main__"], os.getpid()
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - executed workers will show it
            return f"`import {name}` failed: {type(error).__name__}: {error}"
        if type(sys.modules[name]).__name__ == "_LazyModule":
            sys.stderr.write(_lazy(name))
        for lazy in LAZY_IMPORTS.get(name, ()):
            with contextlib.suppress(Exception):  # workers that need it will show it
                importlib.import_module(lazy)
        if os.getpid() != pid:
            os._exit(0)  # a module has forked, and this is the child: the fork server reports it
    sys.modules["__main__"] = main
    # Threads of libraries that handle forks (OpenBLAS's) end before a fork and start again on demand. So fork once.
    # Threads that are left do not handle forks.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return ""


def _lazy(name: str) -> str:
    """Say that a package has hardly imported anything."""
    part = LAZY_PARTS.get(name, f"{name}.MODULE")
    return (
        f"elastic_rs: --warm-modules={name} saves little: `{name}` imports its parts when they are used first; name "
        f"those that the script uses, such as --warm-modules={part}\n"
    )


def _next_worker(server: ForkServer) -> SpawnRequest:
    """Fork guards, each of which forks its worker. Return in workers only, with the request."""
    while (request := server.next_request()) is not None:
        if reason := _checks.why_not():
            server.refuse(reason)
            break
        guard = os.fork()
        if guard:
            server.forked(request, guard)
            continue
        try:
            server.become_guard(request)
        except OSError:
            os._exit(1)  # the agent has received the reason
        try:
            worker = os.fork()
        except OSError:
            worker = -1
        if worker:
            request.watch(worker)
        request.become_worker()
        return request
    os._exit(0)


def _begin(request: SpawnRequest, before: Before, program: Program) -> None:
    """Replace the fork server's environment, argv and streams with the worker's."""
    env = request.env | _changes(before.env, request.env)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if value is not None})
    standby = sys.modules.get("elastic_rs.elastic._standby")  # imported before the variables were there
    if standby is not None:
        standby.READS.begin()
    request.show()
    program.show(request.argv)
    for stream in before.streams:
        stream.open()
    _answer_the_agent()
    _forget_randomness()
    importlib.invalidate_caches()
    time.tzset()


def _answer_the_agent() -> None:
    """Do what the end of `import torch` does in a worker that is executed: the fork server had no agent to answer."""
    if "torch" in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from elastic_rs._integration._watch import autoload

        autoload()


def _changes(before: dict[str, str], worker: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that imports have set, or removed (None).

    Not those that the agent sets: in a worker, ``setdefault("RANK", "0")`` of an import would find them set.
    """
    names = before.keys() | os.environ.keys()
    changed = {name: os.environ.get(name) for name in names if before.get(name) != os.environ.get(name)}
    return {name: value for name, value in changed.items() if worker.get(name) == before.get(name)}


class _Stream(NamedTuple):
    """A standard stream, as the interpreter made it."""

    fd: int
    file: Any
    encoding: str
    errors: str

    @classmethod
    def of(cls, name: str) -> _Stream:
        file = getattr(sys, name)
        return cls(STREAMS.index(name), file, file.encoding, file.errors)

    def open(self) -> None:
        """Make the stream anew as ``python -u`` does, for the worker's descriptors, unless imports have replaced it."""
        name, mode = STREAMS[self.fd], "r" if self.fd == 0 else "w"
        file: Any = open(self.fd, f"{mode}b", -1 if self.fd == 0 else 0, closefd=False)  # noqa: SIM115
        (file.raw if self.fd == 0 else file).name = f"<{name}>"
        stream: Any = io.TextIOWrapper(file, self.encoding, self.errors, "\n", write_through=True)
        stream.mode = mode
        for attribute in (name, f"__{name}__"):
            if getattr(sys, attribute) is self.file:
                setattr(sys, attribute, stream)


def _forget_randomness() -> None:
    """Seed random number generators again that imports have seeded. ``random`` does so itself at a fork."""
    if (torch := sys.modules.get("torch")) and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _hide_fork_server(error: BaseException) -> None:
    """Show an uncaught exception without the fork server's frames."""
    if isinstance(error, SystemExit):
        return
    hook, ours = sys.excepthook, {__file__, _program.__file__, "<string>"}

    def show(kind: Any, error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
