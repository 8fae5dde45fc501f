"""Write the licences of all that is linked into the wheel's library: its crates, and Rust's standard library.

    python tools/licences.py FILE

The crates are those that cargo compiles into the library for any target of ``wheels.py``, procedural macros included.
Each one's own licence files are copied; crates with the same text stand above one copy of it. A crate without a licence
file gets the text of ``tools/licences`` that it names. A licence that is not on ``deny.toml``'s list is
named by ``cargo deny``, and not here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = [f"{machine}-unknown-linux-{libc}" for machine in ("x86_64", "aarch64") for libc in ("gnu", "musl")]
BINDING = "elastic_rs_py"
OWN = {"elastic_rs", BINDING}
FILES = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|UNLICENSE|COPYRIGHT)([-._].*)?", re.IGNORECASE)
TITLE = "Licences of the software that is linked into elastic_rs"


def main(file: Path) -> int:
    text = document(crates())
    file.write_text(text)
    return 0


def crates(targets: Sequence[str] = TARGETS) -> list[dict[str, Any]]:
    """Return cargo's words on each crate that is linked for these targets, sorted by name and version."""
    found = needed(ROOT, {None}, targets)
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def needed(root: Path, kinds: set[str | None], targets: Sequence[str] = TARGETS) -> list[dict[str, Any]]:
    """Return cargo's words on each crate that the binding depends on, for any of these targets.

    Args:
        root: the workspace.
        kinds: which dependencies count: None is what the library is compiled with, ``build`` what build scripts are.
        targets: Rust's names of the platforms.
    """
    found: dict[str, dict[str, Any]] = {}
    for target in targets:
        command = ["cargo", "metadata", "--format-version=1", f"--filter-platform={target}"]
        metadata = json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
        packages = {package["id"]: package for package in metadata["packages"]}
        edges = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
        todo = [name for name, package in packages.items() if package["name"] == BINDING]
        seen = set(todo)
        while todo:
            for dependency in edges[todo.pop()]:
                counts = any(kind["kind"] in kinds for kind in dependency["dep_kinds"])
                if counts and dependency["pkg"] not in seen:
                    seen.add(dependency["pkg"])
                    todo.append(dependency["pkg"])
        found |= {name: packages[name] for name in seen}
    return [package for package in found.values() if package["name"] not in OWN]


def document(packages: list[dict[str, Any]]) -> str:
    texts: dict[str, list[str]] = defaultdict(list)
    without = []
    for package in packages:
        folder = Path(package["manifest_path"]).parent
        files = sorted(path for path in folder.iterdir() if path.is_file() and FILES.fullmatch(path.name))
        for path in files:
            texts[tidy(path.read_text(errors="replace"))].append(title(package))
        if not files:
            without.append(package)
    standard = {name: text_of(name) for name in ("Apache-2.0", "MIT")}
    for package in without:
        chosen = next((name for name in standard if name in str(package["license"])), None)
        if chosen is None:
            sys.exit(
                f"error: {title(package)} ({package['license']}) has no licence file; put the text into tools/licences"
            )
        texts[standard[chosen]].append(f"{title(package)}, by {', '.join(package['authors']) or 'its authors'}")
    library = f"the standard library of Rust {rust_version()} (MIT or Apache-2.0), by The Rust Project Developers"
    texts[standard["Apache-2.0"]].append(library)
    lines = [TITLE, "=" * len(TITLE), "", "Each text stands below all that it is for.", ""]
    for text, names in sorted(texts.items(), key=lambda item: (item[1][0], item[0])):
        lines += ["-" * 80, *sorted({f"- {name}" for name in names}), "", text, ""]
    return "\n".join(lines)


def title(package: dict[str, Any]) -> str:
    return f"{package['name']} {package['version']} ({package['license']})"


def text_of(name: str) -> str:
    """Return the text of a common licence, which stands in the tree."""
    return tidy((ROOT / "tools" / "licences" / f"{name}.txt").read_text())


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").strip("\n").split("\n"))


def rust_version() -> str:
    output = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout
    return output.split()[1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/licences.py FILE")
    try:
        sys.exit(main(Path(sys.argv[1])))
    except subprocess.CalledProcessError as failure:
        sys.exit(f"error: `{' '.join(failure.cmd[:2])}` failed with exit code {failure.returncode}: {failure.stderr}")
