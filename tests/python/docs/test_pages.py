"""Documentation pages: links and anchors exist, and ARCHITECTURE.md names every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from elastic_rs import _exit_codes

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = ROOT / "docs" / "decisions"
MAP = ROOT / "ARCHITECTURE.md"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_targets_of_links_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_decisions_are_numbered_once_and_listed() -> None:
    files = sorted(DECISIONS.glob("[0-9]*.md"))
    index, _, removed = (DECISIONS / "README.md").read_text().partition("\n## Removed\n")
    numbers = [file.name[:4] for file in files]
    numbers += [f"{int(number):04}" for number in re.findall(r"^\| (\d+) \|", removed, re.MULTILINE)]
    assert len(numbers) == len(set(numbers)) > 100
    for file in files:
        title, *_ = file.read_text().splitlines()
        row = re.escape(f"| {int(file.name[:4])} | [{title.removeprefix('# ')}")
        assert re.search(rf"^{row}\]\({re.escape(file.name)}\) \|$", index, re.MULTILINE), file.name
        assert {"## Context", "## Decision"} <= set(file.read_text().splitlines()), file.name


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "README.md").read_text()))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= listed, pages - listed


def test_the_map_is_short_and_names_what_exists() -> None:
    text = MAP.read_text()
    assert len(text.splitlines()) <= 130
    named = set(re.findall(r"`((?:src|crates|python|tests|tools)/[\w./-]+)`", text))
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists() or (ROOT / f"{name}.rs").exists(), name


def test_the_map_has_every_room() -> None:
    text = MAP.read_text()
    rooms = {path.stem for path in (ROOT / "src").iterdir()} - {"lib"}
    for room in sorted(rooms):
        assert f"`src/{room}" in text, room


def test_promises_name_tests_that_exist() -> None:
    """``docs/security.md`` and ``SECURITY.md`` name, below their promises, the tests that show them."""
    pages = (ROOT / "docs" / "security.md", ROOT / "SECURITY.md")
    named = set(re.findall(r"`(?:\w+::)+(\w+)`", "".join(page.read_text() for page in pages)))
    assert len(named) >= 60
    folders = [(ROOT / name, ending) for name in ("src", "crates", "tests") for ending in ("rs", "py")]
    sources = "\n".join(file.read_text() for folder, ending in folders for file in folder.rglob(f"*.{ending}"))
    there = set(re.findall(r"\b(?:fn|def) (\w+)", sources))
    assert named <= there, named - there


def test_the_page_of_exit_codes_has_each_class() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([a-z ]+) \|", text, re.MULTILINE)
    assert dict(rows) == {str(code.value): name for name, code in _exit_codes._OF_CLASSES.items()}
