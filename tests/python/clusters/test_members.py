"""Machines without members at the workers' store: each node on a machine with its own network."""

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


@pytest.mark.parametrize("members", ["off", "warn", "strict"])
def test_a_machine_without_members_at_the_workers_store(job: Job, lan: Lan, tmp_path: Path, members: str) -> None:
    done = tmp_path / "done"
    machines = [lan.machine(f"node{number}") for number in range(2)]
    stranger = lan.machine("stranger")
    lan._run(machines[1].holder, f"ip addr add {SECOND}/24 dev eth0")

    def start(machine: Machine) -> Process:
        options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=rust-c10d", "--rdzv-endpoint=node0:29400"]
        conf = f"--rdzv-conf=last_call_timeout=1,store_members={members}"
        command = [sys.executable, "-m", "elastic_rs.run", *options, conf, str(WORKER), "--until", str(done)]
        return job.start(machine.container(*command), name=machine.name, env={"ELASTIC_RS_LOG": "info"})

    nodes = [start(machine) for machine in machines]
    found = [node.line(r"SUM rank=(\d) world=2 master=([0-9.]+):([0-9]+)") for node in nodes]
    master = (found[0][2], found[0][3])
    serving = next(node for node, match in zip(nodes, found, strict=True) if match[1] == "0")
    for _ in range(3):
        assert visit(stranger, master) == ("" if members == "strict" else ANSWER)
        for machine in machines:
            assert visit(machine, master) == ANSWER, "a member's machine, also if another process asks"
        assert visit(machines[1], master, SECOND) == ANSWER, "its other address"
    said = {
        "off": None,
        "warn": rf"{stranger.address}.*a connection from an address of no member was admitted|"
        rf"a connection from an address of no member was admitted.*{stranger.address}",
        "strict": r"connection rejected .*not_a_member.*store_members=off",
    }[members]
    if said:
        assert serving.line(said)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    told = sum("of no member" in line or "not_a_member" in line for line in serving.lines)
    assert told == (0 if members == "off" else 3), "members are not told of"
