"""Jobs that certificates protect: they run, and peers without one get the reason."""

import os
import signal
from pathlib import Path

import pytest
from helpers.certificates import certificates
from helpers.procs import Job
from helpers.workers import place

from .conftest import Start

pytestmark = pytest.mark.torchrun

OURS = pytest.mark.parametrize("agent", ["rust", "run"], indirect=True)


@OURS
def test_a_job_with_certificates_survives_a_failure_and_a_peer_without_one_gets_the_reason(
    start: Start, job: Job, tmp_path: Path
) -> None:
    done, conf = tmp_path / "done", "last_call_timeout=1,store_tunnel=1"
    own = certificates(tmp_path / "own", "node")
    nodes = [start(number, "--until", done, nnodes="2", conf=conf, env=own) for number in (2, 3)]
    for node in nodes:
        assert place(node, 2)["master"].startswith("127.0.0.1:"), "its workers reach the store through their agent"
    # It trusts the job's CA, and its own certificate is another's.
    theirs = certificates(tmp_path / "theirs", "stranger", "ca", "other-ca")
    stranger = start(4, nnodes="2", conf="is_host=0,join_timeout=3", env=theirs)
    stranger.line(
        r"authentication with the coordinator failed: .*it does not accept this end's certificate "
        r"\(ELASTIC_RS_TLS_CERT\): no CA of that end \(ELASTIC_RS_TLS_CA\) has issued it"
    )
    assert stranger.wait() != 0
    bare = start(4, nnodes="2", conf="is_host=0")
    assert bare.wait() != 0
    assert any(
        "it is protected by certificates: name their files in ELASTIC_RS_TLS_CERT" in line for line in bare.lines
    )
    marks = [node.mark() for node in nodes]
    os.kill(job.workers()[0], signal.SIGKILL)
    for node, mark in zip(nodes, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    text = "\n".join(line for node in nodes for line in node.lines)
    assert "its certificate does not chain to a CA of this end (ELASTIC_RS_TLS_CA)" in text
    assert "refused so far" in text


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_with_certificates_and_a_token_both_are_asked_for(start: Start, tmp_path: Path) -> None:
    own = certificates(tmp_path / "own", "node")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("4f" * 32)
    both = own | {"ELASTIC_RS_TOKEN_FILE": str(token)}
    done = tmp_path / "done"
    nodes = [start(number, "--until", done, nnodes="2", env=both) for number in (2, 3)]
    for node in nodes:
        place(node, 2)
    halved = start(4, nnodes="2", conf="is_host=0,join_timeout=3", env=own)
    halved.line("the certificate alone is not enough: name the file with the job's token")
    assert halved.wait() != 0
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"KEY": None}, "ELASTIC_RS_TLS_KEY must name a file: "),
        ({"CERT": None, "CA": None}, "ELASTIC_RS_TLS_CERT and ELASTIC_RS_TLS_CA must name a file: "),
        ({"CA": "/nowhere/ca"}, "ELASTIC_RS_TLS_CA: the CA file `/nowhere/ca` cannot be read: No such"),
        (
            {"SPIFFE_ID": "spiffe://a/b"},
            "ELASTIC_RS_TLS_SPIFFE_ID is not supported: certificates are checked by",
        ),
    ],
)
def test_what_is_set_by_halves_is_an_error(
    start: Start, tmp_path: Path, change: dict[str, str | None], why: str
) -> None:
    env = certificates(tmp_path / "own", "node")
    for name, value in change.items():
        env.pop(f"ELASTIC_RS_TLS_{name}", None)
        if value is not None:
            env[f"ELASTIC_RS_TLS_{name}"] = value
    node = start(2, nnodes="2", env=env)
    assert node.wait() == 2
    assert any(why in line for line in node.lines), node.tail()


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_a_key_that_others_may_read_or_that_does_not_fit_is_an_error(start: Start, tmp_path: Path) -> None:
    env = certificates(tmp_path / "own", "node")
    key = Path(env["ELASTIC_RS_TLS_KEY"])
    key.chmod(0o644)
    node = start(2, nnodes="2", env=env)
    assert node.wait() == 2
    assert any(f"ELASTIC_RS_TLS_KEY: the key file `{key}` has the mode 0644" in line for line in node.lines)
    env = env | {"ELASTIC_RS_TLS_KEY": certificates(tmp_path / "other", "renewed")["ELASTIC_RS_TLS_KEY"]}
    node = start(2, nnodes="2", env=env)
    assert node.wait() == 2
    assert any("does not belong to the first certificate in" in line for line in node.lines)


@pytest.mark.parametrize("agent", ["torch"], indirect=True)
def test_pytorchs_agent_is_refused_with_the_reason(start: Start, tmp_path: Path) -> None:
    node = start(2, nnodes="1", env=certificates(tmp_path / "own", "node"))
    assert node.wait() != 0
    assert any("agent=torch must not be used with certificates" in line for line in node.lines), node.tail()
