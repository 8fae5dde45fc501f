"""Members of the cluster that end, stand still, come back, or are replaced, under running jobs."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster, Member
from helpers.etcd import (
    LEASE_S,
    SHORT_CONF,
    SHORT_LEASE_S,
    Nodes,
    held_for_a_lease,
    place,
    skip_where_reads_may_be_stale,
    undisturbed,
)
from helpers.procs import Job, Process

LONG = pytest.mark.long


def chosen(cluster: Cluster, node: Process, which: str) -> Member:
    """Return the leader, a follower that the node is not connected to, or the member that it is connected to."""
    connected = cluster.serving(node.pid)
    if which == "connected":
        return connected
    if which == "leader":
        return cluster.leader()
    others = [member for member in cluster.followers() if member is not connected]
    return (others or cluster.followers())[0]


@pytest.mark.parametrize(
    ("which", "how"),
    [
        pytest.param("connected", "kill", marks=LONG),
        pytest.param("connected", "pause", marks=LONG),
        ("leader", "kill"),
        pytest.param("leader", "pause", marks=LONG),
        pytest.param("follower", "kill", marks=LONG),
        pytest.param("follower", "pause", marks=LONG),
    ],
)
def test_a_member_that_is_lost_disturbs_nobody(
    *, own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path, which: str, how: str
) -> None:
    done, cluster = tmp_path / "done", own_cluster()
    both = nodes.world((2, 3), cluster.endpoint, "--until", done)
    victim = chosen(cluster, both[0], which)
    with undisturbed(job, *both):
        getattr(victim, how)()
        took_s = cluster.until_renewed()
        print(f"{which}, {how}: the next renewal after {took_s:.2f} s")
        held_for_a_lease(cluster, len(both), election_s=2 * (which != "follower"))
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


@pytest.mark.parametrize("outage_s", [LEASE_S + 3, pytest.param(30, marks=LONG)])
def test_without_a_quorum_workers_run_on_and_joins_wait(
    own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path, outage_s: int
) -> None:
    done, cluster = tmp_path / "done", own_cluster()
    both = nodes.world((2, 3), cluster.endpoint, "--until", done, nnodes="2:3")
    lost = [cluster.serving(both[0].pid)]
    lost += [member for member in cluster.members if member not in lost][:1]
    began = time.monotonic()
    with undisturbed(job, *both):
        for member in lost:
            member.kill()
        third = nodes.start(4, cluster.endpoint, "--until", done, nnodes="2:3")
        third.line(r"etcd at 127\.0\.0\.1:")  # it says what it waits for
        time.sleep(max(0.0, began + outage_s - time.monotonic()))  # the outage
        assert third.running
        assert not [line for line in third.lines if line.startswith("WORKER ")]
    marks = [node.mark() for node in both]
    for member in lost:
        member.start()
    cluster.until_healthy()
    began = time.monotonic()
    place(third, 3)
    print(f"a join after the outage of {outage_s} s took {time.monotonic() - began:.2f} s")
    for node, mark in zip(both, marks, strict=True):
        place(node, 3, since=mark)
    done.touch()
    assert [node.wait() for node in (*both, third)] == [0, 0, 0]


@pytest.mark.parametrize("outage_s", [2 * SHORT_LEASE_S, pytest.param(30, marks=LONG)])
def test_a_silent_majority_stops_workers_at_the_end_of_their_lease(
    *, own_cluster: Callable[..., Cluster], program: str, nodes: Nodes, job: Job, tmp_path: Path, outage_s: int
) -> None:
    skip_where_reads_may_be_stale(program)
    done, cluster = tmp_path / "done", own_cluster()
    args: list[str | Path] = ["--until", done, "--lock", tmp_path / "lock"]
    both = nodes.world((2, 3), cluster.endpoint, *args, conf=SHORT_CONF)
    going_on = nodes.world(
        (4, 5), cluster.endpoint, "--until", done, conf=SHORT_CONF, more="on_partition=continue", run_id="continue"
    )
    workers = [pid for node in both for pid in job.workers(node).values()]
    marks = [node.mark() for node in both]
    with undisturbed(job, *going_on):
        paused = cluster.members[:2]
        began = time.monotonic()
        for member in paused:
            member.pause()
        job.until_gone(*workers)
        took_s = time.monotonic() - began
        print(f"workers ended {took_s:.2f} s after the majority of members was stopped")
        # A leader renews leases until it knows that it has lost the others, after 2 s at most.
        assert took_s < SHORT_LEASE_S + 3
        time.sleep(max(0.0, began + outage_s - time.monotonic()))  # the outage
        for member in paused:
            member.resume()
    for node, mark in zip(both, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in (*both, *going_on)] == [0, 0, 0, 0]
    assert "TWO WORLDS" not in "\n".join(line for node in both for line in node.lines)


@LONG
def test_a_member_may_be_replaced(own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path) -> None:
    done, cluster = tmp_path / "done", own_cluster()
    both = nodes.world((2, 3), cluster.endpoint, "--until", done)
    with undisturbed(job, *both):
        Admin(cluster).replace(cluster.serving(both[0].pid))
        held_for_a_lease(cluster, len(both))
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


@LONG
@pytest.mark.timeout(1200)
def test_twenty_rolling_restarts_of_the_cluster_start_no_round(
    own_cluster: Callable[..., Cluster], nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    done, cluster = tmp_path / "done", own_cluster()
    conf = "last_call_timeout=5"  # the default lease, 15 s
    eight = nodes.world(range(2, 10), cluster.endpoint, "--until", done, conf=conf)
    with undisturbed(job, *eight):
        for _ in range(20):
            for member in cluster.members:
                member.kill()
                member.start()
                cluster.until_healthy()
        held_for_a_lease(cluster, len(eight), 15)
    done.touch()
    assert [node.wait() for node in eight] == [0] * len(eight)
