"""Build the site: every page of ``docs/`` and of the root, as static HTML that needs no network.

    python tools/docs_site.py FOLDER     # `make docs`: build/site

The pages stay where GitHub shows them, with links between files. Here they are laid out as the site has them, and links
to files that are no pages (sources, examples) lead to the repository, at the release's tag. Sphinx ends with an error
for each link and anchor that leads nowhere, and each page that is in no list. It runs with the environment that
``tools/environment.py --docs`` makes.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "site"
DECISIONS = DOCS / "decisions" / "README.md"
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the root. ``docs/README.md`` lists the pages by question, so on the site it is ``questions``."""
ALL_BELOW = "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
"""For Sphinx, which wants every page in a list of its own kind."""
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\]\[]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def main(words: list[str]) -> int:
    (folder,) = words
    out = Path(folder).resolve()
    source = out.with_name(f"{out.name}-source")
    for old in (out, source):
        shutil.rmtree(old, ignore_errors=True)
    lay_out(source)
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto"]
    folders: list[str | Path] = ["--conf-dir", SITE, "--doctree-dir", source / ".doctrees", source, out]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, *folders], check=False).returncode


def lay_out(source: Path) -> None:
    """Write every page to its path on the site, with links between the pages of the site."""
    homes = pages()
    for page, home in homes.items():
        there = source / home
        there.parent.mkdir(parents=True, exist_ok=True)
        text = linked(page, home, homes)
        if page.parent == DECISIONS.parent:  # they use every word, and answer no user's question
            text = f"---\nnosearch: true\n---\n{text}"
        there.write_text(text + (ALL_BELOW if page == DECISIONS else ""))
    for picture in [*DOCS.glob("*.svg"), *DOCS.glob("*.png")]:
        shutil.copy(picture, source / picture.name)


def pages() -> dict[Path, Path]:
    """Return where each page is on the site."""
    homes = {ROOT / name: Path(name.lower()) for name in TOP}
    homes[ROOT / "SECURITY.md"] = Path("security-policy.md")
    homes |= {page: page.relative_to(DOCS) for page in DOCS.rglob("*.md") if SITE not in page.parents}
    homes |= {page: page.relative_to(SITE) for page in SITE.rglob("*.md")}
    homes[DOCS / "README.md"] = Path("questions.md")
    homes[DECISIONS] = Path("decisions/index.md")
    return homes


def linked(page: Path, home: Path, homes: dict[Path, Path]) -> str:
    """Return a page's text with links as the site has them."""

    def link(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = (page.parent / path).resolve()
        if SITE in page.parents and not file.exists():
            file = (
                DOCS / page.relative_to(SITE).parent / path
            ).resolve()  # pages of the site stand beside those of docs
        if file in homes:
            up = "../" * (len(home.parts) - 1)
            return f"[{text}]({up}{homes[file]}{mark}{anchor})"
        return f"[{text}]({repository()}/{file.relative_to(ROOT)}{mark}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.lstrip().startswith("```") else LINK.sub(link, part) for part in parts)


@functools.cache
def repository() -> str:
    """Return where the repository shows the files of this release."""
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    return f"{url}/blob/v{version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
