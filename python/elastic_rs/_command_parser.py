"""The parser of ``elastic-rs``: an error is one line that names the nearest word, and each command has an example."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from elastic_rs._exit_codes import Look
from elastic_rs._terminal import error_line, plain

__all__ = ["CommandParser"]

ELSEWHERE = {"serve": "store serve", "run": "elastic-run", "new": "token new"}
"""Where a word is a command, if it is none here."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose commands have parsers of this class."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(  # type: ignore[override] # argparse's own types say less
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, rest = super().parse_known_args(args, namespace)
        if rest:  # this is the innermost parser, which knows the flags that there are
            self.error(self._unknown(rest[0]))
        return known, rest

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"`{word}` is one argument too many"
        flag = word.partition("=")[0]
        flags = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        return f"unknown flag `{flag}`{_nearest(flag, flags)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if _is_commands(action) and value not in (action.choices or ()):
            there = ELSEWHERE.get(value)
            known = list(action.choices or ())
            if there is not None and there not in known:
                command = there if there.startswith("elastic-") else f"elastic-rs {there}"
                hint = f"; it is `{command}`"
            else:
                hint = _nearest(value, known) or f"; there are {', '.join(known)}"
            raise argparse.ArgumentError(None, f"unknown command `{value}`{hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """End the process with 2."""
        commands = next((list(action.choices or ()) for action in self._actions if _is_commands(action)), [])
        if commands and "required: COMMAND" in message:
            message = f"no command is given; there are {', '.join(commands)}"
        text = plain(message).replace("the following arguments are required:", "missing:")
        print(error_line("elastic-rs", text), file=sys.stderr)
        print(f"{self.prog} --help has its arguments", file=sys.stderr)
        raise SystemExit(Look.NOT_VALID)


def _is_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - argparse has no public name


def _nearest(word: str, words: Any) -> str:
    import difflib  # after a mistake alone

    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
