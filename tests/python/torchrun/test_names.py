"""Second jobs at one endpoint, run ids that are used again, and endpoints that mean another machine."""

import http.server
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, SCRIPTS, Start
from .test_host_of_its_own import serve

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.parametrize("agent", ["rust", "run"], indirect=True),
]
GUEST = "is_host=0,last_call_timeout=1"


@pytest.fixture
def host(job: Job, port: int) -> Iterator[Process]:
    host = serve(job, port, "host")
    yield host
    host.signal(signal.SIGTERM)
    assert host.wait() == 0


@pytest.mark.usefixtures("host")
def test_a_second_job_without_a_run_id_is_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    """It waited as a spare of the first one, and ended with 0 without having done anything."""
    done = tmp_path / "done"
    first = start(2, "--until", done, nnodes="1", run_id="none", conf=GUEST, script=FAMILY)
    place(first, 1)
    second = start(3, nnodes="1", run_id="none", conf=GUEST, script=FAMILY)
    assert second.wait() == 1
    line = second.line(r"refused this node: .*").group()
    assert re.search(
        r"127\.0\.0\.3 \(.*\) belongs to another job than 127\.0\.0\.2 \(.*\), which runs `family\.py`", line
    )
    assert re.search(r"came \d+ s ago.*takes 1 node.*--rdzv-id", line)
    assert not [text for text in second.lines if text.startswith("WORKER")]
    done.touch()
    assert first.wait() == 0


@pytest.mark.usefixtures("host")
def test_another_script_without_a_run_id_is_refused_and_the_job_runs_on(start: Start, tmp_path: Path) -> None:
    """It became a part of the first job, and that one's traceback was its report."""
    other = tmp_path / "evaluate.py"
    other.write_text(FAMILY.read_text())
    done = tmp_path / "done"
    first = start(2, "--until", done, nnodes="1:2", run_id="none", conf=GUEST, script=FAMILY)
    place(first, 1)
    second = start(3, "--until", done, nnodes="1:2", run_id="none", conf=GUEST, script=other)
    assert second.wait() == 1
    second.line(r"belongs to another job than .*`family\.py`.*does not run `evaluate\.py`")
    # The same script with other arguments belongs to the job.
    third = start(4, "--stubborn", "--until", done, nnodes="1:2", run_id="none", conf=GUEST, script=FAMILY)
    place(third, 2)
    done.touch()
    assert [node.wait() for node in (first, third)] == [0, 0]


