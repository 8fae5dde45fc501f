"""Jobs with a list of endpoints: the node that leads is killed or leaves, and another one leads from then on."""

import contextlib
import http.client
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.procs import LIMIT_S, Job, Process
from helpers.stores import until
from helpers.workers import place

from .conftest import FAMILY, Start

pytestmark = [pytest.mark.torchrun]
OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
RUN = pytest.mark.parametrize("agent", ["run"], indirect=True)
CONF = "last_call_timeout=1,settle_timeout=1"
DEMO = Path(__file__).parents[3] / "examples" / "demo_node_0.py"
LISTENS = "this process may lead the job: it listens at "


def started(start: Start, endpoints: list[str], count: int, *worker: str | Path, nnodes: str) -> list[Process]:
    """Start nodes one after another, each at the next endpoint, and wait until all are in one world."""
    nodes = []
    for number in range(count):
        nodes.append(one(start, endpoints, 2 + number, *worker, nnodes=nnodes))
        if number < len(endpoints):
            nodes[-1].line(LISTENS + re.escape(endpoints[number]))
    for node in nodes:
        place(node, count)
    return nodes


def one(start: Start, endpoints: list[str], number: int, *worker: str | Path, nnodes: str, conf: str = CONF) -> Process:
    return start(number, *worker, nnodes=nnodes, endpoint=",".join(endpoints), conf=conf, script=FAMILY)


def status(endpoint: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_rs", "status", endpoint, "--run-id=job"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@OURS
def test_the_others_go_on_when_the_leader_is_killed_and_it_comes_back(
    start: Start, endpoints: list[str], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 4, "--until", done, nnodes="2:4")
    nodes[0].line("this process leads the run")
    assert [place(node, 4)["rank"] for node in nodes] == ["0", "1", "2", "3"]
    marks = [node.mark() for node in nodes]
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    began = time.monotonic()
    for node, mark in zip(nodes[1:], marks[1:], strict=True):
        place(node, 3, since=mark)
    print(f"a world of three after {time.monotonic() - began:.2f} s")
    marks = [node.mark() for node in nodes]
    nodes[0], marks[0] = one(start, endpoints, 2, "--until", done, nnodes="2:4"), 0
    for node, mark in zip(nodes, marks, strict=True):
        place(node, 4, since=mark)
    assert not any("this process leads the run" in line for line in nodes[0].lines)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0, 0, 0]


@RUN
def test_of_two_nodes_the_other_one_goes_on(start: Start, endpoints: list[str], tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints[:2], 2, "--until", done, nnodes="1:2")
    mark = nodes[1].mark()
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    place(nodes[1], 1, since=mark)
    done.touch()
    assert nodes[1].wait() == 0


@RUN
def test_a_leader_that_is_ended_hands_over(start: Start, endpoints: list[str], tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 3, "--until", done, nnodes="2:3")
    marks = [node.mark() for node in nodes]
    nodes[0].signal(signal.SIGTERM)
    nodes[0].line("this process no longer leads the run")
    assert nodes[0].wait() == 143
    for node, mark in zip(nodes[1:], marks[1:], strict=True):
        place(node, 2, since=mark)
    assert any("this process leads the run" in line for node in nodes[1:] for line in node.lines)
    done.touch()
    assert [node.wait() for node in nodes[1:]] == [0, 0]


@RUN
def test_restarts_are_counted_over_a_change_of_the_leader(
    start: Start, endpoints: list[str], job: Job, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 3, "--until", done, nnodes="2:3")
    for _ in range(2):
        marks = [node.mark() for node in nodes]
        worker = job.workers(nodes[1])
        for pid in worker.values():
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
        for node, mark in zip(nodes, marks, strict=True):
            place(node, 3, since=mark)
    marks = [node.mark() for node in nodes]
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    for node, mark in zip(nodes[1:], marks[1:], strict=True):
        assert place(node, 2, since=mark)["restarts"] == "2"
    done.touch()
    assert [node.wait() for node in nodes[1:]] == [0, 0]


@RUN
def test_the_state_is_shown_at_each_endpoint(start: Start, endpoints: list[str], tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 3, "--until", done, nnodes="2:3")
    shown = [status(endpoint) for endpoint in [*endpoints, ",".join(endpoints)]]
    assert [it.returncode for it in shown] == [0, 0, 0, 0], shown
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    for node in nodes[1:]:
        place(node, 2)
    shown = [status(endpoint) for endpoint in [*endpoints[1:], ",".join(endpoints)]]
    assert [it.returncode for it in shown] == [0, 0, 0], shown
    done.touch()
    assert [node.wait() for node in nodes[1:]] == [0, 0]


