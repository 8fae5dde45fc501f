"""Jobs on an etcd cluster that nothing disturbs, and losses of nodes."""

import contextlib
import os
import signal
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster
from helpers.etcd import LEASE_S, PREFIX, SHORT_CONF, SHORT_LEASE_S, Nodes, node_keys
from helpers.procs import Job
from helpers.workers import place

RUN_LEASE_S = 7200
AGENTS = pytest.mark.parametrize("by", ["run", pytest.param("rust", marks=pytest.mark.torchrun)])


def test_a_job_leaves_only_its_state_and_that_not_for_long(
    cluster: Cluster, admin: Admin, nodes: Nodes, tmp_path: Path
) -> None:
    # Any member will do, and no node needs to know all of them.
    done, run_id = tmp_path / "done", "team/ä 100%"
    below = f"{PREFIX}/{quote(run_id, safe='')}/"
    leases = set(admin.leases())
    job = [
        nodes.start(number, endpoint, "--until", done, run_id=run_id)
        for number, endpoint in ((2, cluster.members[0].endpoint), (3, cluster.endpoint))
    ]
    assert {place(node, 2)["rank"] for node in job} == {"0", "1"}
    keys = {key.key.removeprefix(below): key for key in admin.keys(below)}
    own = [name for name in keys if name != "state"]
    assert len(own) == 2
    assert all(name.startswith("nodes/") and len(name) == len("nodes/") + 32 for name in own)
    assert {admin.ttl_s(keys[name].lease)[0] for name in own} == {LEASE_S}
    assert admin.ttl_s(keys["state"].lease)[0] == RUN_LEASE_S
    done.touch()
    assert [node.wait() for node in job] == [0, 0]
    (left,) = admin.keys(below)
    assert left.key == f"{below}state"
    assert {*admin.leases()} - leases == {left.lease}
    admin.revoke(left.lease)  # as its end in two hours does
    assert not admin.keys(below)
    assert {*admin.leases()} <= leases


@AGENTS
def test_a_failed_worker_restarts_the_world(cluster: Cluster, nodes: Nodes, job: Job, tmp_path: Path, by: str) -> None:
    done, run_id = tmp_path / "done", f"failed-{by}"
    both = nodes.world((2, 3), cluster.endpoint, "--until", done, run_id=run_id, by=by)
    marks = [node.mark() for node in both]
    os.kill(job.workers(both[1]).popitem()[1], signal.SIGKILL)
    for node, mark in zip(both, marks, strict=True):
        assert place(node, 2, since=mark)["restarts"] == "1"
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


def test_a_failure_without_restarts_left_is_every_nodes_end(cluster: Cluster, nodes: Nodes) -> None:
    both = [nodes.start(number, cluster.endpoint, "--raise=1", run_id="raises", restarts=0) for number in (2, 3)]
    assert [node.wait() for node in both] == [1, 1]
    for node in both:
        assert "ValueError: the sky fell" in "\n".join(node.lines)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_the_others_go_on_without_a_node(
    cluster: Cluster, admin: Admin, nodes: Nodes, tmp_path: Path, how: signal.Signals
) -> None:
    done, run_id = tmp_path / "done", f"lost-{how.name}"
    worker: list[str | Path] = ["--until", done, "--lock", tmp_path / "lock"]
    stays, goes = nodes.world((2, 3), cluster.endpoint, *worker, run_id=run_id, nnodes="1:2", conf=SHORT_CONF)
    mark = stays.mark()
    goes.signal(how)
    began = time.monotonic()
    place(stays, 1, since=mark)
    took_s = time.monotonic() - began
    print(f"{how.name}: a world without the node after {took_s:.2f} s")
    # A node that is asked to end says goodbye. One that is killed is lost when its lease has ended.
    assert goes.wait() == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    assert took_s < SHORT_LEASE_S or how == signal.SIGKILL
    assert len(node_keys(admin, run_id)) == 1
    again = nodes.start(3, cluster.endpoint, *worker, run_id=run_id, nnodes="1:2", conf=SHORT_CONF, name="again")
    place(again, 2)
    done.touch()
    assert [node.wait() for node in (stays, again)] == [0, 0]
    assert "TWO WORLDS" not in "\n".join([*stays.lines, *goes.lines, *again.lines])


def test_a_node_that_stood_still_stops_its_workers_before_it_joins_again(
    cluster: Cluster, nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    # A container that was frozen, a laptop that slept. The others have had a world of their own meanwhile.
    done = tmp_path / "done"
    stays, frozen = nodes.world(
        (2, 3), cluster.endpoint, "--until", done, run_id="frozen", nnodes="1:2", conf=SHORT_CONF
    )
    mark, workers = stays.mark(), job.workers(frozen)
    (worker,) = workers.values()
    family = [frozen.pid, *_below(frozen.pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        place(stays, 1, since=mark)
    finally:
        mark, frozen_mark = stays.mark(), frozen.mark()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):  # the agent, which is the first, has ended it already
                os.kill(pid, signal.SIGCONT)
    place(frozen, 2, since=frozen_mark)
    place(stays, 2, since=mark)
    job.until_gone(worker)
    done.touch()
    assert [node.wait() for node in (stays, frozen)] == [0, 0]
    after = frozen.lines[frozen_mark:]
    stopped = next(i for i, line in enumerate(after) if "could not renew its lease" in line)
    started = next(i for i, line in enumerate(after) if line.startswith("WORKER "))
    assert stopped < started, after


def _below(pid: int) -> list[int]:
    """Return the descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_below(child)]
    return found


def test_jobs_under_other_prefixes_do_not_meet(cluster: Cluster, admin: Admin, nodes: Nodes, tmp_path: Path) -> None:
    done = tmp_path / "done"
    jobs = {
        prefix: nodes.start(
            2, cluster.endpoint, "--until", done, nnodes="1:2", run_id="same", more=f"{key}={prefix}", name=key
        )
        for key, prefix in (("key_prefix", "/here"), ("etcd_prefix", "/there"))
    }
    for prefix, node in jobs.items():
        place(node, 1)
        assert len(node_keys(admin, "same", prefix)) == 1
    done.touch()
    assert [node.wait() for node in jobs.values()] == [0, 0]
