"""How a command line is parsed: spellings, ``PET_*`` variables, help and errors, as torchrun's users know them.

:meth:`Parser.split` finds where the flags end, and argparse converts their values. It never reads what follows them.

Does not import torch, so that ``--help`` and errors come at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastic_rs._version import ShowVersion
from elastic_rs.rendezvous._config import RUST_C10D, RUST_ETCD, shown_defaults
from elastic_rs.run._foreign import instead_of
from elastic_rs.run._usage import UsageError


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


@dataclass(frozen=True)
class Flag:
    """A flag, as far as it must be known to find SCRIPT behind the flags.

    Attributes:
        names: its spellings.
        dest: its attribute of the parsed command line.
        values: how many words it takes.
        variable: the variable that sets it, if one does.
        own: torchrun does not have it. It cannot be abbreviated, since torchrun's users' abbreviations must stay clear.
        instead: for a switch: the flag to use for a value.
    """

    names: Sequence[str]
    dest: str
    values: int
    variable: str | None
    own: bool
    instead: str | None

    @property
    def name(self) -> str:
        """Its spelling in help and errors."""
        return self.names[0]


@dataclass
class CommandLine:
    """A command line that is split at SCRIPT.

    Attributes:
        flags: the flags in their order, each with its words. Flags have their full names there.
    """

    flags: list[tuple[Flag, list[str]]] = field(default_factory=list)
    script: str | None = None
    rest: list[str] = field(default_factory=list)

    def words(self, *, without: Collection[str] = ()) -> list[str]:
        """Return the words of the flags, except those whose attribute is in ``without``."""
        return [word for flag, words in self.flags if flag.dest not in without for word in words]


class Section:
    """A group of flags, with a heading of its own in help."""

    def __init__(self, parser: Parser, group: Any) -> None:
        self._parser = parser
        self._group = group

    def flag(
        self, name: str, *, short: str | None = None, own: bool = False, default: Any = None, **kwargs: Any
    ) -> None:
        """Add a flag with a value. ``PET_<DEST>`` sets it too, as ``torch.distributed.argparse_util.env``."""
        variable = _variable(name)
        given = self._parser.env.get(variable)
        if given is not None:
            # argparse converts a text. Two words it would not.
            default = given.replace(",", " ").split() if kwargs.get("nargs") == 2 else given
        self._add(name, short, variable=variable, own=own, default=default, **kwargs)

    def switch(
        self, name: str, *, short: str | None = None, own: bool = False, instead: str | None = None, **kwargs: Any
    ) -> None:
        """Add a switch. It is on if ``PET_<DEST>`` is a number other than 0, as ``argparse_util.check_env``.

        Raises:
            UsageError: the variable is no number.
        """
        variable = _variable(name)
        given = self._parser.env.get(variable, "0")
        try:
            default = bool(int(given))
        except ValueError:
            hint = f"; {_variable(instead)} takes a value" if instead else ""
            raise UsageError(f"{variable} is `{given}`, must be 0 or 1: it sets {name}{hint}") from None
        kwargs |= {"action": "store_const", "const": True, "default": default}
        self._add(name, short, variable=variable, own=own, instead=instead, **kwargs)

    def plain(self, name: str, *, short: str | None = None, **kwargs: Any) -> None:
        """Add a flag that no variable sets."""
        self._add(name, short, variable=None, **kwargs)

    def _add(
        self,
        name: str,
        short: str | None,
        *,
        variable: str | None,
        own: bool = False,
        instead: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._parser.shows(_dest(name)):
            kwargs["help"] = argparse.SUPPRESS
        if "choices" in kwargs:
            kwargs.setdefault("metavar", "|".join(kwargs["choices"]))
        spelled = [short, name] if short else [name]
        action = self._group.add_argument(*spelled, **kwargs)
        values = action.nargs if isinstance(action.nargs, int) else 1
        others = [other for other in (f"--{_dest(name)}", short) if other and other != name]
        self._parser.add_flag(Flag((name, *others), action.dest, values, variable, own, instead))


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _variable(name: str) -> str:
    return f"PET_{_dest(name).upper()}"


class Parser(argparse.ArgumentParser):
    """The flags, and what help says."""

    def __init__(
        self, *, shown: Collection[str] | None = None, env: Mapping[str, str] = os.environ, **kwargs: Any
    ) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)
        self._shown = shown
        self.env = env
        """Has the variables that set flags."""
        self.flags: dict[str, Flag] = {}
        """Each flag, by each of its spellings."""
        general = Section(self, self.add_argument_group("options"))
        general.plain("--help", short="-h", action="help", help="show this help message and exit")
        general.plain(
            "--version", own=True, action=ShowVersion, help="show the versions of elastic_rs and torch, and exit"
        )

    def section(self, title: str) -> Section:
        return Section(self, self.add_argument_group(title))

    def shows(self, dest: str) -> bool:
        """Whether help lists this attribute."""
        return self._shown is None or dest in self._shown

    def add_flag(self, flag: Flag) -> None:
        self.flags |= dict.fromkeys(flag.names, flag)

    def all(self) -> Iterator[Flag]:
        return iter({id(flag): flag for flag in self.flags.values()}.values())

    def split(self, argv: Sequence[str]) -> CommandLine:
        """Find SCRIPT, which is the first word that is neither a flag nor a flag's value, or that follows ``--``.

        As torchrun, this drops a ``--`` that directly follows SCRIPT. Nothing else behind SCRIPT is looked at.

        Raises:
            UsageError: a flag is not known, an abbreviation is ambiguous, a switch has a value, or a value is missing.
        """
        line = CommandLine()
        words = list(argv)
        marked = False
        while words and not marked and _may_be_flag(words[0]):
            word = words.pop(0)
            if word == "--":
                marked = True
                continue
            flag, value = self._find(word)
            if flag.values == 0:
                if value is not None:
                    words.insert(0, f"-{self._switches_behind(word, flag, value)}")
                line.flags.append((flag, [flag.name]))
            elif value is not None:
                line.flags.append((flag, [f"{flag.name}={value}"]))
            else:
                values, words = words[: flag.values], words[flag.values :]
                if len(values) < flag.values or any(map(_is_flag, values)):
                    count = "one argument" if flag.values == 1 else f"{flag.values} arguments"
                    raise UsageError(f"{flag.name}: expected {count}")  # argparse's words
                line.flags.append((flag, [f"{flag.name}={values[0]}"] if flag.values == 1 else [flag.name, *values]))
        if words:
            line.script, line.rest = words[0], words[1:]
            if not marked and line.rest[:1] == ["--"]:
                del line.rest[0]
        return line

    def _find(self, word: str) -> tuple[Flag, str | None]:
        """Return the flag of a word, and the value in it."""
        name, equals, value = word.partition("=")
        given = value if equals else None
        if flag := self.flags.get(name):
            return flag, given
        if hint := instead_of(name):
            raise UsageError(f"unknown flag `{name}`: {hint}")
        if name.startswith("--"):
            return self._abbreviated(word, name), given
        if flag := self.flags.get(word[:2]):
            return flag, word[2:]
        if hint := instead_of(word[:2]):
            raise UsageError(f"unknown flag `{name}`: {hint}")
        raise UsageError(self._unknown(name))

    def _abbreviated(self, word: str, name: str) -> Flag:
        found = [flag for flag in self.all() if not flag.own and any(known.startswith(name) for known in flag.names)]
        if len(found) > 1:
            raise UsageError(f"ambiguous option: {word} could match {', '.join(flag.name for flag in found)}")
        if not found:
            raise UsageError(self._unknown(name))
        return found[0]

    def _switches_behind(self, word: str, flag: Flag, value: str) -> str:
        """Return what follows a switch in one word, as in ``-mt3``, if it is a flag."""
        if f"-{value[:1]}" in self.flags and not word.startswith("--") and "=" not in word[:3]:
            return value
        hint = f"; {flag.instead}={value} takes one" if flag.instead else ""
        raise UsageError(f"{flag.name} takes no value, and `{word}` gives it one{hint}")

    def _unknown(self, flag: str) -> str:
        names = [name for name in self.flags if name.startswith("--")]
        # Short names resemble too many others: a script's `--lr` is near `--role`.
        near = difflib.get_close_matches(flag, names, n=1, cutoff=0.7)
        hint = f"did you mean `{self.flags[near[0]].name}`?" if near else "flags of the script come after it"
        return f"unknown flag `{flag}`: {hint}"

    def format_help(self) -> str:
        def filled(text: str) -> str:
            return textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)

        keys = [shown_defaults(), *(f"with {name}: {shown_defaults(name)}" for name in (RUST_C10D, RUST_ETCD))]
        text = "\n".join(map(filled, keys))
        return f"{super().format_help()}\nkeys of --rdzv-conf and their defaults, times in seconds:\n{text}\n"

    def error(self, message: str) -> NoReturn:
        # argparse names all spellings of a flag: `argument -r/--redirects: …`.
        what, separator, why = message.removeprefix("argument ").partition(": ")
        if separator and message.startswith("argument "):
            message = f"{what.rpartition('/')[2]}: {why}"
        raise UsageError(message)


def _may_be_flag(word: str) -> bool:
    """Whether argparse would take this for a flag, where it expects one. ``-`` and numbers below 0 are none."""
    return word.startswith("-") and len(word) > 1 and not _is_number(word)


def _is_flag(word: str) -> bool:
    """Whether argparse would take this for a flag, where it expects a value."""
    return _may_be_flag(word) and " " not in word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def restarts(text: str) -> int | tuple[int, str]:
    """Read ``3``, or ``3/1h``: a number, and within how many seconds, as a key's value."""
    number, slash, window = text.partition("/")
    if not slash:
        return whole(text)
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", window)
    if not number.isdecimal() or found is None:
        raise argparse.ArgumentTypeError(
            f"`{text}` is neither a whole number nor N/WINDOW, such as 3/1h; WINDOW ends with s, m, h or d"
        )
    return int(number), str(int(found[1]) * _UNITS_S[found[2]])


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds") from None


def comma_separated(text: str) -> list[str]:
    # Two commas are a literal comma.
    placeholder = "\0"
    return [item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(",")]


def variables_without_effect(made: Parser) -> Iterator[str]:
    """Yield a sentence for each ``PET_*`` variable that seems to be meant for a flag, and sets none."""
    known = {flag.variable for flag in made.all() if flag.variable}
    for name in sorted(os.environ):
        if not name.startswith("PET_") or name in known:
            continue
        if flag := next((flag for flag in made.all() if _variable(flag.name) == name), None):
            yield f"{name} is set and has no effect: {flag.name} is read from the command line only, as by torchrun"
        elif near := _near(name, known):
            yield f"{name} is set and has no effect: no flag has this variable; did you mean {near}?"


def _near(name: str, known: Collection[str]) -> str | None:
    name = name.upper().replace("-", "_")
    longer = sorted(other for other in known if other.startswith(name) or name.startswith(f"{other}_"))
    # Without the prefix, which all have.
    other = difflib.get_close_matches(name[4:], [other[4:] for other in known], n=1, cutoff=0.75)
    return longer[0] if longer else f"PET_{other[0]}" if other else None