def read(endpoint: str, path: str) -> str:
    """Ask as a browser or a monitoring system does, which follows redirects."""
    with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=60) as answer:
        return str(answer.read().decode())


@RUN
def test_page_and_metrics_are_those_of_the_leader_at_each_endpoint(
    start: Start, endpoints: list[str], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 3, "--until", done, nnodes="2:3")
    shown = [read(endpoint, "/?refresh=off") for endpoint in endpoints]
    assert all(f"{endpoints[0]} leads; if it dies, {endpoints[1]}" in page for page in shown), shown[1]
    sessions = [re.search(r"^elastic_rs_sessions 3$", read(it, "/metrics"), re.MULTILINE) for it in endpoints]
    assert all(sessions)
    with contextlib.closing(http.client.HTTPConnection(endpoints[2], timeout=60)) as connection:
        connection.request("GET", "/?run=job&refresh=off")
        answer = connection.getresponse()
        assert answer.status == 307
        assert answer.headers["Location"] == f"http://{endpoints[0]}/?run=job&refresh=off"
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    for node in nodes[1:]:
        place(node, 2)
    leads = f"{endpoints[0]} leads"
    pages = [read(endpoint, "/?refresh=off") for endpoint in endpoints[1:]]
    assert all(leads not in page and "; not there: " in page for page in pages), pages
    done.touch()
    assert [node.wait() for node in nodes[1:]] == [0, 0]


@RUN
def test_events_are_followed_from_leader_to_leader(
    start: Start, endpoints: list[str], job: Job, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 3, "--until", done, nnodes="2:3")
    command = [sys.executable, "-m", "elastic_rs", "events", endpoints[1], "--follow", "--run-id=job"]
    follower = job.start(command, name="follower")
    follower.line("round 1 .*completed|completed.* round 1|round.completed")
    mark = follower.mark()
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    for node in nodes[1:]:
        place(node, 2)
    follower.line("round.completed", since=mark)
    done.touch()
    assert [node.wait() for node in nodes[1:]] == [0, 0]
    assert follower.wait() != 0, "nobody is there any more"


def witness(job: Job, endpoints: list[str]) -> Process:
    command = [sys.executable, "-m", "elastic_rs", "store", "serve", "--run-id=job"]
    process = job.start([*command, f"--rdzv-endpoint={','.join(endpoints)}"], name="witness")
    process.line("^listening on ")
    return process


