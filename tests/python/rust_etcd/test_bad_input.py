"""What a user may get wrong. Each is reported with the endpoint, the cause, and what to do; passwords never are."""

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster
from helpers.etcd import DATA, PREFIX, TLS, Nodes
from helpers.foreign_servers import answering
from helpers.procs import Process

PASSWORD = "correct horse"
WRONG = "battery staple"
# Told within 2 s, by the benchmark. Here other tests run beside, and a process takes a second to start.
SOON_S = 30.0


@pytest.fixture(scope="module")
def one(program: str) -> Iterator[Cluster]:
    """Return a cluster of one member, for what any member says."""
    with Cluster(program, size=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def guarded(program: str) -> Iterator[Cluster]:
    """Return a cluster of one member with TLS and users: `trainer` may write below the prefix, `visitor` nowhere."""
    with Cluster(program, size=1, tls=TLS) as cluster:
        admin = Admin(cluster)
        admin.add_user("trainer", PASSWORD, prefix=f"{PREFIX}/")
        admin.add_user("visitor", PASSWORD)
        admin.enable_auth("root's")
        yield cluster


def refused(node: Process) -> str:
    """Return what a node said that has no chance. It must have ended by itself, at once."""
    began = time.monotonic()
    assert node.wait(limit_s=SOON_S) == 1, node.tail()
    text = "\n".join(node.lines)
    print(f"{time.monotonic() - began:.2f} s\n{text}")
    assert not [line for line in node.lines if line.startswith("WORKER ")]
    assert "Traceback" not in text
    assert PASSWORD not in text
    assert WRONG not in text
    return text


def start(nodes: Nodes, endpoint: str, more: str = "", run_id: str = "job", **env: str) -> Process:
    # An hour: an error that came only when the time is over would be too late for the test.
    return nodes.start(2, endpoint, nnodes="1", conf="join_timeout=3600", more=more, run_id=run_id, env=env)


SECURE = f"protocol=https,cacert={DATA / 'ca.pem'}"


@pytest.mark.parametrize(
    ("more", "password", "cause", "remedy"),
    [
        ("", None, "TLS", "protocol=https"),
        (f"protocol=https,cacert={DATA / 'other-ca.pem'}", None, "certificate", "cacert"),
        (SECURE, None, "user", "username"),
        (f"{SECURE},username=trainer", WRONG, "trainer", "password"),
        (f"{SECURE},username=nobody", WRONG, "nobody", "password"),
        (f"{SECURE},username=visitor", PASSWORD, "visitor", "grant its role `readwrite`"),
        (f"{SECURE},username=trainer,key_prefix=/elsewhere", PASSWORD, "/elsewhere/job/", "grant its role `readwrite`"),
    ],
    ids=["plain to TLS", "other CA", "no user", "wrong password", "unknown user", "no rights", "rights elsewhere"],
)
def test_a_right_that_the_cluster_denies_is_reported_at_once(
    *, guarded: Cluster, nodes: Nodes, more: str, password: str | None, cause: str, remedy: str
) -> None:
    env = {"ELASTIC_RS_ETCD_PASSWORD": password} if password else {}
    text = refused(start(nodes, guarded.endpoint, more, **env))
    for word in (guarded.endpoint, cause, remedy):
        assert word in text, word


def test_tls_to_a_plain_port_is_reported_at_once(one: Cluster, nodes: Nodes) -> None:
    text = refused(start(nodes, one.endpoint, SECURE))
    assert one.endpoint in text
    assert "protocol=http" in text


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("state", b"someone's state", "not one of elastic_rs"),
        ("state", b"ELRS" + struct.pack("<H", 999), "999"),
        ("config", b"1", "config"),
        ("nodes/worker-7", b"1", "worker-7"),
    ],
    ids=["a foreign state", "a state of another version", "a foreign key", "a foreign node"],
)
def test_keys_of_others_under_the_prefix_are_named(
    *, one: Cluster, nodes: Nodes, request: pytest.FixtureRequest, key: str, value: bytes, said: str
) -> None:
    run_id = request.node.callspec.id.replace(" ", "-").replace("'", "")
    admin = Admin(one)
    admin.put(f"{PREFIX}/{run_id}/{key}", value)
    text = refused(start(nodes, one.endpoint, run_id=run_id))
    assert one.endpoint in text
    assert said in text
    assert [(found.key, found.value) for found in admin.keys(f"{PREFIX}/{run_id}/")] == [
        (f"{PREFIX}/{run_id}/{key}", value)
    ], "what is another program's is left as it was"


