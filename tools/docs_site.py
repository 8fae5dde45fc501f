"""Build the site: every page of ``docs/`` and of the root, as static HTML that needs no network.

    python tools/docs_site.py FOLDER              # `make docs`: build/site, of this tree
    python tools/docs_site.py FOLDER v0.3.0 …     # `make docs DOCS_VERSIONS=…`: a folder for each tag of git

The pages stay where GitHub shows them, with links between files. Here they are laid out as the site has them. Each
file of ``examples`` is a page of its own, and links to other files that are no pages lead to the repository, at the
release's tag. A link whose text is a page's file name has the page's title instead. Sphinx ends with an error for each
link and anchor that leads nowhere, and each page that is in no list. It runs with the environment that
``tools/environment.py --docs`` makes.

With tags, ``FOLDER/index.html`` leads to the first one, and each page has a list of the versions. It leads to the same
page of another version, if that has it. Pages are those of the tag, laid out and built by this tree.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "site"
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the root. ``docs/README.md`` lists the pages by question, so on the site it is ``questions``."""
ALL_BELOW = "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
"""For Sphinx, which wants every page in a list of its own kind."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".sh": "bash", "": "bash"}
"""Files of ``examples`` that the site shows, by the ends of their names."""
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\]\[]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def main(words: list[str]) -> int:
    folder, *tags = words
    out = Path(folder).resolve()
    source = out.with_name(f"{out.name}-source")
    for old in (out, source):
        shutil.rmtree(old, ignore_errors=True)
    if not tags:
        tree = Tree(ROOT)
        tree.lay_out(source)
        return build(tree, source, out, [])
    trees = [Tree(checked_out(tag, source / tag / "tree")) for tag in tags]
    versions: list[dict[str, object]] = []
    for tag, tree in zip(tags, trees, strict=True):
        tree.lay_out(source / tag / "pages")
        pages = sorted(str(home.with_suffix("")) for home in tree.pages.values())
        versions.append({"name": tree.version, "folder": tag, "pages": pages})
    for tag, tree in zip(tags, trees, strict=True):
        if code := build(tree, source / tag / "pages", out / tag, versions):
            return code
    first = f"{tags[0]}/index.html"
    (out / "index.html").write_text(
        f'<!DOCTYPE html><title>elastic_rs</title><meta http-equiv="refresh" content="0; url={first}">'
        f'<a href="{first}">elastic_rs {trees[0].version}</a>\n'
    )
    return 0


def checked_out(tag: str, folder: Path) -> Path:
    """Return the folder, with the files of the tag in it."""
    packed = subprocess.run(["git", "-C", ROOT, "archive", tag], capture_output=True, check=False)
    if packed.returncode:
        sys.exit(f"error: {tag} is no tag of this repository: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    if not (folder / "docs" / "site" / "index.md").exists():
        sys.exit(f"error: {tag} has no site: the first release with docs/site is 0.2.0")
    return folder


def build(tree: Tree, source: Path, out: Path, versions: list[dict[str, object]]) -> int:
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto"]
    folders: list[str | Path] = ["--conf-dir", SITE, "--doctree-dir", source / ".doctrees", source, out]
    told = {"ELASTIC_RS_DOCS_VERSION": tree.version, "ELASTIC_RS_DOCS_VERSIONS": json.dumps(versions)}
    command: list[str | Path] = [sys.executable, "-m", "sphinx", *options, *folders]
    return subprocess.run(command, check=False, env={**os.environ, **told}).returncode


@dataclass(frozen=True)
class Tree:
    """The pages of one checkout."""

    root: Path

    @functools.cached_property
    def version(self) -> str:
        version = tomllib.loads((self.root / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        return str(version)

    @functools.cached_property
    def repository(self) -> str:
        """Where the repository shows the files of this release."""
        url = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
        return f"{url}/blob/v{self.version}"

    @functools.cached_property
    def pages(self) -> dict[Path, Path]:
        """Where each page is on the site."""
        docs, site = self.root / "docs", self.root / "docs" / "site"
        homes = {self.root / name: Path(name.lower()) for name in TOP}
        homes[self.root / "SECURITY.md"] = Path("security-policy.md")
        homes |= {page: page.relative_to(docs) for page in docs.rglob("*.md") if site not in page.parents}
        homes |= {page: page.relative_to(site) for page in site.rglob("*.md")}
        homes[docs / "README.md"] = Path("questions.md")
        homes[docs / "decisions" / "README.md"] = Path("decisions/index.md")
        return homes

    @functools.cached_property
    def files(self) -> dict[Path, Path]:
        """Where other files are on the site that pages show or link to."""
        docs = self.root / "docs"
        return {file: file.relative_to(docs) for ending in ("svg", "png", "json") for file in docs.rglob(f"*.{ending}")}

    @functools.cached_property
    def examples(self) -> dict[Path, Path]:
        """Where each file of ``examples`` is shown on the site."""
        found = (file for file in (self.root / "examples").rglob("*") if file.suffix in LANGUAGES and file.is_file())
        return {file: Path(f"{file.relative_to(self.root)}.md") for file in found}

    def lay_out(self, source: Path) -> None:
        """Write every page to its path on the site, with links between the pages of the site."""
        decisions = self.root / "docs" / "decisions"
        for page, home in self.pages.items():
            there = source / home
            there.parent.mkdir(parents=True, exist_ok=True)
            text = self.linked(page, home)
            if page.parent == decisions:  # they use every word, and answer no user's question
                text = f"---\nnosearch: true\n---\n{text}"
            there.write_text(text + (ALL_BELOW if page == decisions / "README.md" else ""))
        for file, home in self.examples.items():
            (source / home).parent.mkdir(parents=True, exist_ok=True)
            (source / home).write_text(self.example(file))
        for file, home in self.files.items():
            (source / home).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, source / home)

    def example(self, file: Path) -> str:
        """Return the page that shows a file."""
        name, content = file.relative_to(self.root), file.read_text()
        return (
            f"---\norphan: true\n---\n# {name}\n\n"
            f"The whole file, to copy. It is also [in the repository]({self.repository}/{name}).\n\n"
            f"`````{{code-block}} {LANGUAGES[file.suffix]}\n{content.rstrip()}\n`````\n"
        )

    def title(self, page: Path) -> str:
        """Return the first title of a page."""
        found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
        return found[1] if found else page.name

    def linked(self, page: Path, home: Path) -> str:
        """Return a page's text with links as the site has them."""
        docs, site = self.root / "docs", self.root / "docs" / "site"

        def link(match: re.Match[str]) -> str:
            text, target = match["text"], match["target"]
            path, mark, anchor = target.partition("#")
            if not path or re.match(r"[a-z]+:", target):
                return match[0]
            file = (page.parent / path).resolve()
            if site in page.parents and not file.exists():
                file = (docs / page.relative_to(site).parent / path).resolve()  # they stand beside the pages of docs
            if file in self.pages and text.strip("`") in (file.name, path):
                text = self.title(file)
            there = self.pages.get(file) or self.files.get(file) or self.examples.get(file)
            if there is not None:
                up = "../" * (len(home.parts) - 1)
                return f"[{text}]({up}{there}{mark}{anchor})"
            return f"[{text}]({self.repository}/{file.relative_to(self.root)}{mark}{anchor})"

        parts = re.split(r"(^ *```.*?^ *```$)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        return "".join(part if part.lstrip().startswith("```") else LINK.sub(link, part) for part in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
