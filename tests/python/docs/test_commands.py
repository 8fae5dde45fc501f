"""Every command line of the pages is one that the real parsers take."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_rs import _cli, _doctor
from elastic_rs.run._flags import parse
from elastic_rs.run._usage import UsageError

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "site").glob("*.md"))]


SHELL = {"|", "||", "&&", "&", ";", ">", ">>", "2>", "<"}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    fenced = re.findall(r"^( *)```(\w+)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for indent, language, text in fenced:
        if language in languages:
            yield re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def command_lines(page: Path) -> Iterator[str]:
    """Yield the lines that begin with `$`, with those on which they go on."""
    for block in blocks(page, "console", "sh"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")


def own(line: str) -> list[str] | None:
    """Return the words of a command of this package, or of torchrun, in a line. None: it is of another program."""
    words = shlex.split(line, comments=True)
    for at, word in enumerate(words):
        if word in ("elastic-run", "elastic-rs", "torchrun"):
            rest = words[at:]
            return rest[: next((n for n, other in enumerate(rest) if other in SHELL), None)]
        if word == "python" and words[at + 1 : at + 3] == ["-m", "elastic_rs.run"]:
            return ["elastic-run", *words[at + 3 :]]
    return None


LINES = [(page, line) for page in PAGES for line in command_lines(page) if own(line) is not None]


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_the_real_parser_takes_the_command(page: Path, line: str) -> None:
    program, *words = own(line) or []
    words = [word for word in words if word not in ("…", "...", "[…]")]
    complaints = io.StringIO()
    with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(io.StringIO()):
        code = taken(program, words)
    assert code == 0, f"{page.name}: {line}: {complaints.getvalue()}"


def taken(program: str, words: list[str]) -> object:
    """Parse the words, and return the exit code that the program would end with for them. 0: they are understood."""
    try:
        if words[:1] == ["doctor"]:
            _doctor._parser().parse_args(words[1:])
        elif program == "elastic-rs":
            _cli._parser().parse_args(words)
        elif program == "torchrun":
            from torch.distributed.run import get_args_parser

            get_args_parser().parse_args([*words, *(["train.py"] if words[-1:] != ["train.py"] else [])])
        else:
            parse(words, needs_script=False)
    except SystemExit as end:
        return end.code or 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def test_there_are_commands_of_each_program() -> None:
    assert {(own(line) or [""])[0] for _, line in LINES} == {"elastic-run", "elastic-rs", "torchrun"}
    assert len(LINES) >= 40
