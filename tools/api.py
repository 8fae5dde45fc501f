"""Write the public names of the package, with their signatures, into ``docs/api.txt``, or compare it (``--check``).

    make api                       # after a change of a public name or signature, which is a decision (docs/policy.md)

The source is read, and nothing is imported: ``griffe`` (``requirements/checks.txt``) follows imports, also those that
are made on first use, to where a name is defined. A name is public if no part of it begins with an underscore and the
``__all__`` of its module has it. Exit codes: 0; 1, the file differs; 3, ``griffe`` could not be installed.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.txt"
SAME, DIFFERS, NO_GRIFFE = 0, 1, 3

if TYPE_CHECKING:
    from griffe import Class, Module, Object

HEADER = """\
# The public names of elastic_rs, with their signatures. `make api` writes this file, and `make lint` compares it.
# A change of it is a decision: docs/policy.md says what stays stable, CHANGELOG.md names each break.
"""
DIFFERENCE = """\
docs/api.txt is not the public API of this tree any more. A change of it is a decision (docs/policy.md):
- a new name stays for long: is it meant to be public?
- a removed or changed one breaks programs: CHANGELOG.md names the break and what to do.
Then `make api` writes the file."""


def public_modules(module: Module) -> Iterator[Module]:
    """Yield a module and the public ones below it, in order of names. ``__main__`` is a program."""
    yield module
    for name, below in sorted(module.members.items()):
        if not below.is_alias and below.is_module and not name.startswith("_"):
            yield from public_modules(below)


def names_of(module: Module) -> list[str]:
    """Return the names in the ``__all__`` of a module."""
    return sorted({str(name) for name in module.exports or ()})


SHOWN = {"__init__", "__new__", "__call__", "__aenter__", "__aexit__", "__iter__", "__len__"}
"""Names with underscores that are part of an interface."""


def lines_of_class(name: str, kind: Class, public: Collection[str]) -> Iterator[str]:
    """Yield the lines of a class and of its public members, also of those that it inherits from a private class."""
    bases = ", ".join(str(base) for base in kind.bases)
    yield f"class {name}({bases})" if bases else f"class {name}"
    for member_name, found in sorted(kind.all_members.items()):
        if member_name.startswith("_") and member_name not in SHOWN:
            continue
        try:
            member = found.final_target if found.is_alias else found
        except Exception:  # noqa: BLE001 - griffe's: it is of another package
            continue
        owner = member.parent.path if member.parent else ""
        if not owner.startswith("elastic_rs") or (owner != kind.path and owner in public):
            continue
        if member.is_function:
            labels = sorted(member.labels & {"classmethod", "staticmethod", "async"})
            text = member.signature(name=f"{name}.{member_name}")
            yield f"{text}{''.join(f'  [{label}]' for label in labels)}"
        elif member.is_attribute:
            what = "property" if "property" in member.labels else "attribute"
            annotation = member.annotation
            yield f"{name}.{member_name}{f': {annotation}' if annotation else ''}  [{what}]"


def class_of(target: Object) -> Class | None:
    """Return the class of which a module makes an instance, as ``step = Step()``."""
    made = str(getattr(target, "value", "")).removesuffix("()")
    kind = target.parent.members.get(made) if target.parent else None
    return kind if kind is not None and not kind.is_alias and kind.is_class else None


def lines_of(name: str, target: Object, public: Collection[str]) -> Iterator[str]:
    """Yield the lines of what a public name stands for. ``public``: where public names are defined."""
    if target.is_class:
        yield from lines_of_class(name, target, public)
    elif target.is_function:
        overloads = target.overloads or [target]
        yield from (str(each.signature(name=name)) for each in overloads)
    elif name == "elastic_rs.__version__":
        yield f"{name}: str"
    elif (kind := class_of(target)) is not None:
        yield f"{name}: an instance of a private class"
        yield from list(lines_of_class(name, kind, public))[1:]
    elif target.is_module:
        yield f"module {name}"
    else:
        yield f"{name}: {getattr(target, 'annotation', None) or getattr(target, 'value', '?')}"


def api() -> str:
    """Return the text of the file."""
    import griffe

    package = griffe.load("elastic_rs", search_paths=[ROOT / "python"], allow_inspection=False, resolve_aliases=True)
    modules = list(public_modules(package))
    targets: dict[str, Object | str] = {}
    for module in modules:
        for name in names_of(module):
            member = module.members[name]
            try:
                targets[f"{module.path}.{name}"] = member.final_target if member.is_alias else member
            except griffe.AliasResolutionError as error:
                targets[f"{module.path}.{name}"] = error.alias.target_path  # of another package
    public = {target.path for target in targets.values() if not isinstance(target, str)}
    text, first = [HEADER], dict[str, str]()
    for module in modules:
        text += [f"# {module.path}", ""]
        for path in (f"{module.path}.{name}" for name in names_of(module)):
            target = targets[path]
            if isinstance(target, str):
                text.append(f"{path} is {target}")
                continue
            known = first.setdefault(target.path, path)
            text += [f"{path} is {known}"] if known != path else lines_of(path, target, public)
        text.append("")
    return "\n".join(text).rstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(prog="api.py", description="the public names of elastic_rs, with their signatures")
    parser.add_argument("--check", action="store_true", help="compare docs/api.txt, and write nothing")
    args = parser.parse_args(argv)
    sys.path.append(str(ROOT / "build" / "checks"))
    try:
        import griffe  # noqa: F401
    except ModuleNotFoundError:
        print("api: griffe could not be installed (requirements/checks.txt)")
        return NO_GRIFFE
    now = api()
    if not args.check:
        PAGE.write_text(now)
        return SAME
    before = PAGE.read_text() if PAGE.exists() else ""
    if now == before:
        return SAME
    print(
        *difflib.unified_diff(before.splitlines(), now.splitlines(), "docs/api.txt", "this tree", lineterm=""), sep="\n"
    )
    print(f"\n{DIFFERENCE}")
    return DIFFERS


if __name__ == "__main__":
    sys.exit(main())
