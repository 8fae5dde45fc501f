"""How a command line is parsed: spellings, ``PET_*`` variables, help and errors, as torchrun's users know them.

Does not import torch, so that ``--help`` and errors come at once.
"""

from __future__ import annotations

import argparse
import os

from elastic_rs.run._usage import UsageError, fail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MARK = "\0"
"""No argument contains it."""


def apart(arg: str) -> str:
    """Mark `--warm-start=…` as another flag. If it is the script's argument, :func:`together` removes the mark."""
    name, separator, value = arg.partition("=")
    return f"{name}{MARK}={value}" if separator and name in {"--warm-start", "--warm_start"} else arg


def together(arg: str) -> str:
    return arg.replace(f"{MARK}=", "=", 1)


class Env(argparse.Action):
    """Its default is the value of ``PET_<DEST>``, as ``torch.distributed.argparse_util.env``."""

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        super().__init__(dest=dest, default=os.environ.get(f"PET_{dest.upper()}", default), **kwargs)

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class NamesSignals(Env):
    """Notes that the user has named signals, if only those that are named anyway."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.signals_named = True


class CheckEnv(argparse.Action):
    """A switch, on if ``PET_<DEST>`` is a number other than 0, as ``torch.distributed.argparse_util.check_env``."""

    def __init__(self, dest: str, **kwargs: Any) -> None:
        name = f"PET_{dest.upper()}"
        given = os.environ.get(name, "0")
        try:
            default = bool(int(given))
        except ValueError:
            flag = next(flag for flag in kwargs["option_strings"] if flag.startswith("--"))
            raise UsageError(f"{name} is `{given}`, must be 0 or 1: it sets {flag}") from None
        super().__init__(dest=dest, const=True, default=default, nargs=0, **kwargs)

    def __call__(self, _: Any, namespace: argparse.Namespace, __: Any, ___: str | None = None) -> None:
        setattr(namespace, self.dest, self.const)


class PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None) -> None:
        shtab = shtab_if_installed()
        if shtab is None:
            parser.exit(1, f"{option_string} requires the 'shtab' package: pip install shtab\n")
        print(shtab.complete(parser, shell=values))
        parser.exit()


def shtab_if_installed() -> Any:
    """Return the package that makes shell completions, if it is installed."""
    try:
        import shtab  # type: ignore[import-not-found]
    except ImportError:
        return None
    return shtab


def adder(group: Any, action: Any = Env) -> Callable[..., None]:
    def add(flag: str, *, short: str | None = None, **kwargs: Any) -> None:
        names = [name for name in (short, flag) if name]
        underscored = f"--{flag[2:].replace('-', '_')}"
        if underscored != flag:
            names.append(underscored)
        group.add_argument(*names, **({"action": action} if action else {}) | kwargs)

    return add


class Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        import textwrap
        from functools import partial

        from elastic_rs.rendezvous._config import RUST_C10D, RUST_ETCD, shown_defaults  # which nothing else here needs

        def filled(text: str) -> str:
            return textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)

        self.formatter_class = partial(Help, width=None)  # that of the terminal
        keys = [shown_defaults(), *(f"with {name}: {shown_defaults(name)}" for name in (RUST_C10D, RUST_ETCD))]
        text = "\n".join(map(filled, keys))
        return f"{super().format_help()}\nkeys of --rdzv-conf and their defaults, times in seconds:\n{text}\n"

    def _get_option_tuples(self, option_string: str) -> Any:
        # Flags that torchrun does not have must not make its users' abbreviations ambiguous.
        found = super()._get_option_tuples(option_string)
        double = option_string.startswith("--")
        return [match for match in found if not (double and getattr(match[0], "exact", False))]

    def error(self, message: str) -> NoReturn:
        # argparse names all spellings of a flag: `argument --max-restarts/--max_restarts: …`.
        if message.startswith("ambiguous option: "):
            given, _, matches = message.partition(" could match ")
            fail(f"{given} could match {', '.join(name for name in matches.split(', ') if not _is_other(name))}")
        what, separator, why = message.removeprefix("argument ").partition(": ")
        if separator and message.startswith("argument "):
            names = what.split("/")
            message = f"{next((name for name in names if name.startswith('--')), names[0])}: {why}"
        elif "SCRIPT" in message:
            message = f"no script is given; it comes after the flags: {self.usage}"
        fail(message)


def _is_other(name: str) -> bool:
    """Whether this is a spelling of a flag that help does not show."""
    return "_" in name or MARK in name


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag."""

    def __init__(self, prog: str, width: int | None = 100) -> None:
        # argparse makes one for each flag, and imports `shutil` for a terminal's width.
        super().__init__(prog, max_help_position=34, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not _is_other(name)]
        if not names:
            return super()._format_action_invocation(action)
        if action.nargs == 0:
            return ", ".join(names)
        value = self._format_args(action, str(action.metavar or action.dest.upper()))
        if action.choices is not None:
            value = "|".join(map(str, action.choices))
        return f"{', '.join(names)} {value}"


def unknown_flag(flag: str, made: argparse.ArgumentParser) -> str:
    import difflib

    actions = made._actions  # noqa: SLF001 - no other way
    names = [name for action in actions for name in action.option_strings if name.startswith("--") and MARK not in name]
    # Short names resemble too many others: a script's `--lr` is near `--role`.
    near = difflib.get_close_matches(flag, names, n=1, cutoff=0.7)
    hint = f"did you mean `{near[0]}`?" if near else "flags of the script come after it"
    return f"unknown flag `{flag}`: {hint}"


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds") from None


def comma_separated(text: str) -> list[str]:
    # Two commas are a literal comma.
    placeholder = "\0"
    return [item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(",")]
