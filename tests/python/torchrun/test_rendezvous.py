"""torchrun with both agents, and elastic-run: clocks, hosts that freeze or start late, faults, several jobs."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start
from .test_host_of_its_own import serve

pytestmark = [pytest.mark.torchrun]
SHORT_LEASE = "last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=3"


@pytest.mark.parametrize("agent", ["rust", "torch"], indirect=True)
@pytest.mark.parametrize("shift", [-3600, 3600])
def test_clocks_do_not_matter(start: Start, tmp_path: Path, shift: int) -> None:
    # With PyTorch's backend, 20 s cause a world of one node, or a barrier that never ends.
    done = tmp_path / "done"
    options = {"nnodes": "2:2", "script": FAMILY}
    nodes = [start(2, "--until", done, **options), start(3, "--until", done, wrong=[f"--clock={shift}"], **options)]
    assert {place(node, 2)["group_rank"] for node in nodes} == {"0", "1"}
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert sum(line.startswith("WORKER") for node in nodes for line in node.lines) == 2, "no worker was restarted"


def test_a_host_that_freezes_leaves_one_world(start: Start, job: Job, tmp_path: Path) -> None:
    # pytorch #67616: with PyTorch's backend, a world of 3 and a world of 1 run at once.
    done = tmp_path / "done"
    args = ["--until", done, "--lock", tmp_path / "lock"]
    options = {"nnodes": "1:3", "conf": SHORT_LEASE, "script": FAMILY}
    host = start(2, *args, **options)
    host.line("this process hosts the coordinator")
    other = start(3, *args, **options)
    place(host, 2)
    place(other, 2)
    cut_off = job.workers(other)
    host.signal(signal.SIGSTOP)
    try:
        job.until_gone(*cut_off.values())  # this node's lease has ended, so it has stopped its workers
    finally:
        host.signal(signal.SIGCONT)
    third = start(4, *args, **options)
    nodes = [host, other, third]
    assert {place(node, 3)["group_rank"] for node in nodes} == {"0", "1", "2"}
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert "TWO WORLDS" not in "\n".join(line for node in nodes for line in node.lines)


@pytest.mark.parametrize("agent", ["rust", "torch"], indirect=True)
@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_fault_of_one_node_ends_only_that_node(start: Start, tmp_path: Path, fault: str) -> None:
    # pytorch #67616: with PyTorch's backend, any exception in an agent closes the rendezvous for good.
    done = tmp_path / "done"
    options = {"nnodes": "2", "script": FAMILY}
    host = start(2, "--until", done, **options)
    host.line(r"127\.0\.0\.2 .* joined")
    faulty = start(3, "--until", done, wrong=[f"--fault={fault}"], **options)
    assert faulty.wait() == 1
    # A line of the log may be between the type of the exception and its words.
    assert f"a fault of this node alone, {fault} joining" in "\n".join(faulty.lines)
    assert host.running
    mark = host.mark()
    again = start(3, "--until", done, **options)
    place(host, 2, since=mark)
    place(again, 2)
    done.touch()
    assert [node.wait() for node in (host, again)] == [0, 0]


@pytest.mark.parametrize(
    "agent", ["run", *(pytest.param(it, marks=pytest.mark.long) for it in ("rust", "torch"))], indirect=True
)
def test_a_join_timeout_names_the_nodes_that_joined_and_the_number_missing(start: Start) -> None:
    # pytorch #91943: PyTorch's message is empty.
    host = start(2, nnodes="3", conf="join_timeout=8")
    host.line(r"127\.0\.0\.2 .* joined")
    other = start(3, nnodes="3", conf="join_timeout=8")
    host.line(r"127\.0\.0\.3 .* joined")
    assert host.wait() == 1
    assert other.wait() == 1
    (error, *_) = [line for line in host.lines if "RendezvousTimeoutError" in line]
    assert "127.0.0.2" in error
    assert "127.0.0.3" in error
    assert re.search(r"1 (more|missing)|missing 1", error), error


def test_a_host_may_start_late(start: Start) -> None:
    # pytorch #69197.
    early = start(3, nnodes="2", conf="last_call_timeout=1,is_host=0")
    early.line("and this one connects to it: is_host=0 was given")
    host = start(2, nnodes="2")
    host.line("this process hosts the coordinator")
    assert [node.wait() for node in (early, host)] == [0, 0]


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.9"])
def test_one_node_hosts_whatever_the_endpoint_is_called(start: Start, endpoint: str) -> None:
    # pytorch #69197: PyTorch compares names, and finds no host or several.
    nodes = [start(number, nnodes="2", endpoint=endpoint) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    lines = [line for node in nodes for line in node.lines]
    assert sum("this process hosts the coordinator" in line for line in lines) == 1
    assert sum("and this one connects to it: " in line for line in lines) == 1


@pytest.mark.parametrize(
    "agent", ["run", *(pytest.param(agent, marks=pytest.mark.long) for agent in ("rust", "torch"))], indirect=True
)
def test_host_names_need_not_resolve(start: Start) -> None:
    # pytorch #150532: PyTorch gives workers the name of rank 0's host, which other hosts may not resolve.
    script = 'hostname nowhere-to-be-found && exec "$@"'
    under = ["unshare", "--map-root-user", "--uts", "sh", "-c", script, "sh"]
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"this machine does not allow `{shlex.join(under[:3])}`")
    nodes = [start(number, "--torch", nnodes="2", local_addr=False, under=under) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert not [line for node in nodes for line in node.lines if "master=nowhere" in line]


def test_two_jobs_of_one_node_run_side_by_side(job: Job, agent: str, tmp_path: Path) -> None:
    # pytorch #126510: with its own backend torchrun picks a free port. With the default port the second job would wait.
    done = tmp_path / "done"

    def start(name: str) -> Process:
        module = "elastic_rs.run" if agent == "run" else "torch.distributed.run"
        kind = "torch" if agent == "torch" else "rust"
        args = ["--nproc-per-node=1", "--rdzv-backend=rust-c10d", f"--rdzv-conf=agent={kind}", FAMILY, "--until", done]
        return job.start([sys.executable, "-m", module, *map(str, args)], name=name)

    nodes = [start("one"), start("two")]
    for node in nodes:
        place(node, 1)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


def test_two_jobs_on_one_endpoint_do_not_mix(start: Start, job: Job, port: int, tmp_path: Path) -> None:
    # pytorch #126510: nodes with different run ids belong to different jobs.
    done = tmp_path / "done"
    host = serve(job, port, "host")
    options = {"nnodes": "1:4", "conf": "is_host=0,last_call_timeout=1", "script": FAMILY}
    one = start(2, "--until", done, run_id="one", **options)
    two = start(3, "--until", done, run_id="two", **options)
    for node in (one, two):
        place(node, 1)
    done.touch()
    assert [node.wait() for node in (one, two)] == [0, 0]
    host.signal(signal.SIGTERM)
    assert host.wait() == 0
