"""The page that an endpoint serves, and the thread that makes it."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from elastic_rs._observe import _served
from elastic_rs._observe._page import LIMIT_BYTES, REFRESH_S, Served, listing, page

from .test_story import formed, recovered, state

if TYPE_CHECKING:
    from helpers.procs import Job, Process

ODD = "two <b>&"


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def waiting(job: Job, port: int, run_id: str, *more: str, env: dict[str, str] | None = None) -> Process:
    """Start a node that waits for another one."""
    options = [
        "--nnodes=2",
        "--rdzv-backend=rust-c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={run_id}",
        *more,
    ]
    return job.start([sys.executable, "-m", "elastic_rs.run", *options, "--no-python", "sleep", "600"], env=env)


def end(*processes: Process) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
        process.wait()


def test_several_runs_are_listed_and_each_has_its_page(job: Job, port: int) -> None:
    host = job.start([sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"])
    host.line("^listening on")
    endpoint = f"http://127.0.0.1:{port}/"
    assert got(endpoint) == (404, "no node has come to this coordinator yet, so there is no run\n")
    nodes = [waiting(job, port, run_id, "--rdzv-conf=is_host=0") for run_id in ("one", ODD)]
    for run_id in ("one", ODD):
        host.line(rf"\[{re.escape(run_id)}\] .* joined")
    status, listed = got(endpoint)
    assert status == 200
    assert "<h1>2 runs at this coordinator</h1>" in listed
    for run_id, title in [("one", "job one"), (ODD, "job two &lt;b&gt;&amp;")]:
        link = f"?run={quote(run_id, safe='')}"
        assert f'<a href="{link}">' in listed
        status, html = got(endpoint + link)
        assert status == 200
        assert f"<h1>{title}</h1>" in html
        assert '<a href="/">all runs</a>' in html
        assert "WAITING" in html
    status, text = got(f"{endpoint}?run=three")
    assert (status, text.partition(";")[0]) == (404, "there is no run `three` here")
    end(*nodes, host)


def test_an_agent_that_hosts_the_coordinator_serves_the_page(job: Job, port: int) -> None:
    node = waiting(job, port, "job", "--rdzv-conf=is_host=1")
    node.line("joined")
    status, html = got(f"http://127.0.0.1:{port}/")
    assert status == 200
    assert "<h1>job job</h1>" in html
    end(node)


def test_without_http_there_is_no_thread_for_pages(job: Job, port: int) -> None:
    node = waiting(job, port, "job", "--rdzv-conf=is_host=1", env={"ELASTIC_RS_HTTP": "off"})
    node.line("joined")
    with pytest.raises(OSError):  # noqa: PT011 - however the connection ends
        got(f"http://127.0.0.1:{port}/")
    end(node)


class Order:
    """A page that is asked for, without a coordinator."""

    def __init__(self, *lines: str, said: str | None = None) -> None:
        self.runs = None
        self.run = (list(lines), said or json.dumps({**state(), "mono_us": 0}))
        self.still, self.named = False, False
        self.html: str | None = None

    def made(self, html: str) -> None:
        self.html = html


class Orders:
    def __init__(self, *requests: Order) -> None:
        self.left = list(requests)

    def next(self) -> Order | None:
        if not self.left:
            raise RuntimeError("elastic_rs is shut down: the interpreter is exiting")
        return self.left.pop(0)


def test_a_page_that_cannot_be_made_is_logged_once_and_the_next_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    broken, again, good = Order("no event"), Order(said="no state"), Order(*formed().lines)
    requests: Any = Orders(broken, again, good)
    with caplog.at_level(logging.INFO, "elastic_rs.observe"):
        _served._serve(requests)
    assert [record.getMessage() for record in caplog.records] == ["the page of the job could not be made"]
    assert broken.html is None
    assert again.html is None
    assert good.html is not None
    assert "<h1>job job</h1>" in good.html


def test_only_a_served_page_asks_for_itself_again() -> None:
    log = formed()
    recovered(log)
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">'
    output = {**state(), "mono_us": 200 * 10**6}
    assert refresh in page(log.events(), output, served=Served(still=False, named=False))
    assert refresh not in page(log.events(), output, served=Served(still=True, named=False))
    for html in (page(log.events(), output), page(log.events())):
        assert refresh not in html
        assert "<nav>" not in html


def test_a_run_without_events_has_a_page() -> None:
    html = page([], {**state(run="a<b"), "mono_us": 0}, served=Served(still=False, named=True))
    assert "<h1>job a&lt;b</h1><pre>No event is known yet.</pre>" in html


@pytest.mark.parametrize(
    "name",
    [lambda at: "<" * 240 + str(at), lambda at: "\U0001f600" * 60 + str(at), lambda at: '"&' * 110 + str(at)],
    ids=["markup", "wide", "quotes"],
)
def test_hostile_names_of_4000_nodes_fit(name: Any) -> None:
    log = formed()
    nodes = [f"{name(at)}:1" for at in range(4000)]
    for node in nodes[:1500]:
        log.add("node.joined", 3.0, node=node)
    for again in range(10):
        done = recovered(log, 100.0 * (again + 1), slow=nodes[again])
        for at, node in enumerate(nodes[:150]):
            data = {"stop_us": 1000 * at, "rendezvous_us": 5_000_000, "start_us": 20_000}
            log.add("phase", 100.0 * (again + 1) + 33, cause=done, round=2, node=node, data=data)
            log.add("node.lost", 100.0 * (again + 1) + 40, node=node, text=name(at) * 9, data={"how": "silence"})
    output = state(
        run="<" * 1024, state="reforming", unreachable_names=nodes, waiting_names=nodes, progress="<x" * 2000
    )
    html = page(log.events(), {**output, "mono_us": 3 * 10**9}, served=Served(still=False, named=True))
    assert len(html.encode()) <= LIMIT_BYTES
    assert "Worst nodes" in html
    assert len(listing(["<" * 1000 + str(at) for at in range(200)], 3, still=False).encode()) <= LIMIT_BYTES
