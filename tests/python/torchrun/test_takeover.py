"""Jobs with a list of endpoints: the node that leads is killed or leaves, and another one leads from then on."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start

pytestmark = [pytest.mark.torchrun]
OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)
RUN = pytest.mark.parametrize("agent", ["run"], indirect=True)
CONF = "last_call_timeout=1,settle_timeout=1"
DEMO = Path(__file__).parents[3] / "examples" / "demo_node_0.py"
LISTENS = "this process may lead the job: it listens at "


@pytest.fixture
def endpoints(free_port: Callable[[], int]) -> list[str]:
    """Return three endpoints."""
    return [f"127.0.0.1:{free_port()}" for _ in range(3)]


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
