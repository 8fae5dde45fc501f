"""Machines without members at the workers' store: each node on a machine with its own network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.machines import Lan, Machine
from helpers.procs import Job, Process

from .conftest import WORKER

# A second address of a member's card, from which its workers might connect.
SECOND = "10.98.0.77"
ANSWER = "01020304"
LIMIT_S = 60.0
# VALIDATE and PING, and the answer: from this address, if one is given.
VISIT = """
import socket, sys
host, port, *source = sys.argv[1:]
source = (source[0], 0) if source else None
with socket.create_connection((host, int(port)), timeout=30, source_address=source) as store:
    store.sendall(bytes.fromhex("00cef7853c0d01020304"))
    try:
        print(store.recv(4).hex())
    except ConnectionResetError:
        print()
"""


def visit(machine: Machine, master: tuple[str, str], *source: str) -> str:
    """Return what the workers' store answers a process on this machine, in hexadecimal digits."""
    command = [*machine.inside(), sys.executable, "-c", VISIT, *master, *source]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()


def start(job: Job, machines: list[Machine], members: str, done: Path) -> list[Process]:
    """Start a job with a worker on each machine, which runs until the file exists."""
    options = ["--nproc-per-node=1", "--rdzv-backend=rust-c10d", f"--rdzv-endpoint={machines[0].name}:29400"]
    size = [f"--nnodes={len(machines)}", f"--rdzv-conf=store_members={members}"]
    command = [sys.executable, "-m", "elastic_rs.run", *options, *size, str(WORKER), "--until", str(done)]
    env = {"ELASTIC_RS_LOG": "info"}
    return [job.start(machine.container(*command), name=machine.name, env=env) for machine in machines]


def met(nodes: list[Process]) -> tuple[Process, tuple[str, str]]:
    """Wait until the workers of all nodes have met in their store. Returns the node that serves it, and where it is."""
    found = [node.line(rf"SUM rank=(\d+) world={len(nodes)} master=([0-9.]+):([0-9]+)") for node in nodes]
    ranks = [int(match[1]) for match in found]
    assert sorted(ranks) == [*range(len(nodes))]
    [master] = {(match[2], match[3]) for match in found}
    return nodes[ranks.index(0)], master


def rejections(serving: Process) -> list[str]:
    """Return what this node has said of connections from addresses of no member."""
    return [line for line in serving.lines if re.search("that no node of the job has|not_a_member", line)]


@pytest.mark.parametrize("members", ["off", "warn", "strict"])
def test_a_machine_without_members_at_the_workers_store(job: Job, lan: Lan, tmp_path: Path, members: str) -> None:
    done = tmp_path / "done"
    machines = [lan.machine(f"node{number}") for number in range(2)]
    stranger = lan.machine("stranger")
    lan.ip(machines[1].holder, f"addr add {SECOND}/24 dev eth0")
    nodes = start(job, machines, members, done)
    serving, master = met(nodes)
    for _ in range(3):
        assert visit(stranger, master) == ("" if members == "strict" else ANSWER)
        for machine in machines:
            assert visit(machine, master) == ANSWER, "a member's machine, also if another process asks"
        assert visit(machines[1], master, SECOND) == ANSWER, "its other address"
    said = {
        "off": None,
        "warn": rf"{stranger.address}.*accepted a connection from an address that no node of the job has|"
        rf"accepted a connection from an address that no node of the job has.*{stranger.address}",
        "strict": r"connection rejected .*not_a_member.*store_members=off",
    }[members]
    if said:
        assert serving.line(said)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert len(rejections(serving)) == (0 if members == "off" else 3), "members are not logged"


def test_a_machine_without_members_is_closed_and_64_members_on_as_many_machines_join(
    job: Job, lan: Lan, tmp_path: Path
) -> None:
    """Each worker reaches the store from the address of its own machine, and waits there for the other workers."""
    done = tmp_path / "done"
    machines = [lan.machine(f"node{number}") for number in range(64)]
    stranger = lan.machine("stranger")
    nodes = start(job, machines, "strict", done)
    serving, master = met(nodes)
    assert visit(stranger, master) == ""
    assert visit(machines[-1], master) == ANSWER, "the same visit from a member's machine"
    assert serving.line("connection rejected .*not_a_member.*64 addresses are known")
    done.touch()
    assert [node.wait() for node in nodes] == [0] * 64
    assert len(rejections(serving)) == 1, "no member was closed"