def test_a_wrong_value_in_a_running_job_is_no_crash(one: Cluster, nodes: Nodes, tmp_path: Path) -> None:
    done, admin = tmp_path / "done", Admin(one)
    node = nodes.start(2, one.endpoint, "--until", done, nnodes="1:2", run_id="overwritten")
    node.line("^WORKER ")
    admin.put(f"{PREFIX}/overwritten/state", b"garbage")
    text = refused_later(node)
    assert one.endpoint in text
    assert "not one of elastic_rs" in text


def refused_later(node: Process) -> str:
    assert node.wait() == 1, node.tail()
    assert "Traceback" not in node.tail()
    return "\n".join(node.lines)


def test_a_cluster_that_is_not_up_yet_is_waited_for(nodes: Nodes, port: int) -> None:
    node = nodes.start(2, f"127.0.0.1:{port}", nnodes="1", conf="join_timeout=4")
    began = time.monotonic()
    warning = node.line(rf"WARNING.*127\.0\.0\.1:{port}.*refused.*: start etcd there, or correct the endpoint").string
    print(f"{time.monotonic() - began:.2f} s: {warning}")
    assert node.wait() == 1
    text = "\n".join(node.lines)
    print(text)
    assert f"could not reach etcd at 127.0.0.1:{port} in 4.0s" in text
    assert "Traceback" not in text


def test_a_name_that_does_not_resolve_is_waited_for(nodes: Nodes) -> None:
    node = nodes.start(2, "etcd.invalid:2379", nnodes="1", conf="join_timeout=4")
    node.line(r"WARNING.*etcd\.invalid:2379")
    assert node.wait() == 1
    assert "could not reach etcd at etcd.invalid:2379 in 4.0s: etcd at etcd.invalid:2379: cannot resolve" in node.tail()


def test_a_port_of_another_program_is_named(nodes: Nodes) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        node = nodes.start(2, f"127.0.0.1:{port}", nnodes="1", conf="join_timeout=4")
        node.line(rf"127\.0\.0\.1:{port}")
        assert node.wait() == 1
    assert "Traceback" not in node.tail()


def test_a_port_that_answers_nothing_is_reported(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = nodes.start(2, f"127.0.0.1:{port}", nnodes="1", conf="join_timeout=3")
        node.line(rf"WARNING.*127\.0\.0\.1:{port} has not answered yet")
        assert node.wait() == 1
    assert f"in 3.0s: etcd at 127.0.0.1:{port} did not answer within 2s" in node.tail()


def test_a_member_that_is_never_up_is_no_error(one: Cluster, nodes: Nodes, port: int, tmp_path: Path) -> None:
    (tmp_path / "done").touch()
    endpoint = f"127.0.0.1:{port},{one.endpoint}"
    node = nodes.start(2, endpoint, "--until", tmp_path / "done", nnodes="1", run_id="one-is-down")
    assert node.wait() == 0


def test_a_password_file_that_others_may_read_or_that_is_missing(one: Cluster, nodes: Nodes, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    node = start(nodes, one.endpoint, f"username=trainer,password_file={missing}")
    assert node.wait() in {1, 2}
    assert str(missing) in "\n".join(node.lines)
    assert "Traceback" not in node.tail()
