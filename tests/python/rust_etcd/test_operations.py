"""What may happen to a cluster under running jobs: compaction, a full quota, tokens that end, certificates, clocks."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster
from helpers.etcd import (
    CONF,
    DATA,
    MUTUAL_TLS,
    PREFIX,
    SHORT_CONF,
    SHORT_LEASE_S,
    Nodes,
    held_for_a_lease,
    place,
    undisturbed,
)
from helpers.procs import Job

QUOTA = "--quota-backend-bytes=16777216"
PASSWORD = "correct horse"
CLOCK = Path(__file__).parents[1] / "helpers" / "clock.c"


def test_compaction_loses_no_news(cluster: Cluster, admin: Admin, nodes: Nodes, job: Job, tmp_path: Path) -> None:
    done, run_id = tmp_path / "done", "compacted"
    both = nodes.world((2, 3), cluster.endpoint, "--until", done, run_id=run_id)
    with undisturbed(job, *both):
        for number in range(50):
            admin.put("other/key", str(number).encode())
            admin.compact()
    marks = [node.mark() for node in both]
    os.kill(job.workers(both[0]).popitem()[1], signal.SIGKILL)
    for node, mark in zip(both, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_joins_lose_nothing_to_compaction(
    own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path
) -> None:
    done, cluster, stop = tmp_path / "done", own_cluster(), threading.Event()
    admin = Admin(cluster)

    def compact() -> None:
        while not stop.wait(0.1):
            admin.compact()

    compacting = threading.Thread(target=compact)
    compacting.start()
    try:
        # The guest's host leaves a hundred times.
        how: dict[str, Any] = {"nnodes": "1:2", "restarts": 1000, "conf": f"{CONF},rejoin_limit=0"}
        stays = nodes.start(2, cluster.endpoint, "--until", done, **how)
        place(stays, 1)
        for number in range(100):
            mark = stays.mark()
            guest = nodes.start(3, cluster.endpoint, "--until", done, name=f"guest{number}", **how)
            place(guest, 2)
            place(stays, 2, since=mark)
            mark = stays.mark()
            guest.signal(signal.SIGTERM)
            assert guest.wait() == 143
            place(stays, 1, since=mark)
        done.touch()
        assert stays.wait() == 0
    finally:
        stop.set()
        compacting.join()


def test_a_full_quota_stops_joins_and_no_job(
    own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    done, cluster = tmp_path / "done", own_cluster(options=[QUOTA])
    admin = Admin(cluster)
    both = nodes.world((2, 3), cluster.endpoint, "--until", done, nnodes="2:3", conf=SHORT_CONF)
    with undisturbed(job, *both):
        admin.fill()
        assert "NOSPACE" in admin.alarms()
        third = nodes.start(4, cluster.endpoint, "--until", done, nnodes="2:3", conf=SHORT_CONF)
        said = third.line(r"NOSPACE|database space exceeded").string
        print(said)
        assert "etcdctl" in said, "what to do"
        held_for_a_lease(cluster, len(both), SHORT_LEASE_S)
        assert third.running
    marks = [node.mark() for node in both]
    admin.make_room()
    began = time.monotonic()
    place(third, 3)
    print(f"the join was done {time.monotonic() - began:.2f} s after the alarm had been taken back")
    for node, mark in zip(both, marks, strict=True):
        place(node, 3, since=mark)
    done.touch()
    assert [node.wait() for node in (*both, third)] == [0, 0, 0]


def test_tokens_that_end_disturb_nobody(
    own_cluster: Callable[..., Cluster], program: str, nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    flag = "--auth-token-ttl"
    result = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    if flag not in result.stdout + result.stderr:
        pytest.skip(f"this etcd has no {flag}")
    done, secret, cluster = tmp_path / "done", tmp_path / "password", own_cluster(options=[f"{flag}=2"])
    secret.write_text(f"{PASSWORD}\n")
    admin = Admin(cluster)
    admin.add_user("trainer", PASSWORD, prefix=f"{PREFIX}/")
    root = admin.enable_auth("root's")
    how = {"more": f"username=trainer,password_file={secret}"}
    both = nodes.world((2, 3), cluster.endpoint, "--until", done, **how)
    with undisturbed(job, *both):
        # The next member has never seen the user, and each member forgets tokens by itself.
        cluster.serving(both[0].pid).kill()
        cluster.leader()
        time.sleep(9)  # a lease, after the election
        assert len(root.keys(f"{PREFIX}/job/nodes/")) == 2
    marks = [node.mark() for node in both]
    os.kill(job.workers(both[0]).popitem()[1], signal.SIGKILL)
    for node, mark in zip(both, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in both] == [0, 0]
    assert not [line for node in both for line in node.lines if PASSWORD in line]


def test_certificates_name_the_user(own_cluster: Callable[..., Cluster], nodes: Nodes, tmp_path: Path) -> None:
    done, cluster = tmp_path / "done", own_cluster(size=1, tls=MUTUAL_TLS)
    admin = Admin(cluster)
    admin.add_user("trainer", "", prefix=f"{PREFIX}/")
    admin.enable_auth("root's")
    own = {"cert": DATA / "trainer.pem", "key": DATA / "trainer.key"}
    # The spellings of PyTorch's `etcd`, and those of its `etcd-v2`.
    first = {"protocol": "https", "cacert": DATA / "ca.pem", **own}
    second = {"ca_cert": DATA / "ca.pem", "ssl_cert": own["cert"], "ssl_cert_key": own["key"]}
    both = [
        nodes.start(number, endpoint, "--until", done, more=",".join(f"{key}={value}" for key, value in conf.items()))
        for number, endpoint, conf in ((2, cluster.endpoint, first), (3, f"https://{cluster.endpoint}", second))
    ]
    for node in both:
        place(node, 2)
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


def test_clocks_that_differ_and_jump_disturb_nobody(cluster: Cluster, nodes: Nodes, job: Job, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library, done = tmp_path / "clock.so", tmp_path / "done"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, CLOCK, "-ldl"], check=True)
    both = []
    for number, offset_s in ((2, 3600), (3, -3600)):
        offset = tmp_path / f"offset{number}"
        offset.write_text(f"{offset_s}\n")
        env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
        both.append(nodes.start(number, cluster.endpoint, "--until", done, run_id="clocks", conf=SHORT_CONF, env=env))
    for node in both:
        place(node, 2)
    with undisturbed(job, *both):
        (tmp_path / "offset2").write_text("-3600\n")
        (tmp_path / "offset3").write_text("3600\n")
        held_for_a_lease(cluster, len(both), SHORT_LEASE_S, run_id="clocks")
    done.touch()
    assert [node.wait() for node in both] == [0, 0]
