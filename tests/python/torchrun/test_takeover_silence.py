"""A job with a list of endpoints: the leader dies a while after its machine, or another listed one, fell silent."""

import signal
import time
from pathlib import Path

import pytest
from helpers.machines import Lan, Machine, lan
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start

__all__ = ["lan"]  # a fixture

CONF = "last_call_timeout=1,settle_timeout=1,rejoin_limit=0,keep_alive_interval=0.5,keep_alive_max_attempt=6"
LEADS = "this process leads the run"
SILENCE_S = 20.0
"""Longer than the lease of a voter, which is 15 s."""
TAKES_OVER_S = 30.0

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.long,
    pytest.mark.parametrize("agent", ["run"], indirect=True),
]


@pytest.fixture
def machines(lan: Lan) -> list[Machine]:
    """Return the machines of the job, of which the first three are listed."""
    return [lan.machine(f"n{number}") for number in range(4)]


@pytest.fixture
def nodes(start: Start, machines: list[Machine], tmp_path: Path) -> list[Process]:
    """Return the nodes of a job, which are in one world. The first one leads."""
    endpoint = ",".join(f"{machine.address}:29400" for machine in machines[:3])
    nodes: list[Process] = []
    for number, machine in enumerate(machines):
        at = {"under": machine.inside(), "local_addr": False, "options": [f"--local-addr={machine.address}"]}
        until = ["--until", tmp_path / "done"]
        nodes.append(start(number, *until, nnodes="1:4", endpoint=endpoint, conf=CONF, script=FAMILY, **at))
        if number < 3:
            nodes[-1].line("this process may lead the job")
    for node in nodes:
        place(node, 4)
    nodes[0].line(LEADS)
    return nodes


def check_that_another_leads(job: Job, nodes: list[Process]) -> None:
    """Kill the leader, and wait for the next one."""
    nodes[0].signal(signal.SIGKILL)
    nodes[0].wait()
    deadline = time.monotonic() + TAKES_OVER_S
    led = False
    while not led and time.monotonic() < deadline:
        time.sleep(0.1)
        led = any(LEADS in line for node in nodes[1:] for line in node.lines)
    job.kill_leftovers()
    assert led, f"nobody took over within {TAKES_OVER_S} s"


def test_another_listed_machine_has_failed(job: Job, nodes: list[Process], machines: list[Machine]) -> None:
    mark = nodes[2].mark()
    machines[1].cut()
    place(nodes[2], 3, since=mark)
    time.sleep(SILENCE_S)  # its lease ends
    check_that_another_leads(job, nodes)


@pytest.mark.parametrize("silent", [0, 1], ids=["the leader", "another"])
def test_a_listed_machine_was_cut_off_and_is_back(
    job: Job, nodes: list[Process], machines: list[Machine], silent: int
) -> None:
    machines[silent].cut()
    time.sleep(SILENCE_S)  # its lease ends, or those of the others
    marks = [node.mark() for node in nodes]
    machines[silent].mend()
    for node, mark in zip(nodes, marks, strict=True):
        place(node, 4, since=mark)
    check_that_another_leads(job, nodes)
