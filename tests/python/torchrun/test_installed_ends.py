"""Ends of jobs over PyTorch's ``c10d`` backend after ``install()``: one node's process holds what all nodes read.

PyTorch's ``test_launch_elastic_multiple_agents`` (test/distributed/launcher/test_run.py) is the first of them.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from elastic_rs import C10dRendezvousBackend, TCPStore
from elastic_rs.errors import RendezvousConnectionError
from elastic_rs.rendezvous._backend_thread import is_gone
from elastic_rs.rendezvous.dynamic_rendezvous import _may_serve
from helpers.procs import Job, Process

INSTALLED = "import elastic_rs, sys; elastic_rs.install(); from torch.distributed.run import main; main(sys.argv[1:])"
# Two nodes of one program, as in PyTorch's test.
FORKED = """
import multiprocessing, sys
import elastic_rs
elastic_rs.install()
from torch.distributed.run import main
other = multiprocessing.get_context("fork").Process(target=main, args=(sys.argv[1:],))
other.start()
try:
    main(sys.argv[1:])
finally:
    other.join()
    sys.stdout.write(f"the other ended with {other.exitcode}\\n")
"""
ALONE = r"ends without the others: the backend has been gone for 1\d"
Nodes = Callable[..., Process]
Two = Callable[[str, str], tuple[Process, Process]]


@pytest.fixture
def node(job: Job, port: int) -> Nodes:
    """Return a function that starts one of two nodes whose only worker is a shell that runs ``script``."""

    def start(name: str, script: str, *, program: str = INSTALLED, conf: str = "timeout=5") -> Process:
        options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
        options += [f"--rdzv-conf={conf}", "--rdzv-id=ends", "--max-restarts=0", "--monitor-interval=1"]
        return job.start([sys.executable, "-c", program, *options, "--no-python", "sh", "-c", script], name=name)

    return start


@pytest.fixture
def two(node: Nodes) -> Two:
    """Return a function that starts the node that holds the store, and the other one, each with its script."""

    def start(host: str, other: str) -> tuple[Process, Process]:
        return node("host", host, conf="is_host=1"), node("other", other, conf="is_host=0")

    return start


def waits_for(file: Path) -> str:
    return f"until test -e {file}; do sleep 0.1; done"


@pytest.mark.parametrize("program", [INSTALLED, FORKED], ids=["two programs", "one program that forks"])
def test_both_nodes_of_a_job_that_succeeds_at_once_end(node: Nodes, program: str) -> None:
    nodes = [node("A", "exit 0", program=program)]
    if program == INSTALLED:
        nodes.append(node("B", "exit 0"))
    assert [it.wait() for it in nodes] == [0] * len(nodes)
    for it in nodes:
        assert not any(
            "this node has finished, and has waited" in line or "ends without" in line for line in it.lines
        ), it.lines
    if program == FORKED:
        nodes[0].line("the other ended with 0")


def test_a_failure_for_good_on_the_node_that_holds_the_store_ends_the_other_with_its_cause(
    two: Two, tmp_path: Path
) -> None:
    host, other = two(f"{waits_for(tmp_path / 'go')}; exit 3", "echo runs; sleep 600")
    other.line("runs")
    (tmp_path / "go").touch()
    assert [host.wait(), other.wait()] == [1, 1]
    assert any("exit code 3" in line or "exitcode  : 3" in line for line in other.lines), other.lines
    assert not any("ends without" in line for line in other.lines), other.lines


def test_a_node_that_has_finished_ends_well_when_the_node_that_holds_the_store_is_killed(two: Two) -> None:
    host, other = two("echo runs; sleep 600", "echo ends")
    host.line("runs")
    other.line("ends")
    host.signal(signal.SIGKILL)
    host.wait()
    assert other.wait() == 0
    (line,) = (line for line in other.lines if "ends without the others" in line or "failed to shutdown" in line)
    assert re.search(ALONE, line)


def test_a_worker_that_fails_after_the_node_with_the_store_died_is_the_reported_failure(
    two: Two, tmp_path: Path
) -> None:
    host, other = two("sleep 600", f"echo runs; {waits_for(tmp_path / 'go')}; exit 3")
    other.line("runs")
    host.signal(signal.SIGKILL)
    host.wait()
    (tmp_path / "go").touch()
    assert other.wait() == 1
    other.line(ALONE)
    other.line(r"exitcode  : 3")
    assert not any("failed to shutdown" in line for line in other.lines), other.lines


def test_only_a_store_that_may_serve_keeps_its_process_for_the_others(tmp_path: Path) -> None:
    ours = TCPStore("127.0.0.1", 0, is_master=True)
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", ours.port, is_master=False)
    file = dist.FileStore(str(tmp_path / "store"))
    inner = dist.PrefixStore("a", dist.PrefixStore("b", ours))
    stores = (ours, client, theirs, file, inner, dist.PrefixStore("a", client))
    backends = [C10dRendezvousBackend(store, "job") for store in stores]
    assert [_may_serve(backend) for backend in backends] == [True, False, True, False, True, False]
    assert _may_serve(SimpleNamespace(name="mine"))  # type: ignore[arg-type]


@pytest.mark.parametrize("theirs", [False, True])
def test_a_store_that_has_ended_is_distinguished_from_a_silent_one(job: Job, theirs: bool) -> None:
    """Also if the run id speaks of a time-out, which the errors of our store name."""
    program = "import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True); print(s.port)\n"
    server = job.start([sys.executable, "-c", program + "time.sleep(600)"], name="server")
    port = int(server.line(r"^\d+$")[0])
    store = (dist.TCPStore if theirs else TCPStore)("127.0.0.1", port)
    backend = C10dRendezvousBackend(store, "timeout-sweep")
    with pytest.raises(dist.DistStoreError) as silent:
        store.wait(["nobody sets it"], timedelta(milliseconds=50))
    assert not is_gone(silent.value)
    server.signal(signal.SIGKILL)
    server.wait()
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError) as gone:
            backend.set_state(b"state")
        assert is_gone(gone.value), gone.value.__cause__


def test_cuts_and_other_errors_do_not_show_that_the_backend_is_gone() -> None:
    silent = [
        "did not answer within 5s",
        "No route to host",
        "Network is unreachable",
        "Too many open files",
        "timed out",
    ]
    assert not any(is_gone(OSError(text)) for text in silent)
    assert is_gone(ConnectionRefusedError("x"))
