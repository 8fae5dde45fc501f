"""The template of warm starts: a process that imports modules and then forks the workers that import them too.

The agent executes ``python -u -c CODE MODULES ARGS``, where CODE is that of ``_warm``, which calls :func:`main`, and
ARGS are what workers have behind ``python``. In a worker :func:`main` runs the script as the interpreter would, and
returns, so that the interpreter ends as always. Facts: ``Modules/main.c`` and ``Python/pythonrun.c`` of CPython.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import runpy
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_rs._elastic_rs import Nest
from elastic_rs._warm import target

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_rs._elastic_rs import Egg

ROOM = "ELASTIC_RS_TEMPLATE_ROOM"
"""Set by the agent so that ``/proc`` has room for variables that workers have and a template has not."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""What a process that uses a GPU has open."""

TORCH_SEED = 67280421310721
"""What PyTorch's generator begins with in versions that do not draw it: ``default_rng_seed_val``."""


def main() -> None:
    """Serve as a template; in a worker, run its script."""
    try:
        run = serve()
    except _UnreadableError as error:
        _tell_unreadable(error)
    try:
        run()
    except BaseException as error:
        _hide_template(error)
        raise


def serve() -> Callable[[], object]:
    """Fork workers until the agent ends, which ends the process. Return in a worker: its script, which is to be run."""
    modules, args = sys.argv[1].split(","), sys.argv[2:]
    found = target(args)
    assert found is not None, f"not for templates: {args}"
    is_module, at = found
    nest = Nest(_take_socket())
    first = sys.modules["__main__"]
    os.environ.pop(ROOM, None)
    env = dict(os.environ)
    # Modules are found where workers find them, and see the command line as they do.
    sys.argv = ["-m" if is_module else args[at], *args[at + 1 :]]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(args[at]))
    if reason := _load(modules) or _why_not():
        nest.refuse(reason)
        os._exit(0)
    nest.ready()
    changes = _changes(env)
    egg = _next_worker(nest)
    _begin(egg, changes)
    if is_module:
        return functools.partial(runpy._run_module_as_main, args[at])  # type: ignore[attr-defined]  # noqa: SLF001
    return _script(args[at], first)


def _take_socket() -> int:
    """Take standard input, which is the agent's socket, and leave an empty one behind."""
    socket = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return socket


def _load(modules: list[str]) -> str:
    """Import the modules; a text says why one cannot be."""
    main = sys.modules["__main__"]
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - workers that are started cold will show it
            return f"`import {name}` failed: {type(error).__name__}: {error}"
    sys.modules["__main__"] = main
    # Threads of libraries that know of forks (OpenBLAS's) end before one and begin anew when they are needed. So fork
    # once, and who is left does not.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return ""


def _why_not() -> str:
    """Say why a fork of this process would not be as good as a process of its own, if it would not."""
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            threads[int(thread)] = file.read().strip()
    del threads[os.getpid()]
    if threads:
        import threading

        known = {thread.native_id: thread.name for thread in threading.enumerate()}
        names = ", ".join(f"{known.get(thread, name)} ({thread})" for thread, name in threads.items())
        return f"what it has imported started threads, which no fork takes along: {names}"
    for name in ("torch.cuda", "torch.xpu"):
        device = sys.modules.get(name)
        if device is not None and getattr(device, "is_initialized", bool)():
            return f"what it has imported initialised {name}, which no fork can use"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(DEVICES):
                return f"what it has imported opened {path}, which no fork can use"
    return ""


def _changes(env: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that imports have set, or removed (None)."""
    names = env.keys() | os.environ.keys()
    return {name: os.environ.get(name) for name in names if env.get(name) != os.environ.get(name)}


def _next_worker(nest: Nest) -> Egg:
    """Fork guards, each of which forks its worker; return in workers only."""
    while (egg := nest.next_egg()) is not None:
        if reason := _why_not():
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


def _begin(egg: Egg, changes: dict[str, str | None]) -> None:
    """Make the worker's own what the template has in its stead."""
    env, argv = egg.env | changes, egg.argv
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if value is not None})
    egg.show()
    found = target(argv[1:])
    assert found is not None
    is_module, at = found
    sys.argv[:] = ["-m" if is_module else argv[1 + at], *argv[2 + at :]]
    sys.orig_argv[:] = argv
    _open_streams()
    _forget_randomness()
    importlib.invalidate_caches()
    time.tzset()


def _open_streams() -> None:
    """Make standard streams as ``python -u`` does: what they can do depends on the worker's descriptors."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        before, mode = getattr(sys, name), "r" if fd == 0 else "w"
        file: Any = open(fd, f"{mode}b", -1 if fd == 0 else 0, closefd=False)  # noqa: SIM115
        (file.raw if fd == 0 else file).name = f"<{name}>"
        stream: Any = io.TextIOWrapper(file, before.encoding, before.errors, "\n", write_through=True)
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_randomness() -> None:
    """Draw anew what a process draws when it imports. ``random`` does so itself at a fork."""
    if (torch := sys.modules.get("torch")) and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


class _UnreadableError(Exception):
    """The script cannot be read: the interpreter says so in a way of its own, and ends with 2."""


def _tell_unreadable(error: _UnreadableError) -> NoReturn:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2)


def _script(name: str, first: Any) -> Callable[[], object]:
    """Make ``__main__`` of a script. ``first`` is a ``__main__`` as the interpreter makes it."""
    path = os.path.join(os.getcwd(), name)  # as the interpreter does
    main = type(sys)("__main__")
    vars(main).update({name: value for name, value in vars(first).items() if name[:2] == "__" == name[-2:]})
    from importlib.machinery import SourceFileLoader

    main.__loader__ = SourceFileLoader("__main__", path)
    main.__file__ = path
    if sys.version_info < (3, 15):
        main.__cached__ = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        text = f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        raise _UnreadableError(text) from None
    return lambda: exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102


def _hide_template(error: BaseException) -> None:
    """Let an uncaught exception be shown as if the script were all there is."""
    if isinstance(error, SystemExit):
        return
    hook = sys.excepthook

    def show(kind: Any, error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, "<string>"}:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
