"""The site: it builds without a warning, loads nothing from elsewhere, and its search works from a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.browser import opened
from helpers.procs import MARKER

if TYPE_CHECKING:
    from helpers.procs import Job

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "build" / "docs" / "bin" / "python"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site. Sphinx ends with an error for each link and anchor that leads nowhere."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "environment.py", "--docs"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    folder = tmp_path_factory.mktemp("site") / "html"
    build: list[str | Path] = [TOOLS, ROOT / "tools" / "docs_site.py", folder]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert {"index.html", "readme.html", "security.html", "security-policy.html", "reference/elastic-run.html"} <= pages
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"([^\"]+)\"|<link[^>]+href=\"([^\"]+)\"|url\(([^)]+)\)"
    )
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for found in loaded.finditer(file.read_text()):
            target = next(filter(None, found.groups()))
            assert not re.match(r"\"?(https?:)?//", target), (file, target)


RESULTS = """
new Promise(resolve => {
    const look = () => {
        if (!/finished/.test(document.body.innerText)) return false;
        resolve([...document.querySelectorAll("ul.search > li > a")].map(link => link.getAttribute("href")));
        return true;
    };
    const all = {childList: true, subtree: true, characterData: true};
    if (!look()) new MutationObserver(look).observe(document.body, all);
})
"""


def test_search_works_from_a_file_and_asks_nobody(site: Path, job: Job, tmp_path: Path) -> None:
    with opened(tmp_path, {MARKER: job.id}) as browser:
        for words, page in (
            ("node 0", "what-fails.html"),
            ("exit code", "agent.html"),
            ("settle_timeout", "troubleshooting.html"),
        ):
            browser.open(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
            found = browser.call("Runtime.evaluate", expression=RESULTS, awaitPromise=True, returnByValue=True)
            pages = {link.partition("#")[0].partition("?")[0] for link in found["result"]["value"]}
            assert page in pages, words
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:"))]
    job.until_gone(*job.pids())


def test_the_generated_pages_are_what_the_program_says() -> None:
    command: list[str | Path] = [sys.executable, ROOT / "tools" / "reference.py", "--check"]
    given = {**os.environ, "PET_NNODES": "7", "ELASTIC_RS_LOG": "debug", "COLUMNS": "40"}
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert checked.returncode == 0, checked.stderr


def test_every_variable_that_is_read_is_documented() -> None:
    """Of the families of names that this package and PyTorch's launcher use."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    read = re.compile(r"\"((?:ELASTIC_RS|TORCHELASTIC|TORCH_ELASTIC|TORCH_NCCL|TORCH_GLOO|TORCH_DISABLE)_[A-Z_]+)\"")
    not_for_users = {"ELASTIC_RS_COMMIT", "ELASTIC_RS_TEST_HOLD_A_PORT"}  # of the build, and of a test
    named = set()
    for folder, ending in (("src", "rs"), ("crates/py/src", "rs"), ("python", "py")):
        for file in (ROOT / folder).rglob(f"*.{ending}"):
            named |= set(read.findall(file.read_text()))
    assert len(named) > 20
    assert {name for name in named - not_for_users if f"`{name}`" not in page} == set()
