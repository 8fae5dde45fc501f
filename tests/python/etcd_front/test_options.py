"""Where etcd is and how to speak to it: endpoints, files, users, and a node's own address. No etcd is needed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs import EtcdClient, EtcdOptions, _elastic_rs
from elastic_rs._host_name import host_name
from elastic_rs.rendezvous._config import config_of
from elastic_rs.rendezvous._etcd import etcd_of, own_address
from elastic_rs.run import _flags, _options
from helpers.command_lines import said

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "etcd"
SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("text", "members", "tls"),
    [
        ("", [("localhost", 2379)], False),
        ("node", [("node", 2379)], False),
        ("h1:1,h2:2, h3", [("h1", 1), ("h2", 2), ("h3", 2379)], False),
        ("[2001:db8::1]:77,[::1]", [("2001:db8::1", 77), ("::1", 2379)], False),
        ("http://h1:1", [("h1", 1)], False),
        ("https://h1:1,https://h2", [("h1", 1), ("h2", 2379)], True),
    ],
)
def test_endpoints(text: str, members: list[tuple[str, int]], tls: bool) -> None:
    cacert = DATA / "ca.pem" if tls else None
    options = EtcdOptions(text, cacert=cacert)
    assert (options.members, options.tls) == (members, tls)


@pytest.mark.parametrize("text", ["::1", "h1:x", "h1:70000", "ftp://h1", "h1,,h2", "a b", "http://h1,https://h2"])
def test_an_invalid_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        EtcdOptions(text)


def test_a_password_in_an_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="password_file") as caught:
        EtcdOptions(f"http://me:{SECRET}@h1:2379")
    assert SECRET not in str(caught.value)


def test_protocol_decides_for_endpoints_without_one() -> None:
    assert EtcdOptions("h1,h2", protocol="https", cacert=DATA / "ca.pem").tls
    with pytest.raises(ValueError, match="http"):
        EtcdOptions("http://h1", protocol="https")


def test_files_for_tls_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.pem"):
        EtcdOptions("https://h1", cacert=tmp_path / "missing.pem")
    with pytest.raises(ValueError, match="https"):
        EtcdOptions("h1", cacert=DATA / "ca.pem")
    with pytest.raises(ValueError, match="cert"):
        EtcdOptions("https://h1", cacert=DATA / "ca.pem", key=DATA / "trainer.key")


def test_one_file_may_have_a_certificate_and_its_key(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text((DATA / "trainer.pem").read_text() + (DATA / "trainer.key").read_text())
    EtcdOptions("https://h1", cacert=DATA / "ca.pem", cert=both)
    with pytest.raises(ValueError, match="key"):
        EtcdOptions("https://h1", cacert=DATA / "ca.pem", cert=DATA / "trainer.pem")


def test_a_password_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    for options in (
        EtcdOptions("h1", username="me", password_file=file),
        EtcdOptions("h1", username="me", password=SECRET),
        EtcdOptions.of_config("h1", config_of({"username": "me", "password_file": str(file)}, "rust-etcd")),
    ):
        assert options.username == "me"
        assert SECRET not in repr(options) + str(options)
    with pytest.raises(
        ValueError, match="without a password: give password_file=FILE, or set ELASTIC_RS_ETCD_PASSWORD"
    ):
        EtcdOptions("h1", username="me")
    monkeypatch.setenv("ELASTIC_RS_ETCD_PASSWORD", SECRET)
    assert EtcdOptions("h1", username="me").username == "me"
    assert EtcdOptions("h1").username is None, "the variable may be for another program"


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read"), ("", "is empty"), ("\n", "is empty"), ("x" * 5000, "has more than 4096 bytes")],
)
def test_a_file_without_a_password_is_named(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"password_file `{file}` {why}"):
        EtcdOptions("h1", username="me", password_file=file)


def test_a_password_without_a_user_and_two_passwords_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without `username`"):
        EtcdOptions("h1", password=SECRET)
    with pytest.raises(ValueError, match="give one of them") as caught:
        EtcdOptions("h1", username="me", password=SECRET, password_file=tmp_path / "f")
    assert SECRET not in str(caught.value)


def test_a_prefix_ends_without_slashes() -> None:
    assert EtcdOptions("h1", key_prefix="/mine//").key_prefix == "/mine"
    assert EtcdOptions("h1").key_prefix == "/torch/elastic/rendezvous"
    assert EtcdOptions("h1").agents_store("a/b@store") == "/torch/elastic/rendezvous/a%2Fb%40store@store"


def test_a_node_without_an_address_cannot_have_a_session() -> None:
    config = config_of({}, "rust-etcd")
    node = _elastic_rs.NodeOptions(
        run_id="job",
        name="node",
        local_addr=None,
        nodes=(1, 1),
        config=config,
        max_restarts=None,
        ranks_as_asked=False,
        use_agent_store=True,
    )
    with pytest.raises(ValueError, match="local_addr is None"):
        _elastic_rs.Session.over_etcd(EtcdOptions("127.0.0.1:1"), node)


def test_a_nodes_address_is_the_one_towards_etcd_unless_it_is_given() -> None:
    here = EtcdOptions("127.0.0.1,localhost,[::1]")
    assert here.source_address(timeout_s=5) is None
    assert own_address("10.1.2.3", 4, here) == "10.1.2.3"
    assert own_address(None, 1, here) == "127.0.0.1", "nobody else looks for it"
    assert own_address(None, 4, here) == host_name()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 2379))  # TEST-NET-1: sends nothing
        except OSError:
            pytest.skip("this machine has no route to other networks")
        expected = probe.getsockname()[0]
    assert own_address(None, 4, EtcdOptions("127.0.0.1,192.0.2.1")) == expected


def test_several_nodes_without_an_endpoint_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of({}, "rust-etcd")
    with caplog.at_level("WARNING", "elastic_rs"):
        etcd_of("", config, 1)
        assert not caplog.records
        assert etcd_of("", config, 2).members == [("localhost", 2379)]
    assert "no --rdzv-endpoint is given: this node asks etcd at localhost:2379" in caplog.text


@pytest.mark.parametrize("backend", ["rust-etcd", "etcd", "etcd-v2"])
def test_elastic_run_knows_the_names_of_pytorchs_backends(backend: str) -> None:
    flags = [f"--rdzv-backend={backend}", "--nnodes=1:3", "--rdzv-id=job", "--rdzv-endpoint=h1:1,h2:2"]
    meeting = _options.rendezvous_of(_flags.parse([*flags, "--rdzv-conf=etcd_prefix=/mine,timeout=5", "x"]))
    assert meeting.etcd is not None
    assert (meeting.etcd.members, meeting.etcd.key_prefix) == ([("h1", 1), ("h2", 2)], "/mine")
    assert (meeting.run_id, meeting.nodes, meeting.fixed, meeting.config.join_timeout) == ("job", (1, 3), False, 5)


def test_a_job_without_others_needs_no_etcd() -> None:
    meeting = _options.rendezvous_of(_flags.parse(["--standalone", "--rdzv-backend=rust-etcd", "x"]))
    assert meeting.etcd is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rdzv-conf=is_host=1"], "is_host has no meaning with --rdzv-backend=rust-etcd"),
        (["--rdzv-conf=pasword_file=x"], "did you mean `password_file`?"),
        (["--rdzv-conf=username=me"], "without a password"),
        (["--rdzv-conf=protocol=ftp"], "protocol is `ftp`, must be `http` or `https`"),
        (["--rdzv-conf=protocol=https,cacert=/no/such.pem"], "/no/such.pem"),
        (["--rdzv-endpoint=h1:x"], "endpoint"),
        (["--rdzv-id="], "--rdzv-id is empty"),
        ([f"--rdzv-conf=username=me,password={SECRET}"], "password is refused"),
        ([f"--rdzv-conf=username=me,password=a,{SECRET}"], "KEY=VALUE"),
        ([f"--rdzv-endpoint=me:{SECRET}@h1"], "username"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    output = said(capsys, "--rdzv-backend=rust-etcd", "--rdzv-id=job", "--rdzv-endpoint=h1", *flags, "x")
    assert text in output
    assert SECRET not in output


def test_what_pytorch_must_do_gets_the_backends_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_rs.run import _torch
    from torch.distributed import run

    seen: list[str] = []
    monkeypatch.setattr(run, "run", lambda args: seen.append(args.rdzv_backend))
    argv = ["--rdzv-backend=etcd-v2", "--rdzv-id=job", "--rdzv-endpoint=h1", "--event-log-handler=null", "-m", "this"]
    _torch.hand_over(argv, _flags.parse(argv), "--event-log-handler")
    assert seen == ["rust-etcd"]


def _unreachable() -> EtcdClient:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return EtcdClient(EtcdOptions(f"127.0.0.1:{port}", read_timeout_s=0.5))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.get("k"),
        lambda client: client.put("k", b"v"),
        lambda client: client.compare_and_put("k", 0, b"v"),
        lambda client: client.wait(["k"], timeout_s=0.5),
        lambda client: client.lease_grant(5.0),
    ],
)
def test_a_cluster_that_is_not_there_is_named_in_time(ask: Callable[[EtcdClient], object]) -> None:
    client = _unreachable()
    with pytest.raises(ConnectionError, match=client.options.endpoints):
        ask(client)
