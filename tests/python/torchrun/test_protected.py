"""Jobs that a token protects: they run, the token shows nowhere, and what needs the endpoint's store is refused."""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from elastic_rs import _elastic_rs
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import WORKER, Start

pytestmark = pytest.mark.torchrun

TOKEN = "4f" * 32
OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    return path


def by(token: Path) -> dict[str, str]:
    return {"ELASTIC_RS_TOKEN_FILE": str(token)}


@OURS
def test_a_protected_job_survives_a_failure_and_shows_its_token_nowhere(
    start: Start, job: Job, port: int, token: Path, tmp_path: Path
) -> None:
    done, conf = tmp_path / "done", "last_call_timeout=1"
    env = {**by(token), "ELASTIC_RS_LOG": "debug"}
    nodes = [start(number, "--until", done, nnodes="2", conf=conf, env=env) for number in (2, 3)]
    for node in nodes:
        place(node, 2)
    # A stranger with a c10d client, and one that says it is a node.
    for said in (b"\x00\xce\xf7\x85\x3c" + bytes(64), b"ELRZ\x02\x00" + bytes(64)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            while stranger.recv(4096):
                pass
    os.kill(job.workers()[0], signal.SIGKILL)
    for node in nodes:
        place(node, 2, since=next(at for at, line in enumerate(node.lines) if line.startswith("WORKER")) + 1)
    for pid in job.pids():
        for what in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    text = "\n".join(line for node in nodes for line in node.lines)
    assert "connection accepted" in text, "a record at debug level"
    assert TOKEN not in text
    assert "a c10d client" in text or "no store for c10d clients" in text
    assert "it shows no token" in text


@OURS
def test_a_node_without_the_token_gets_the_reason_at_once(start: Start, token: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    member = start(2, "--until", done, nnodes="1:2", env=by(token))
    place(member, 1)
    stranger = start(3, "--until", done, nnodes="1:2", conf="is_host=0")
    assert stranger.wait() != 0
    assert any("protected by a token" in line and "ELASTIC_RS_TOKEN_FILE" in line for line in stranger.lines)
    done.touch()
    assert member.wait() == 0
    assert sum(line.startswith("WORKER") for line in member.lines) == 1, "no worker was restarted"


@pytest.mark.parametrize("agent", ["torch"], indirect=True)
def test_pytorchs_agent_is_refused_with_the_reason(start: Start, token: Path) -> None:
    node = start(2, nnodes="1", env=by(token))
    assert node.wait() != 0
    assert any("agent=torch must not be used with a token" in line for line in node.lines), node.tail()


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (TOKEN, 0o644, "has the mode 0644"),
        ("short", 0o600, "no hexadecimal digit; 32 to 512 hexadecimal digits are allowed"),
        (None, 0, "cannot be read: No such"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(
    start: Start, tmp_path: Path, content: str | None, mode: int, why: str
) -> None:
    path = tmp_path / "unusable"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    node = start(2, nnodes="2", env=by(path))
    assert node.wait() == 2
    assert any(f"ELASTIC_RS_TOKEN_FILE: the token file `{path}`" in line and why in line for line in node.lines)


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_a_coordinator_of_several_jobs_knows_each_by_its_own_token(
    start: Start, job: Job, port: int, token: Path, tmp_path: Path
) -> None:
    serve = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"]
    host = job.start([*serve, f"--master-token-file={token}"], name="host")
    host.line("^listening on")
    files = {}
    for run in ("one", "two"):
        files[run] = tmp_path / run
        derive = ["token", "run", run, f"--of={token}", f"--output={files[run]}"]
        assert job.start([sys.executable, "-m", "elastic_rs", *derive]).wait() == 0
        assert files[run].read_text().strip() == _elastic_rs.derived_token(TOKEN, run_id=run)
    conf = "is_host=0,last_call_timeout=1"
    well: list[Process] = [
        start(number, nnodes="1", conf=conf, run_id=run, env=by(files[run])) for number, run in ((2, "one"), (3, "two"))
    ]
    assert [node.wait() for node in well] == [0, 0]
    wrong = start(2, nnodes="1", conf=f"{conf},join_timeout=3", run_id="three", env=by(files["one"]))
    assert wrong.wait() == 1
    output = "authentication with the coordinator failed: .*: no token with the id"
    wrong.line(output)
    host.signal(signal.SIGTERM)
    assert host.wait() == 0


def test_a_job_of_one_node_has_a_token_of_its_own(job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", str(WORKER), "--until", str(done)]
    node = job.start(command, env={"ELASTIC_RS_LOG": "info"})
    place(node, 1)
    port = int(node.line(r"hosts the coordinator at localhost:(\d+)")[1])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(_elastic_rs.store_question(1))  # a store answers
        assert stranger.recv(1) == b""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.pids()]
    assert lines
    assert not any(re.search(rb"[0-9a-f]{64}", line) for line in lines)
    done.touch()
    assert node.wait() == 0


def test_fixed_ranks_are_refused_with_a_token(job: Job, port: int, token: Path) -> None:
    flags = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    node = job.start([sys.executable, "-m", "elastic_rs.run", *flags, str(WORKER)], env=by(token))
    assert node.wait() == 2
    assert any("--rdzv-backend=static must not be used with a token" in line for line in node.lines)
