"""Print how many lines of code the product has, by room: ``python tools/count_lines.py [COMMIT]``.

Lines that are not blank, with comments. Rust in ``src`` and ``crates``, without the simulator and without what is
compiled for tests alone; Python in ``python``, without the stub, which is generated.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
FOR_TESTS = re.compile(r"^( *)#\[cfg\((?:all\()?test\b.*\]\n(?: *#\[.*\]\n)*", re.MULTILINE)
MODULE = re.compile(r"(?:pub(?:\([^)]*\))? )?mod (\w+);")


def main(commit: str) -> None:
    sources = read(commit)
    counts: Counter[tuple[str, str]] = Counter()
    rust = {path: text for path, text in sources.items() if path.suffix == ".rs"}
    ignored = {path for file, text in rust.items() for path in only_for_tests(file, text, rust)}
    for path, text in sources.items():
        if path not in ignored:
            kept = without_tests(text) if path.suffix == ".rs" else text
            counts["Rust" if path.suffix == ".rs" else "Python", room(path)] += lines(kept)
    for language in ("Rust", "Python"):
        print(f"{language:40} {sum(count for (of, _), count in counts.items() if of == language):6}")
        for (of, name), count in sorted(counts.items()):
            if of == language:
                print(f"    {name:36} {count:6}")


def read(commit: str) -> dict[PurePosixPath, str]:
    """Return the product's files as they are in that commit, without the simulator and the stub."""

    def git(*args: str, given: str = "") -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, "src", "crates", "python").splitlines()
    paths = [PurePosixPath(name) for name in names if name.endswith((".rs", ".py"))]
    return {path: git("show", f"{commit}:{path}") for path in paths if "sim" not in path.parts}


def only_for_tests(file: PurePosixPath, text: str, there: dict[PurePosixPath, str]) -> set[PurePosixPath]:
    """Return the files of modules that this one declares for tests alone, and all below them."""
    folder = file.parent if file.stem in {"mod", "lib", "main"} else file.with_suffix("")
    names = [found[1] for it in FOR_TESTS.finditer(text) if (found := MODULE.match(text[it.end() :].lstrip()))]
    roots = [folder / name for name in names]
    return {path for path in there for root in roots if path == root.with_suffix(".rs") or root in path.parents}


def without_tests(text: str) -> str:
    """Leave out each item behind ``#[cfg(test)]``: to the line that closes it, in rustfmt's layout."""
    while (it := FOR_TESTS.search(text)) is not None:
        begin, first_end = it.start(), text.find("\n", it.end()) + 1 or len(text)
        end = first_end
        if text[it.end() : first_end].rstrip().endswith(("{", "(", "[")):
            closing = re.compile(rf"^{it[1]}[}})\]].*\n", re.MULTILINE).search(text, first_end)
            end = closing.end() if closing else len(text)
        text = text[:begin] + text[end:]
    return text


def room(path: PurePosixPath) -> str:
    inside = path.parts[1:] if path.parts[0] == "src" else path.parts[2:]
    return str(PurePosixPath(path.parts[0], *(() if path.parts[0] == "src" else path.parts[1:2]), *inside[:-1][:1]))


def lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
