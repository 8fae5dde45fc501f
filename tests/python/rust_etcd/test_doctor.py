"""``elastic-run doctor`` with real clusters."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster
from helpers.etcd import DATA, PREFIX, TLS
from helpers.procs import Job

PROGRAMS = ["elastic-run", "elastic-rs"]
PASSWORD = "correct horse"


class Report:
    """What the doctor has said."""

    def __init__(self, lines: list[str], code: int) -> None:
        self.lines, self.code = lines, code

    def about(self, check: str) -> str:
        """Return the line about that, with its remedy if there is one."""
        index = next(i for i, line in enumerate(self.lines) if re.match(rf"(ok|note|mend) +{check} ", line))
        remedy = self.lines[index + 1] if "to mend: " in self.lines[index + 1] else ""
        return f"{self.lines[index]}\n{remedy}" if remedy else self.lines[index]

    @property
    def checks(self) -> list[str]:
        return [line.split("  ")[0].partition(" ")[2].strip() for line in self.lines]


@pytest.fixture
def doctor(job: Job) -> Callable[..., Report]:
    """Return a function that runs the doctor about a cluster."""

    def doctor(endpoint: str, conf: str = "", command: str = "elastic-run", **env: str) -> Report:
        flags = ["--nnodes=2", "--rdzv-backend=rust-etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
        flags += [f"--rdzv-conf={conf}"] if conf else []
        process = job.start([str(Path(sys.executable).with_name(command)), "doctor", *flags], env=env)
        code = process.wait()
        output = "\n".join(process.lines)
        print(output)
        assert "Traceback" not in output
        assert PASSWORD not in output
        return Report(process.lines, code)

    return doctor


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_cluster(cluster: Cluster, admin: Admin, doctor: Callable[..., Report], command: str) -> None:
    before = admin.revision()
    report = doctor(cluster.endpoint, command=command)
    assert report.about("endpoint").startswith("ok ")
    assert f"3 of 3 members answer, led by {cluster.leader().name}" in report.about("endpoint")
    assert "etcd version" in report.about("etcd version")
    assert report.about("etcd space").startswith("ok ")
    assert " ms at most" in report.about("etcd latency")
    assert report.about("etcd rights") == f"ok    etcd rights  this client may read and write keys below {PREFIX}/"
    assert "in the first round" in report.about("rank order")
    assert admin.revision() == before, "it writes nothing"


def test_one_endpoint_of_three(cluster: Cluster, doctor: Callable[..., Report]) -> None:
    assert "names not all of them" in doctor(cluster.members[0].endpoint).about("endpoint")


def test_members_that_are_down(own_cluster: Callable[..., Cluster], doctor: Callable[..., Report]) -> None:
    cluster = own_cluster()
    cluster.members[2].kill()
    said = doctor(cluster.endpoint).about("endpoint")
    assert said.startswith("note ")
    assert "2 of 3 members answer" in said
    assert cluster.members[2].endpoint in said
    cluster.members[1].kill()
    report = doctor(cluster.endpoint)
    assert report.code == 1
    assert "so none can lead" in report.about("endpoint")
    cluster.members[0].kill()
    report = doctor(cluster.endpoint)
    assert report.code == 1
    assert "no member can be used" in report.about("endpoint")
    assert "refused" in report.about("endpoint")


def test_no_space(own_cluster: Callable[..., Cluster], doctor: Callable[..., Report]) -> None:
    cluster = own_cluster(size=1, options=["--quota-backend-bytes=16777216"])
    Admin(cluster).fill()
    report = doctor(cluster.endpoint)
    assert report.code == 1
    assert "NOSPACE" in report.about("etcd space")
    assert "to mend: etcdctl compact" in report.about("etcd space")


def test_users_rights_and_certificates(own_cluster: Callable[..., Cluster], doctor: Callable[..., Report]) -> None:
    cluster = own_cluster(size=1, tls=TLS)
    admin = Admin(cluster)
    admin.add_user("trainer", PASSWORD, prefix=f"{PREFIX}/")
    admin.add_user("visitor", PASSWORD)
    admin.enable_auth("root's")
    secure = f"protocol=https,cacert={DATA / 'ca.pem'}"
    password = {"ELASTIC_RS_ETCD_PASSWORD": PASSWORD}
    assert "user `trainer` may read and write" in doctor(
        cluster.endpoint, f"{secure},username=trainer", **password
    ).about("etcd rights")
    said = doctor(cluster.endpoint, f"{secure},username=visitor", **password).about("etcd rights")
    assert said.startswith("mend ")
    assert f"elastic readwrite {PREFIX}/; etcdctl user grant-role visitor elastic" in said
    for conf, text in (
        ("", "protocol=https"),
        (f"protocol=https,cacert={DATA / 'other-ca.pem'}", "cacert"),
    ):
        report = doctor(cluster.endpoint, conf)
        assert report.code == 1
        assert text in report.about("endpoint")
    assert "give `username` and `password_file`" in doctor(cluster.endpoint, secure).about("etcd rights")
    wrong = doctor(cluster.endpoint, f"{secure},username=trainer", ELASTIC_RS_ETCD_PASSWORD="battery staple")
    assert wrong.code == 1
    assert "battery" not in "\n".join(wrong.lines)
    assert "password" in wrong.about("endpoint")
