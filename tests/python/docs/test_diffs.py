"""The diffs of the pages: what is added is in the example that they name, which tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DIFFS = [
    (page, block)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for block in re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
]


def test_the_page_of_frameworks_has_diffs() -> None:
    assert [page.name for page, _ in DIFFS].count("frameworks.md") >= 6


@pytest.mark.parametrize("block", [block for _, block in DIFFS], ids=lambda block: block.splitlines()[0].strip(" #"))
def test_the_lines_of_a_diff_are_those_of_its_example(block: str) -> None:
    head, *lines = block.splitlines()
    file = ROOT / head.removeprefix(" # ")
    rest = file.read_text().splitlines()
    for line in lines:
        if not line.startswith("-"):
            assert line[1:] in rest, f"{file.name} has no line `{line[1:]}` there"
            rest = rest[rest.index(line[1:]) + 1 :]
        else:
            assert line[1:] not in file.read_text().splitlines()
    assert added(block) <= 10


def added(block: str) -> int:
    """Return how many lines a diff adds, beside those that it changes."""
    more, less = (sum(line.startswith(sign) for line in block.splitlines()) for sign in "+-")
    return more - less


def test_the_table_of_frameworks_has_the_number_of_lines() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    counts = {}
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if diff := re.search(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            counts[re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")] = added(diff[1])
    named = {(anchor, int(count)) for count, anchor in re.findall(r"\[(\d+) lines\]\(#([\w-]+)\)", page)}
    assert named == set(counts.items())


def test_each_example_of_a_framework_is_run() -> None:
    tests = (ROOT / "tests" / "python" / "torchrun" / "test_frameworks.py").read_text()
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for example in (ROOT / "examples" / "frameworks").glob("*.py"):
        assert f'"{example.name}"' in tests, example.name
        assert f"(../examples/frameworks/{example.name})" in page, example.name
