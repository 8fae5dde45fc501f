"""Check that the core's modules import one way: ``python tools/check_imports.py``.

A room (``src/NAME``) imports only rooms of lower floors; files of a room have no circle of imports. What is compiled
for tests alone is not looked at. A file that re-exports others' names does not import them; who imports such a name
from it imports the file that has it. A part of a module may name that module: Rust splits a type's methods so.
"""

from __future__ import annotations

import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from count_lines import ROOT, only_for_tests, without_tests

# From the ground up. Rooms of one floor do not know one another.
FLOORS = (
    "at_once bounded_log clock net open_files processes threads wire",
    "devices etcd_client events hang hosts secure signals steps store",
    "rendezvous workers",
    "channel endpoint warm",
    "agent discovery",
    "launcher",
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
Module = tuple[str, ...]
KEYWORDS = {"crate", "self", "super"}
LONGEST_CHAIN = 8  # of re-exports

NO_CODE = re.compile(
    r"""//[^\n]*                         # a comment
    |   \br(?P<marks>\#*)".*?"(?P=marks)  # a raw text
    |   "(?:\\.|[^"\\])*"                 # a text, which may have lines that begin with `use`
    |   '(?:\\.|[^'\\\n])'                # a character, which may be a quotation mark
    """,
    re.DOTALL | re.VERBOSE,
)
USE = re.compile(r"^(?P<public> *pub(?:\([^)]*\))?)? *use (?P<tree>[^;]+);", re.MULTILINE)
INLINE = re.compile(r"\b(?:crate|super)(?:::\w+)+")
WORD = re.compile(r"\w+|::|[{},*]")


def main() -> int:
    wrong = faults(ROOT)
    print("\n".join(wrong) or "the core's modules import one way")
    return bool(wrong)


def faults(root: Path) -> list[str]:
    modules = dict(read(root))
    if unknown := sorted({module[0] for module in modules if module} - FLOOR.keys()):
        return [f"src/{room} is on no floor: give it one in FLOORS" for room in unknown]
    uses = {module: list(names(text)) for module, text in modules.items()}
    shown = {module: {alias: path for public, path, alias in of if public} for module, of in uses.items()}
    graph: dict[Module, set[Module]] = {module: set() for module in modules}
    for module, of in uses.items():
        for public, path, _ in of:
            target = resolve(module, path, modules, shown)
            if target and module[: len(target)] != target and not (public and target[: len(module)] == module):
                graph[module].add(target)
    wrong = [
        f"src/{'/'.join(module)} imports {'/'.join(target)}, whose room is not below"
        for module in sorted(graph)
        for target in sorted(graph[module])
        if module and module[0] != target[0] and FLOOR[target[0]] >= FLOOR[module[0]]
    ]
    wrong += circles(graph)
    return wrong


def read(root: Path) -> Iterator[tuple[Module, str]]:
    files = {PurePosixPath(path.relative_to(root)): path.read_text() for path in sorted((root / "src").rglob("*.rs"))}
    ignored = {path for file, text in files.items() for path in only_for_tests(file, text, files)}
    for path, text in files.items():
        if path not in ignored:
            inside = path.relative_to("src").with_suffix("").parts
            module = inside[:-1] if inside[-1] in {"mod", "lib"} else inside
            yield module, NO_CODE.sub("", without_tests(text))


def names(text: str) -> Iterator[tuple[bool, Module, str]]:
    """Yield what a file names: whether it re-exports that, its path, and the name under which it has it."""
    for it in USE.finditer(text):
        for path, alias in leaves(WORD.findall(it["tree"])):
            yield bool(it["public"]), path, alias
    for it in INLINE.finditer(USE.sub("", text)):
        path = tuple(it[0].split("::"))
        yield False, path, path[-1]


def leaves(words: list[str]) -> Iterator[tuple[Module, str]]:
    """Yield each path of a use tree, such as ``a::{b, c as d}``, with its name."""
    prefix: list[Module] = [()]
    path: Module = ()
    alias = ""
    for at, word in enumerate([*words, ","]):
        if word == "{":
            prefix.append(path)
        elif word in {",", "}"}:
            if len(path) > len(prefix[-1]) or alias:
                yield path, alias or path[-1]
            if word == "}":
                prefix.pop()
            path, alias = prefix[-1], ""
        elif word == "as":
            alias = "_"
        elif alias == "_":
            alias = word
        elif word == "self" and at and path:
            alias = path[-1]
        elif word != "::":
            path = (*path, word)


def resolve(
    module: Module, path: Module, modules: dict[Module, str], shown: dict[Module, dict[str, Module]]
) -> Module | None:
    """Return the module that has what is named, as seen from another; None for what other crates have."""
    start, rest = started(module, path)
    at = start if path[0] in KEYWORDS or (*start, rest[0]) in modules else None
    for _ in range(LONGEST_CHAIN):
        while at is not None and rest and (*at, rest[0]) in modules:
            at, rest = (*at, rest[0]), rest[1:]
        further = shown.get(at, {}).get(rest[0]) if at is not None and rest else None
        if at is None or further is None:
            break
        at, first = started(at, further)
        rest = (*first, *rest[1:])
    return at


def started(module: Module, path: Module) -> tuple[Module, Module]:
    """Return where a path begins, and what is left of it without ``crate``, ``self`` and ``super``."""
    at = () if path[0] == "crate" else module
    rest = path[1:] if path[0] in {"crate", "self"} else path
    while rest and rest[0] == "super":
        at, rest = at[:-1], rest[1:]
    return at, rest


def circles(graph: dict[Module, set[Module]]) -> Iterator[str]:
    """Yield circles of imports within rooms, until what is left has none."""
    for room in FLOOR:
        inside = {
            module: {target for target in graph[module] if target[0] == room}
            for module in graph
            if module[:1] == (room,)
        }
        while circle := circle_of(inside):
            inside[circle[1]].discard(circle[0])
            first = circle.index(min(circle))
            names = ["/".join(module) for module in (*circle[first:-1], *circle[: first + 1])]
            yield "a circle of imports: " + " <- ".join(names)


def circle_of(graph: dict[Module, set[Module]]) -> list[Module] | None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


if __name__ == "__main__":
    sys.exit(main())