@pytest.mark.usefixtures("host")
def test_a_node_too_many_of_a_job_with_a_run_id_says_that_it_is_a_spare(start: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    first = start(2, "--until", done, nnodes="1", conf=GUEST, script=FAMILY)
    place(first, 1)
    spare = start(3, "--until", done, nnodes="1", conf=GUEST, script=SCRIPTS / "worker.py")
    spare.line(r"WARNING.*waiting for \d+s, as a spare, until a node is lost or the job ends \(no limit\): round 2")
    done.touch()
    assert [node.wait() for node in (first, spare)] == [0, 0]


@pytest.fixture
def ends(tmp_path: Path) -> Path:
    """Return a script that ends with the code that it is given."""
    script = tmp_path / "ends.py"
    script.write_text("import sys; print('RAN', flush=True); assert sys.argv[1] == '0', 'the old traceback'")
    return script


@pytest.mark.usefixtures("host")
def test_a_run_id_that_is_used_again_after_a_success_is_a_warning_and_ends_well(start: Start, ends: Path) -> None:
    assert start(2, "0", nnodes="1", conf=GUEST, script=ends).wait() == 0
    late = start(3, "0", nnodes="1", conf=GUEST, script=ends)
    assert late.wait() == 0, late.tail()
    line = late.line(r"WARNING.*run id.*").group()
    assert re.search(r"run id `job` has succeeded \d+ s ago .*for an hour. A new job needs another --rdzv-id", line)
    assert "RAN" not in late.lines


@pytest.mark.usefixtures("host")
def test_a_run_id_that_is_used_again_after_a_failure_shows_no_old_traceback(start: Start, ends: Path) -> None:
    options = {"nnodes": "1", "restarts": 0, "conf": GUEST, "script": ends}
    assert start(2, "1", **options).wait() == 1
    late = start(3, "0", **options)
    assert late.wait() == 1
    line = late.line(r"RendezvousClosedError: the job with the run id .*").group()
    assert re.search(r"`job` has failed \d+ s ago .*for an hour. A new job needs another --rdzv-id", line)
    assert "RAN" not in late.lines
    assert not [text for text in late.lines if "ChildFailedError" in text or "FAILED" in text]


def test_a_host_on_all_addresses_names_what_the_other_nodes_give(start: Start, port: int, tmp_path: Path) -> None:
    done = tmp_path / "done"
    options = {"nnodes": "2", "script": FAMILY}
    first = start(2, "--until", done, endpoint=f"0.0.0.0:{port}", conf="is_host=1,last_call_timeout=1", **options)
    first.line(r"WARNING.*0\.0\.0\.0 means all addresses of this node.* given \S+:\d+")
    second = start(3, "--until", done, endpoint=f"127.0.0.1:{port}", **options)
    for node in (first, second):
        place(node, 2)
    done.touch()
    assert [node.wait() for node in (first, second)] == [0, 0]


def test_a_host_behind_nat_reaches_itself(start: Start, port: int) -> None:
    """Nobody has the address (RFC 5737), so that this machine cannot reach it, as a pod its own Service."""
    node = start(2, nnodes="1", endpoint=f"192.0.2.1:{port}", conf="is_host=1,last_call_timeout=1", local_addr=False)
    assert node.wait() == 0, node.tail()


def test_a_waiting_node_says_that_nobody_is_there_and_for_how_long_it_waits(start: Start) -> None:
    node = start(2, nnodes="2", conf=GUEST, env={"ELASTIC_RS_LOG": ""})
    line = node.line(r"WARNING.*waiting for \d+s.*", limit_s=60).group()
    assert re.search(
        r"waiting for [3-9]s of up to 600s \(join_timeout\): the coordinator at 127\.0\.0\.1:\d+ is out", line
    )
    assert "nobody has answered there yet" in line
    assert "the job is over" in line
    assert "is_host=1" in line
    node.signal(signal.SIGINT)
    assert node.wait() == 130


@pytest.mark.parametrize("hosts", ["ours", "theirs"])
def test_a_node_of_pytorchs_own_c10d_is_named(start: Start, job: Job, port: int, hosts: str) -> None:
    def theirs() -> Process:
        flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
        return job.start([sys.executable, "-m", "torch.distributed.run", *flags, str(FAMILY)], name="theirs")

    if hosts == "ours":
        node = start(2, nnodes="2", env={"ELASTIC_RS_LOG": ""})
        node.line(r"waiting for \d+s of up to")
        other = theirs()
        node.line(
            r"WARNING.*\[job\] a node of PyTorch's own c10d rendezvous waits at this endpoint.*--rdzv-backend=rust-c10d"
        )
        node.signal(signal.SIGINT)
        assert node.wait() == 130
    else:
        other = theirs()
        node = start(2, nnodes="2", conf=GUEST)
        assert node.wait() == 1
        node.line(
            r"is a store of PyTorch's c10d backend, not an elastic_rs coordinator: use `--rdzv-backend=rust-c10d`"
        )
    other.signal(signal.SIGKILL)
    other.wait()


class Page(http.server.BaseHTTPRequestHandler):
    """Answers whatever it is sent, as a proxy does."""

    def handle(self) -> None:
        self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_an_endpoint_that_is_an_http_server_is_named(start: Start) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        node = start(2, nnodes="2", conf=GUEST, endpoint=f"127.0.0.1:{server.server_address[1]}")
        assert node.wait() == 1
        server.shutdown()
    node.line(r"is not an elastic_rs coordinator: an HTTP server answers there")
