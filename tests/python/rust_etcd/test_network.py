"""Faults of the network between nodes and members, and between members."""

import time
from pathlib import Path

import pytest
from helpers.etcd import (
    LEASE_S,
    SHORT_CONF,
    SHORT_LEASE_S,
    Nodes,
    Relayed,
    held_for_a_lease,
    place,
    undisturbed,
)
from helpers.procs import Job


def test_a_cluster_that_falls_silent_stops_workers_at_the_end_of_their_lease(
    relayed: Relayed, nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    done, endpoint = tmp_path / "done", relayed.cluster.endpoint
    args: list[str | Path] = ["--until", done, "--lock", tmp_path / "lock"]
    both = nodes.world((2, 3), endpoint, *args, conf=SHORT_CONF)
    going_on = nodes.world(
        (4, 5), endpoint, "--until", done, conf=SHORT_CONF, more="on_partition=continue", run_id="continue"
    )
    workers = [pid for node in both for pid in job.workers(node).values()]
    marks = [node.mark() for node in both]
    with undisturbed(job, *going_on):
        began = time.monotonic()
        for relay in relayed.clients:
            relay.silence()
        job.until_gone(*workers)
        took_s = time.monotonic() - began
        print(f"workers ended {took_s:.2f} s after the silence began; their lease is {SHORT_LEASE_S} s")
        assert took_s < SHORT_LEASE_S + 1
    relayed.heal()
    for node, mark in zip(both, marks, strict=True):
        place(node, 2, since=mark)
    done.touch()
    assert [node.wait() for node in (*both, *going_on)] == [0, 0, 0, 0]
    assert "TWO WORLDS" not in "\n".join(line for node in both for line in node.lines)


def test_the_other_nodes_of_a_node_that_is_cut_off_go_on(
    relayed: Relayed, nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    # The members see each other, and one node sees none of them.
    done = tmp_path / "done"
    args: list[str | Path] = ["--until", done, "--lock", tmp_path / "lock"]
    direct = ",".join(f"127.0.0.1:{member.client}" for member in relayed.cluster.members)
    how = {"nnodes": "1:2", "conf": SHORT_CONF}
    cut_off = nodes.start(2, relayed.cluster.endpoint, *args, **how)  # type: ignore[arg-type]
    stays = nodes.start(3, direct, *args, **how)  # type: ignore[arg-type]
    for node in (cut_off, stays):
        place(node, 2)
    workers = job.workers(cut_off)
    mark, cut_off_mark = stays.mark(), cut_off.mark()
    for relay in relayed.clients:
        relay.silence()
    place(stays, 1, since=mark)
    assert not {*workers.values()} & {*job.pids()}, "the others went on before the node's workers had ended"
    mark = stays.mark()
    relayed.heal()
    place(cut_off, 2, since=cut_off_mark)
    place(stays, 2, since=mark)
    done.touch()
    assert [node.wait() for node in (cut_off, stays)] == [0, 0]
    assert "TWO WORLDS" not in "\n".join([*cut_off.lines, *stays.lines])


def test_a_member_in_the_minority_disturbs_nobody(relayed: Relayed, nodes: Nodes, job: Job, tmp_path: Path) -> None:
    done, cluster = tmp_path / "done", relayed.cluster
    both = nodes.world((2, 3), cluster.endpoint, "--until", done)
    with undisturbed(job, *both):
        relayed.isolate(cluster.serving(both[0].pid))
        held_for_a_lease(cluster, len(both))
    done.touch()
    assert [node.wait() for node in both] == [0, 0]


def test_a_lease_counts_from_the_question_and_not_from_a_late_answer(
    relayed: Relayed, nodes: Nodes, job: Job, tmp_path: Path
) -> None:
    # Answers are late, and then there are none: the last renewal that can count was asked before the last answer left.
    delay_s = 1.5
    done = tmp_path / "done"
    both = nodes.world((2, 3), relayed.cluster.endpoint, "--until", done)
    workers = [pid for node in both for pid in job.workers(node).values()]
    with undisturbed(job, *both):
        for relay in relayed.clients:
            relay.delay(delay_s)
        held_for_a_lease(relayed.cluster, len(both))
    began = time.monotonic()
    for relay in relayed.clients:
        relay.silence()
    job.until_gone(*workers)
    took_s = time.monotonic() - began
    print(
        f"workers ended {took_s:.2f} s after the silence began; the lease is {LEASE_S} s, answers were {delay_s} s late"
    )
    assert took_s < LEASE_S - delay_s + 1
    job.kill_leftovers()


@pytest.mark.long
@pytest.mark.parametrize("which", ["connected", "all"])
def test_connections_that_break_again_and_again_disturb_nobody(
    relayed: Relayed, nodes: Nodes, job: Job, tmp_path: Path, which: str
) -> None:
    done, cluster = tmp_path / "done", relayed.cluster
    both = nodes.world((2, 3), cluster.endpoint, "--until", done)
    with undisturbed(job, *both):
        until = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < until:
            if which == "all":
                for relay in relayed.clients:
                    relay.end()
            else:
                relayed.relays.at(cluster.serving(both[0].pid).client_seen).end()
            time.sleep(0.3)  # between two faults
        held_for_a_lease(cluster, len(both))
    done.touch()
    assert [node.wait() for node in both] == [0, 0]
