"""The page in a real browser: it loads nothing, runs nothing, shows light and dark, and is usable by keyboard."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs._observe._page import LIMIT_BYTES, REFRESH_S, page
from helpers.browser import Page, opened
from helpers.procs import MARKER

from .test_story import Log, exited, formed, recovered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.procs import Job

EVIL = "<script>window.hacked=1</script>"


@pytest.fixture
def browser(job: Job, tmp_path: Path) -> Iterator[Page]:
    with opened(tmp_path, {MARKER: job.id}) as shown:
        yield shown
    job.until_gone(*job.pids())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write the page of a job in which all names and words are hostile."""
    log = Log()
    for line in formed().lines:
        log.lines.append(line.replace("n17.example.org", EVIL))
    recovered(log)
    node = f"{EVIL}:7"
    failed: dict[str, Any] = {
        "node": node,
        "text": EVIL,
        "data": exited(message=f'"><img src=//evil.example/x onerror={EVIL}>'),
    }
    broken = log.add("round.broken", 200.0, cause=log.add("worker.exited", 199.0, **failed), text=EVIL)
    done = log.add("round.completed", 210.0, cause=broken, round=3, data={"nodes": 2, "workers": 8})
    log.add("phase", 211.0, cause=done, round=3, node=node, data={"stop_us": 2_000_000, "start_us": 1_000_000})
    log.add(
        "node.lost", 300.0, node="javascript:1", text="</style><script>window.hacked=1</script>", data={"how": EVIL}
    )
    path = tmp_path / "job.html"
    path.write_text(page(log.events()), encoding="utf-8")
    assert path.stat().st_size <= LIMIT_BYTES
    return path


def test_names_are_text_and_nothing_is_loaded(browser: Page, file: Path) -> None:
    browser.open(file.as_uri())
    assert browser.requests() == [file.as_uri()]
    assert browser.complaints() == []
    assert browser.value("window.hacked === undefined")
    assert browser.value("document.scripts.length + document.images.length") == 0
    assert browser.value("document.body.innerText.includes('<script>window.hacked')")
    # The policy lets its own style in.
    assert browser.value("getComputedStyle(document.querySelector('h1')).fontWeight") == "700"
    assert browser.value("getComputedStyle(document.body).maxWidth") != "none"


# The contrast of two colours: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
CONTRAST = """
(() => {
  const light = of => of.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const back = light(getComputedStyle(document.body).backgroundColor);
  const ratio = of => (Math.max(light(of), back) + 0.05) / (Math.min(light(of), back) + 0.05);
  const of = (where, what) => ratio(getComputedStyle(document.querySelector(where))[what]);
  return {text: of("h1", "color"), pre: of("pre", "color"), name: of("svg text", "fill"), axis: of("text.dim", "fill"),
    failure: of(".mark.first", "stroke"), round: of("rect.round", "fill")};
})()
"""


def test_it_follows_light_and_dark_and_can_be_read_in_both(browser: Page, file: Path, tmp_path: Path) -> None:
    backs = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        browser.open(file.as_uri())
        backs[scheme] = browser.value("getComputedStyle(document.body).backgroundColor")
        for what, ratio in browser.value(CONTRAST).items():
            # WCAG's AA: 4.5 for text, 3 for what is drawn.
            assert ratio >= (3.0 if what in ("failure", "round") else 4.5), (scheme, what, ratio)
        browser.screenshot(tmp_path / f"{scheme}.png")
    assert backs["light"] == "rgb(255, 255, 255)"
    assert backs["dark"] != backs["light"]


def test_it_is_usable_by_keyboard(browser: Page, file: Path) -> None:
    browser.open(file.as_uri())
    reached: list[Any] = []
    while len(reached) < 30:
        browser.press("Tab")
        name = browser.value("document.activeElement.tagName + ':' + (document.activeElement.ariaLabel ?? '')")
        if name.startswith("BODY") or name in reached[:1]:
            break
        reached.append(name)
        if name.startswith("SUMMARY"):
            opened_before = browser.value("document.activeElement.parentElement.open")
            browser.press("Enter")
            assert browser.value("document.activeElement.parentElement.open") is not opened_before
            assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert [name for name in reached if not name.endswith(":phases of the slowest nodes")] == [
        "FIGURE:timeline of nodes and rounds",
        "FIGURE:worst nodes",
        "SUMMARY:",
        "SUMMARY:",
    ]


def test_a_narrow_window_scrolls_the_drawing_and_not_the_page(browser: Page, file: Path) -> None:
    sizes = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **sizes)
    browser.open(file.as_uri())
    assert browser.value("document.documentElement.scrollWidth") <= 400
    assert browser.value("document.querySelector('figure').scrollWidth") > 400


def test_the_served_page_refreshes_itself_until_the_reader_stops_it(browser: Page, job: Job, port: int) -> None:
    host = job.start([sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"])
    host.line("^listening on")
    options = ["--nnodes=2", "--rdzv-backend=rust-c10d", "--rdzv-conf=is_host=0", f"--rdzv-id={EVIL}"]
    options.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    node = job.start([sys.executable, "-m", "elastic_rs.run", *options, "--no-python", "sleep", "600"])
    host.line("joined")
    browser.open(f"http://127.0.0.1:{port}/")
    assert browser.value("document.querySelector('h1').innerText") == f"job {EVIL}"
    assert "WAITING" in browser.value("document.querySelector('pre').innerText")
    assert browser.value("getComputedStyle(document.body).maxWidth") != "none"
    assert browser.value("window.hacked === undefined")
    since = len(browser.events)
    browser.until("Page.frameNavigated", since=since)  # after REFRESH_S
    browser.until("Page.loadEventFired", since=since)
    browser.press("Tab")
    assert browser.value("document.activeElement.innerText") == "stop"
    since = len(browser.events)
    browser.press("Enter")
    browser.until("Page.loadEventFired", since=since)
    assert browser.value("document.querySelector('meta[http-equiv=refresh]')") is None
    assert browser.value("document.querySelector('nav').innerText") == (
        f"all runs · shown as it was; refresh every {REFRESH_S} s"
    )
    hosts = {url.split("/")[2] for url in browser.requests()}
    assert hosts == {f"127.0.0.1:{port}"}
    # Browsers ask for an icon, which there is not.
    assert all(
        "favicon.ico" in url or url.rstrip("/").endswith(f":{port}") or "?run=" in url for url in browser.requests()
    )
    for process in (node, host):
        os.kill(process.pid, signal.SIGTERM)
        process.wait()
