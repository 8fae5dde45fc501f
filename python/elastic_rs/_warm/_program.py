"""The program of a worker that is forked from a fork server: a script, a module, a folder or an archive.

The fork server shows the modules that it imports as much of the program as is known before it runs: its arguments,
``sys.path``, and ``__main__.__file__``, which is not set at a prompt. ``__main__`` is the interpreter's
own, because modules keep it (``multiprocessing`` as ``__mp_main__``). Facts: ``Modules/main.c`` and
``Python/pythonrun.c`` of CPython. ``docs/decisions/0048-warm-workers-return-through-the-templates-main.md`` has the
alternatives.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from typing import Any

from elastic_rs._warm._plan import target


class UnreadableError(Exception):
    """The script cannot be read. The interpreter has its own message for that, and ends with 2."""


class Program:
    """The program on the workers' command line. Made in the fork server, before anything is imported."""

    run: Callable[[], object]
    """In a worker: run the program. Raises :class:`UnreadableError` if the script does not exist."""

    def __init__(self, args: list[str]) -> None:
        found = target(args)
        assert found is not None, f"not for fork servers: {args}"
        self._is_module, self._at = found
        self._name = args[self._at]
        self.show([sys.executable, *args])
        if self._is_module:
            self.run = self._as_module
            _put_first(os.getcwd())
            file = _file_of(self._name)
            _become(file, None)
            sys.argv[0] = file or "-m"
            return
        path = _absolute(self._name)
        if get_importer(path) is not None:
            self.run = self._as_folder
            sys.path[:0] = [path] if sys.flags.safe_path else []
            _put_first(path)
            _become(_file_of("__main__", [path]), None)
            return
        self.run = self._as_script
        self._path = path
        _put_first(os.path.dirname(os.path.realpath(path)))
        loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        _become(path, loader("__main__", path))

    def show(self, argv: list[str]) -> None:
        """Set the arguments in ``sys`` to those of a worker with this command."""
        sys.orig_argv[:] = argv
        sys.argv[:] = ["-m" if self._is_module else argv[1 + self._at], *argv[2 + self._at :]]

    def _as_module(self) -> object:
        return runpy._run_module_as_main(self._name)  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter

    def _as_folder(self) -> object:
        return runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001

    def _as_script(self) -> None:
        exec(self._code(), vars(sys.modules["__main__"]))  # noqa: S102

    def _code(self) -> Any:
        path = self._path
        try:
            if path.endswith(".pyc"):
                return SourcelessFileLoader("__main__", path).get_code("__main__")
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            text = f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
            raise UnreadableError(text) from None
        return compile(source, path, "exec", dont_inherit=True)


def _absolute(name: str) -> str:
    """Return the absolute path as the interpreter does, without normalising it.

    The working directory may be gone, so it is not read for an absolute name.
    """
    return name if os.path.isabs(name) else os.path.join(os.getcwd(), name)


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _become(file: str | None, loader: Any) -> None:
    """Set ``__main__`` to its state at the start of the program."""
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name[:2] == "__" == name[-2:]]:
        delattr(main, name)
    if file is not None:
        main.__file__ = file
    if loader is not None:
        main.__loader__ = loader
        if sys.version_info < (3, 15):
            main.__cached__ = None  # type: ignore[attr-defined]


def _file_of(name: str, path: list[str] | None = None) -> str | None:
    """Return the file of a module, or of a package's ``__main__``, without importing its parents."""
    at = ""
    for part in [*name.split("."), "__main__"]:
        at = f"{at}.{part}" if at else part
        spec = PathFinder.find_spec(at, path)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return spec.origin
        path = [*spec.submodule_search_locations]
    return None
