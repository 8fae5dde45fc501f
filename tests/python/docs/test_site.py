"""The site: it builds without a warning, loads nothing from elsewhere, and its search works from a file."""

from __future__ import annotations

import os
import re
import shutil
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
def tools() -> Path:
    """Return the interpreter that has Sphinx."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "environment.py", "--docs"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return TOOLS


@pytest.fixture(scope="module")
def site(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site. Sphinx ends with an error for each link and anchor that leads nowhere."""
    folder = tmp_path_factory.mktemp("site") / "html"
    build: list[str | Path] = [tools, ROOT / "tools" / "docs_site.py", folder]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def git(repository: Path, *words: str) -> None:
    own = ["-c", "user.name=a test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *words], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def small_repository(folder: Path) -> None:
    """Make a repository with the tool of this one, few pages, and two tags that no release has."""
    for name in ("tools/docs_site.py", "docs/site/conf.py", "docs/site/_static", "docs/site/_templates"):
        there = folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, there)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "docs" / "decisions").mkdir()
    every = ["readme", "architecture", "changelog", "contributing", "security-policy", "questions", "decisions/index"]
    for page in (
        "README",
        "ARCHITECTURE",
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
        "docs/README",
        "docs/decisions/README",
    ):
        (folder / f"{page}.md").write_text(f"# {page}\n")
    (folder / "docs" / "decisions" / "0001-first.md").write_text("# First\n")
    git(folder, "init", "--quiet")
    for version, pages in (("98.0.0", ["old"]), ("99.0.0", ["old", "new"])):
        for page in pages:
            (folder / "docs" / f"{page}.md").write_text(f"# The page {page} of {version}\n")
        toctree = "\n".join([*every, *pages])
        (folder / "docs" / "site" / "index.md").write_text(f"# Start\n\n```{{toctree}}\n{toctree}\n```\n")
        (folder / "Cargo.toml").write_text(f'[workspace.package]\nversion = "{version}"\n')
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", version)
        git(folder, "tag", f"v{version}")


def test_a_site_of_two_releases_leads_from_each_page_to_that_of_the_other_release(tools: Path, tmp_path: Path) -> None:
    small_repository(tmp_path / "repository")
    out = tmp_path / "html"
    build: list[str | Path] = [tools, tmp_path / "repository" / "tools" / "docs_site.py", out]
    built = subprocess.run([*build, "v99.0.0", "v98.0.0"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert 'url=v99.0.0/index.html"' in (out / "index.html").read_text()
    for version in ("98.0.0", "99.0.0"):
        for page in ("old.html", "decisions/index.html"):
            text = (out / f"v{version}" / page).read_text()
            (listed,) = re.findall(r'<details class="versions">.*?</details>', text, re.DOTALL)
            assert f"release {version}" in listed
            up = "../" * (page.count("/") + 1)
            links = [os.path.normpath(link) for link in re.findall(r'href="([^"]+)"', listed)]
            assert links == [f"{up}v99.0.0/{page}", f"{up}v98.0.0/{page}"]
            assert all((out / f"v{version}" / page).parent.joinpath(link).exists() for link in links)
    assert "The page old of 98.0.0" in (out / "v98.0.0" / "old.html").read_text()
    only_new = (out / "v99.0.0" / "new.html").read_text()
    assert '../v98.0.0/index.html"' in only_new, "the other release has no such page"

    unknown = subprocess.run([*build, "v97.0.0"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 1
    assert "error: v97.0.0 is no tag of this repository" in unknown.stderr


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
            ("exit code", "reference/exit-codes.html"),
            ("settle_timeout", "reference/time-limits.html"),
            ("death signal", "reference/log-messages.html"),
        ):
            browser.open(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
            found = browser.call("Runtime.evaluate", expression=RESULTS, awaitPromise=True, returnByValue=True)
            pages = {link.partition("#")[0].partition("?")[0] for link in found["result"]["value"]}
            assert page in pages, words
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:"))]
    job.until_gone(*job.pids())


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_screen(site: Path, job: Job, tmp_path: Path, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    with opened(tmp_path, {MARKER: job.id}) as browser:
        browser.call("Emulation.setDeviceMetricsOverride", **screen)
        for page in ("index", "monitor", "what-fails", "reference/time-limits", "reference/log-messages"):
            browser.open((site / f"{page}.html").as_uri())
            wide = browser.call("Runtime.evaluate", expression="document.documentElement.scrollWidth")
            assert wide["result"]["value"] <= width, page
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
    not_for_users = {"ELASTIC_RS_COMMIT", "ELASTIC_RS_TEST_HOLD_A_PORT", "ELASTIC_RS_WRITE"}  # of the build, of tests
    named = set()
    for folder, ending in (("src", "rs"), ("crates/py/src", "rs"), ("python", "py")):
        for file in (ROOT / folder).rglob(f"*.{ending}"):
            named |= set(read.findall(file.read_text()))
    assert len(named) > 20
    assert {name for name in named - not_for_users if f"`{name}`" not in page} == set()
