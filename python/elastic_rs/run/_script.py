"""Whether the script, module or program of ``elastic-run``'s command line exists.

Without this each worker would say so itself, after the nodes have met and in a report of many lines.
"""

from __future__ import annotations

import argparse
import os
import sys

from elastic_rs.run._usage import PROG, UsageError


class NoScriptError(UsageError):
    """The workers' script, module or program does not exist on this node. Another one may have it."""

    hint = ""


def check(args: argparse.Namespace) -> None:
    """Check that the workers' program exists.

    Raises:
        UsageError: Python is given as the script.
        NoScriptError: the script, module or program does not exist here; the message says which and where.
    """
    refuse_python(args)
    if why := why_not(args):
        raise NoScriptError(why + _meant_for_warm_modules(args))


def _meant_for_warm_modules(args: argparse.Namespace) -> str:
    """Return a hint if the script may be the value that ``--warm-start`` once had: `--warm-start torch train.py`."""
    script, rest = args.training_script, args.training_script_args
    if not args.warm_start or "/" in script or script.endswith(".py") or not (rest and rest[0].endswith(".py")):
        return ""
    return f"; --warm-start takes no value: --warm-modules={_shown(script)} {_shown(rest[0])}"


def refuse_python(args: argparse.Namespace) -> None:
    """Raise if the script is Python itself, as in ``horovodrun … python train.py``."""
    script, rest = args.training_script, args.training_script_args
    folder, _, name = script.rpartition("/")
    is_python = name.startswith("python") and all(part.isdecimal() for part in name[6:].split(".") if name[6:])
    is_own = not folder and os.path.isfile(script)  # noqa: PTH113 - False on any error
    if args.no_python or args.module or args.run_path or not is_python or is_own:
        return
    # Workers are run with `-u`, and `-m` is a flag here too.
    words = rest[next((at for at, word in enumerate(rest) if word != "-u"), len(rest)) :]
    if words and words[0].startswith("-") and words[0] != "-m":
        raise UsageError(
            f"the script is `{_shown(script)}`, with the option `{_shown(words[0])}` of Python: "
            f"{PROG} [flags] --no-python {' '.join(map(_shown, [script, *rest]))}"
        )
    shown = " ".join(map(_shown, words))
    raise UsageError(
        f"the script is `{_shown(script)}`: leave it out, since workers are run by Python anyway: "
        f"{PROG} [flags] {shown}; --no-python runs any other program"
    )


def other_environment(*, no_python: bool = False) -> str:
    """Say that workers do not run in the virtual environment that is active, if there is another one."""
    active = os.environ.get("VIRTUAL_ENV", "")
    if not active or no_python or os.path.realpath(active) == os.path.realpath(sys.prefix):
        return ""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if os.path.commonpath([os.path.abspath(python), os.path.abspath(active)]) == os.path.abspath(active):  # noqa: PTH100
        return ""
    return (
        f"the active environment (VIRTUAL_ENV) is `{_shown(active)}`, and workers run `{_shown(python)}`, with other "
        f"packages: start this with `{_shown(active)}/bin/python -m elastic_rs.run`, or deactivate the environment"
    )


def why_not(args: argparse.Namespace) -> str:
    """Return why the workers' program cannot run. Empty if it can, or if only the worker can find out."""
    script = args.training_script
    if "$" in script and not args.no_python:
        return ""  # `${local_rank}` is replaced, with a different number per worker. In a program's name it is not.
    if args.run_path:
        return _script(script)
    if args.no_python:
        return _program(script)
    if os.getenv("PYTHON_EXEC", sys.executable) != sys.executable:
        return ""  # a wrapper or another Python, which may interpret its arguments differently
    if args.module:
        return _module(script)
    # `-c` and the like are options of Python, and `-` is its standard input.
    return "" if script.startswith("-") else _script(script)


def _script(path: str) -> str:
    if why := _missing("script", path):
        return why
    if os.path.isdir(path):  # noqa: PTH112 - False on any error
        names = (os.path.join(path, f"__main__.{suffix}") for suffix in ("py", "pyc"))  # noqa: PTH118
        return "" if any(map(os.path.exists, names)) else f"the script `{_shown(path)}` is a folder without __main__.py"
    if not os.access(path, os.R_OK):
        return f"the script `{_shown(path)}` cannot be read: Permission denied"
    return ""


def _program(name: str) -> str:
    if "/" in name:
        if why := _missing("program", name):
            return why
        return "" if _is_program(name) else f"the program `{_shown(name)}` is not executable"
    if any(_is_program(os.path.join(folder, name)) for folder in os.get_exec_path()):  # noqa: PTH118
        return ""
    return f"the program `{_shown(name)}` is in no folder of PATH"


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)  # noqa: PTH113


def _missing(what: str, path: str) -> str:
    try:
        os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        where = "" if path.startswith("/") else f" in {_here()}"
        return f"the {what} `{_shown(path)}` does not exist{where}"
    except OSError as error:
        return f"the {what} `{_shown(path)}` cannot be opened: {error.strerror}"
    return ""


def _module(name: str) -> str:
    """Look for the package only. Which modules it has may depend on its code, which does not run here."""
    flags = sys.flags
    if flags.isolated or flags.ignore_environment or flags.no_user_site or flags.no_site:
        return ""  # workers are started without these options, and may find more modules
    from importlib import util

    package = name.partition(".")[0]
    sys.path.insert(0, "")  # the current folder
    try:
        found = util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = True  # it exists but is unusual
    finally:
        sys.path.remove("")
    return "" if found else f"no module named `{_shown(package)}`, neither in {_here()} nor for {sys.executable}"


def _here() -> str:
    try:
        return f"`{_shown(os.getcwd())}`"  # noqa: PTH109
    except OSError as error:
        return f"the current folder, which is not accessible ({error.strerror})"


def _shown(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")