def until_shown(endpoint: str, pattern: str) -> re.Match[str]:
    """Wait until ``status`` says this of the list."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := re.search(f"list    {pattern}", shown := status(endpoint).stdout)):
        assert time.monotonic() < deadline, shown
    return found


@RUN
def test_a_store_server_is_a_witness_and_leads_when_all_nodes_have_gone(
    start: Start, endpoints: list[str], job: Job, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    nodes = started(start, endpoints, 2, "--until", done, nnodes="1:2")
    serves = witness(job, endpoints)
    first, second, third = map(re.escape, endpoints)
    until_shown(endpoints[2], f"{first} leads; if it dies, {second} or {third} leads")
    mark = nodes[1].mark()
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    place(nodes[1], 1, since=mark)
    until_shown(endpoints[2], f"({second} leads; if it dies, {third}|{third} leads; if it dies, {second}) leads")
    nodes[1].signal(signal.SIGKILL)
    nodes[1].wait()
    until_shown(endpoints[2], f"{third} leads; if it dies, NOBODY takes over")
    late = one(start, endpoints, 2, "--until", done, nnodes="1:2")
    place(late, 1)
    done.touch()
    assert late.wait() == 0
    serves.signal(signal.SIGTERM)
    assert serves.wait() == 0


@RUN
def test_a_store_server_that_leads_and_ends_costs_nobody_a_restart(
    start: Start, endpoints: list[str], job: Job, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    serves = witness(job, endpoints)
    nodes = [one(start, endpoints, 2 + number, "--until", done, nnodes="2") for number in range(2)]
    for node in nodes:
        place(node, 2)
    until_shown(endpoints[1], f"{re.escape(endpoints[0])} leads; if it dies, .* or .* leads")
    serves.signal(signal.SIGTERM)
    assert serves.wait() == 0
    until_shown(endpoints[1], f"({'|'.join(map(re.escape, endpoints[1:]))}) leads")
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert [sum("WORKER " in line for line in node.lines) for node in nodes] == [1, 1]


@RUN
@pytest.mark.long
def test_a_spare_that_leads_and_leaves_costs_nobody_a_restart(
    start: Start, endpoints: list[str], tmp_path: Path
) -> None:
    def spare(number: int) -> Process:
        node = one(start, endpoints, 2 + number, "--until", tmp_path / "done", nnodes="2")
        node.line("runs undisturbed")
        return node

    def leader() -> int:
        return endpoints.index(until_shown(",".join(endpoints), r"(\S+) leads; if it dies, 127")[1])

    def members() -> list[int]:
        """Return the spares that have taken a place."""
        return [number for number in spares if any("WORKER " in line for line in nodes[number].lines)]

    nodes = started(start, endpoints, 2, "--until", tmp_path / "done", nnodes="2")
    nodes += [spare(number) for number in (2, 3)]
    spares = [2, 3]
    while (leads := leader()) not in spares:
        nodes[leads].signal(signal.SIGKILL)
        nodes[leads].wait()
        until("a spare takes the place", lambda: bool(members()), LIMIT_S)
        spares.remove(members()[0])
        nodes[leads] = spare(leads)
        spares.append(leads)
    worlds = [sum("WORKER " in line for line in node.lines) for node in nodes]
    nodes[leads].signal(signal.SIGTERM)
    nodes[leads].wait()
    assert leader() != leads
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes if node is not nodes[leads]] == [0, 0, 0]
    assert [sum("WORKER " in line for line in node.lines) for node in nodes] == worlds


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rdzv-endpoint=a:1,b:2"], "--rdzv-endpoint needs --run-id"),
        (["--rdzv-endpoint=a:1,b:2", "--run-id=job", "--port=3"], "--port must not be given with --rdzv-endpoint"),
        (["--rdzv-endpoint=a:1", "--run-id=job"], "must be a list: for one endpoint, give --port"),
        (["--rdzv-endpoint=a:1,a:1", "--run-id=job"], "the list has the endpoint `a:1` twice"),
        (
            ["--rdzv-endpoint=203.0.113.1:1,203.0.113.2:2", "--run-id=job"],
            "`203.0.113.1` is not an address of this machine",
        ),
    ],
)
def test_lists_that_a_store_server_refuses(flags: list[str], text: str) -> None:
    command = [sys.executable, "-m", "elastic_rs", "store", "serve", *flags]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert text in refused.stderr


@RUN
def test_nodes_with_different_lists_say_both(start: Start, endpoints: list[str]) -> None:
    one_list, other_list = endpoints[:2], [endpoints[1], endpoints[2]]
    first = one(start, one_list, 2, nnodes="2", conf=f"{CONF},join_timeout=5")
    first.line(LISTENS)
    second = one(start, other_list, 3, nnodes="2", conf=f"{CONF},join_timeout=5")
    both = f"(?=.*{re.escape(','.join(one_list))})(?=.*{re.escape(','.join(other_list))})"
    first.line(both)
    for node in (first, second):
        node.signal(signal.SIGTERM)
        node.wait()


@RUN
@pytest.mark.parametrize(
    ("listed", "conf", "text"),
    [
        ("127.0.0.1:1,127.0.0.1:1", "", "the list has the endpoint `127.0.0.1:1` twice, must have each once"),
        ("127.0.0.1:0,127.0.0.1:2", "", "the port of `127.0.0.1:0` is 0"),
        (",".join(f"h{number}:1" for number in range(8)), "", "the list has 8 endpoints, must have at most 7"),
        ("127.0.0.1:1,0.0.0.0:2", "", "which means all addresses"),
        ("127.0.0.1:1,", "", "must have an endpoint before and after each comma"),
        ("192.0.2.1:1,localhost:2", "", "the list has `localhost`, which is another machine on each machine"),
        ("127.0.0.1:1,127.0.0.1:2", ",is_host=1", "is_host is `True`, must be `False` or left out with a list"),
        ("127.0.0.1:1,127.0.0.1:2", ",proof=0", "proof is `False`, must be `True` or left out with a list"),
        ("127.0.0.1:1,127.0.0.1:2", ",on_partition=continue", "on_partition is `continue`, must be `stop`"),
    ],
)
def test_lists_that_are_refused(start: Start, listed: str, conf: str, text: str) -> None:
    node = start(2, nnodes="2", endpoint=listed, conf=CONF + conf)
    node.line(re.escape(text))
    assert node.wait() != 0


@pytest.mark.long
def test_the_demo_of_dying_leaders_trains_on(job: Job) -> None:
    demo = job.start([sys.executable, str(DEMO)], name="demo")
    assert demo.wait() == 0
    assert "\n".join(demo.lines).count("  ok  ") == 4
