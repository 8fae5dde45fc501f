"""Workers that survive a change of their world: `elastic_rs.elastic` with real nodes, and gloo."""

import functools
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.first_steps import first_steps
from helpers.procs import Job, Process

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]

STEPS = SCRIPTS / "steps.py"
COMMIT_EVERY = 5  # its default
WAITS = SCRIPTS / "waits.py"
ELASTIC_RS = Path(sys.executable).parent / "elastic-rs"
# A lease of 2 s.
SHORT_LEASE = "last_call_timeout=1,settle_timeout=0.2,keep_alive_interval=0.5,keep_alive_max_attempt=4"
LONG = pytest.mark.long
run_alone = pytest.mark.parametrize("agent", ["run"], indirect=True)

World = dict[str, int]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """Return the file whose existence ends the job well."""
    return tmp_path / "done"


def world_of(node: Process, size: int, *, since: int = 0, rank: str = r"\d+") -> World:
    """Wait until a worker of the node is in a world of that size. Return what it says."""
    found = node.line(rf"WORLD rank={rank} world={size} .*", since=since).group()
    return {name: int(value) for name, value in (word.split("=") for word in found.split()[1:])}


def worlds_of(node: Process, size: int, *, workers: int, since: int = 0) -> dict[int, World]:
    """Wait until that many workers of the node are in a world of that size. Return what they say, by rank."""
    found: dict[int, World] = {}
    while len(found) < workers:
        others = "|".join(map(str, found)) or "x"
        it = world_of(node, size, since=since, rank=rf"(?!(?:{others}) )\d+")
        found[it["rank"]] = it
    return found


def pids(worlds: dict[int, World]) -> dict[int, int]:
    return {rank: world["pid"] for rank, world in worlds.items()}


def until_step(node: Process, beyond: int = 20, *, since: int = 0, world: int | None = None) -> int:
    """Wait for a step at which something has been committed."""
    pattern = rf"STEP (\d+) .* world={world or '[0-9]+'} "
    return int(node.line(pattern, since=since, where=lambda found: int(found[1]) >= beyond)[1])


def until_commit(node: Process) -> int:
    """Wait for a step beyond a commit. Return the step of the last commit that all workers have made by then.

    A worker that has made a step has the numbers of all others, which had made the step before and its commit.
    """
    return (until_step(node) - 1) // COMMIT_EVERY * COMMIT_EVERY


def committed_worlds(
    start: Start, done: Path, *flags: str
) -> tuple[tuple[Process, dict[int, World]], tuple[Process, dict[int, World]], int]:
    """Start two nodes of two workers, and wait for a commit.

    Returns:
        The node with rank 0 and what its workers say of their world, the same of the other node, and the commit's step.
    """
    nodes = [start(number, "--until", done, *flags, nnodes="2", nproc=2, script=STEPS) for number in (2, 3)]
    before = [worlds_of(node, 4, workers=2) for node in nodes]
    committed = until_commit(nodes[0])
    first, second = sorted(zip(nodes, before, strict=True), key=lambda it: min(it[1]))
    return first, second, committed


def worlds_after_a_kill(nodes: list[Process]) -> tuple[list[dict[int, World]], int, int]:
    """Kill one of the second node's two workers. The other three live on.

    Returns:
        The next world as each node's workers see it, the rank of the worker that was killed, and the step of the last
        commit before.
    """
    before = [worlds_of(node, 4, workers=2) for node in nodes]
    committed = until_commit(nodes[0])
    marks = [node.mark() for node in nodes]
    victim, other = sorted(before[1])
    os.kill(before[1][victim]["pid"], signal.SIGKILL)
    after = [worlds_of(node, 4, workers=2, since=mark) for node, mark in zip(nodes, marks, strict=True)]
    assert pids(after[0]) == pids(before[0])
    assert after[1][other]["pid"] == before[1][other]["pid"]
    assert after[1][victim]["pid"] != before[1][victim]["pid"]
    return after, victim, committed


def ended_well(done: Path, *nodes: Process) -> None:
    done.touch()
    assert [node.wait() for node in nodes] == [0] * len(nodes), "\n".join(node.tail() for node in nodes)


def assert_nothing_was_restarted(*nodes: Process) -> None:
    assert not [line for node in nodes for line in node.lines if "restarting all workers" in line]


def started_ahead(node: Process, next_round: int = 2) -> list[int]:
    """Return the workers that the node has started before it had its place in that round."""
    lines = node.lines
    placed = next(at for at, line in enumerate(lines) if re.search(rf" round {next_round}: rank \d+ of ", line))
    found = re.compile(r"is started again now, so that it is ready when the next round begins: .*")
    before = [match.group() for line in lines[:placed] if (match := found.search(line))]
    return [int(pid) for text in before for pid in re.findall(r"with pid (\d+)", text)]


@pytest.mark.parametrize(
    ("agent", "own_group"),
    [("run", False), ("rust", True), *(pytest.param(*case, marks=LONG) for case in (("run", True), ("rust", False)))],
    indirect=["agent"],
)
def test_the_others_survive_a_killed_worker(start: Start, done: Path, port: int, own_group: bool) -> None:
    flags: list[Any] = ["--until", done, *(["--own-group"] if own_group else [])]
    nodes = [start(number, *flags, nnodes="2", nproc=2, script=STEPS) for number in (2, 3)]
    after, victim, committed = worlds_after_a_kill(nodes)
    every = [world for worlds in after for world in worlds.values()]
    # Back to a commit, the same on all, and at the cost of one restart.
    assert len({world["step"] for world in every}) == 1
    assert every[0]["step"] >= committed
    assert every[0]["step"] % COMMIT_EVERY == 0
    assert {world["restarts"] for world in every} == {1}
    assert_nothing_was_restarted(*nodes)
    # Workers that live on tell the first step of the new world, and what they make again after the commit.
    for output in first_steps(port, 2, nodes=2):
        assert output["step"] == every[0]["step"] + 1
        # A worker may have been killed or freed in the step of a commit that another one has made.
        assert every[0]["step"] - 1 <= output["step_before"] <= every[0]["step"] + 5
        assert output["step_time_us"] >= 20_000
    # Its successor was started before the next round, if that took no longer than a second, and if the script does not
    # need its place from the start.
    assert set(started_ahead(nodes[1])) <= (set() if own_group else {after[1][victim]["pid"]})
    assert started_ahead(nodes[0]) == []
    ended_well(done, *nodes)
    # No step was lost or counted twice.
    ends = {line for node in nodes for line in node.lines if line.startswith("DONE")}
    assert len(ends) == 1
    steps, ones = (int(word.split("=")[1]) for word in ends.pop().split()[1:])
    assert ones == 4 * steps


def standby_of(node: Process, *, since: int = 0) -> int:
    """Wait until a standby of the node waits for a place. Return its process id."""
    pid = int(node.line(r"a standby starts, with pid (\d+)", since=since)[1])
    node.line("a standby waits for the place of a worker that fails", since=since)
    return pid


@pytest.mark.parametrize("agent", ["run", "rust"], indirect=True)
def test_a_standby_takes_the_place_of_a_killed_worker(start: Start, job: Job, done: Path) -> None:
    conf = "last_call_timeout=1,standby=1"
    nodes = [start(number, "--until", done, nnodes="2", nproc=2, script=STEPS, conf=conf) for number in (2, 3)]
    expected = [standby_of(node) for node in nodes][1]
    marks = [node.mark() for node in nodes]
    after, victim, committed = worlds_after_a_kill(nodes)
    for again in (True, False):  # the second time it is the former standby that is killed
        assert after[1][victim]["pid"] == expected
        assert len({world["step"] for worlds in after for world in worlds.values()}) == 1
        assert after[1][victim]["step"] >= committed
        nodes[1].line(rf"the standby with pid {expected} takes the place of local rank \d", since=marks[1])
        expected = standby_of(nodes[1], since=marks[1])  # it is replaced
        if again:
            marks, committed = [node.mark() for node in nodes], after[1][victim]["step"]
            os.kill(after[1][victim]["pid"], signal.SIGKILL)
            after = [worlds_of(node, 4, workers=2, since=mark) for node, mark in zip(nodes, marks, strict=True)]
    until_step(nodes[0], since=marks[0])
    ended_well(done, *nodes)
    assert all(started_ahead(node) == [] for node in nodes)
    assert_nothing_was_restarted(*nodes)
    ends = {line for node in nodes for line in node.lines if line.startswith("DONE")}
    steps, ones = (int(word.split("=")[1]) for word in ends.pop().split()[1:])
    assert (ends, ones) == (set(), 4 * steps), "standbys are in no count"
    assert job.workers() == {}


@run_alone
def test_a_standby_of_a_script_that_makes_its_process_group_is_not_started(start: Start, done: Path) -> None:
    conf = "last_call_timeout=1,standby=1"
    node = start(2, "--until", done, "--own-group", nnodes="1", nproc=2, script=STEPS, conf=conf)
    worlds = worlds_of(node, 2, workers=2)
    until_step(node)
    mark = node.mark()
    os.kill(worlds[1]["pid"], signal.SIGKILL)
    worlds_of(node, 2, workers=2, since=mark)
    node.line("the script makes its process group itself, into which a standby would come: there are no more standbys")
    assert not [line for line in node.lines if "a standby starts" in line]
    ended_well(done, node)


@run_alone
def test_a_standby_that_ends_before_its_place_costs_the_job_nothing(start: Start, done: Path) -> None:
    conf = "last_call_timeout=1,standby=2"
    node = start(2, "--until", done, nnodes="1", nproc=1, script=STEPS, conf=conf)
    node.line("--standby is 2, and this node has 1 workers: it keeps 1 standbys")
    pid = standby_of(node)
    os.kill(pid, signal.SIGKILL)
    node.line(rf"the standby with pid {pid} has ended \(SIGKILL.*\); another one is started")
    until_step(node)
    ended_well(done, node)
    assert {world["restarts"] for world in worlds_of(node, 1, workers=1).values()} == {0}


@run_alone
def test_a_standby_needs_workers_that_change_in_place(start: Start, done: Path) -> None:
    conf = "last_call_timeout=1,standby=1,in_place=off"
    node = start(2, "--until", done, nnodes="1", nproc=1, script=STEPS, conf=conf)
    node.line("--standby=1 has no effect: the workers of this node cannot change in place")
    ended_well(done, node)


@LONG
@run_alone
def test_a_successor_that_fails_before_its_round_costs_one_restart(start: Start, done: Path) -> None:
    flags: list[Any] = ["--until", done, "--fail-at-restart", 1]
    nodes = [start(number, *flags, nnodes="2", nproc=2, script=STEPS) for number in (2, 3)]
    after, _, _ = worlds_after_a_kill(nodes)
    nodes[1].line("ended with exit code 1")
    assert {world["restarts"] for worlds in after for world in worlds.values()} == {2}
    assert len(started_ahead(nodes[1])) <= 1
    assert any("no such data set" in line for line in nodes[1].lines), nodes[1].tail()
    ended_well(done, *nodes)


@pytest.mark.parametrize("agent", ["rust", pytest.param("run", marks=LONG)], indirect=True)
@pytest.mark.parametrize("who", ["another", "the leader of a list"])
def test_a_node_joins_and_one_leaves_without_losing_a_step(
    start: Start, done: Path, endpoints: list[str], who: str
) -> None:
    flags: list[Any] = ["--until", done, "--commit-every", 1000]
    listed = who == "the leader of a list"
    endpoint = ",".join(endpoints) if listed else "127.0.0.1"
    node = functools.partial(start, nnodes="1:3", nproc=2, script=STEPS, endpoint=endpoint)
    leads = node(2, *flags)
    leads.line("this process leads the run" if listed else "hosts the coordinator")
    follows = node(3, *flags)
    if listed:
        follows.line("this process may lead the job")
    first, second = (follows, leads) if listed else (leads, follows)  # the second one leaves
    before = worlds_of(first, 4, workers=2) | worlds_of(second, 4, workers=2)
    until_step(first)
    marks = first.mark(), second.mark()
    third = node(4, *flags)
    third.line("the workers of this node are started before it joins")
    joined = worlds_of(third, 6, workers=2)
    after = worlds_of(first, 6, workers=2, since=marks[0]) | worlds_of(second, 6, workers=2, since=marks[1])
    assert pids(after) == pids(before)
    # Nothing has been committed, so nobody has gone back.
    reached = {world["step"] for world in (after | joined).values()}
    assert len(reached) == 1
    assert min(reached) >= 20
    until_step(third, max(reached) + 5)
    marks = first.mark(), third.mark()
    leaving = {world["pid"] for world in worlds_of(second, 6, workers=2).values()}
    second.signal(signal.SIGTERM)
    assert second.wait() in {-signal.SIGTERM, 128 + signal.SIGTERM}
    left = worlds_of(first, 4, workers=2, since=marks[0]) | worlds_of(third, 4, workers=2, since=marks[1])
    assert set(pids(left).values()) == {*pids(after | joined).values()} - leaving
    assert len({world["step"] for world in left.values()}) == 1
    assert {world["restarts"] for world in left.values()} == {0}
    assert_nothing_was_restarted(first, second, third)
    ended_well(done, first, third)
    counted = [line.split() for node in (first, third) for line in node.lines if line.startswith("STEP")]
    steps = {int(line[1]) for line in counted}
    assert steps == set(range(1, max(steps) + 1))
    assert len({(line[1], line[2]) for line in counted}) == len(steps), "each step was made once"


@run_alone
def test_a_new_node_with_failing_workers_ends_alone(start: Start, done: Path, tmp_path: Path) -> None:
    first = start(2, "--until", done, nnodes="1:2", nproc=1, script=STEPS, restarts=0)
    world_of(first, 1)
    at = until_step(first)
    (fails := tmp_path / "fails.py").write_text("raise ValueError('no such data set')\n")
    second = start(3, nnodes="1:2", nproc=2, script=fails, restarts=0)
    assert second.wait() == 1
    second.line("ended with exit code 1.*; this node had not joined yet, so it ends alone")
    assert any("no such data set" in line for line in second.lines), second.tail()
    until_step(first, at + 20)
    assert not any("the world is about to change" in line for line in first.lines), first.tail()
    ended_well(done, first)


@LONG
@run_alone
def test_a_spare_has_its_workers_ready(start: Start, done: Path) -> None:
    flags: list[Any] = ["--until", done]
    first = start(2, *flags, nnodes="2", nproc=1, script=STEPS)
    first.line("hosts the coordinator")
    second = start(3, *flags, nnodes="2", nproc=1, script=STEPS)
    before = world_of(first, 2)
    until_step(first)
    spare = start(4, *flags, nnodes="2", nproc=1, script=STEPS)
    spare.line("the workers of this node are started before it joins")
    spare.line("round 1 runs undisturbed")
    mark = first.mark()
    second.signal(signal.SIGKILL)
    after, stands_in = world_of(first, 2, since=mark), world_of(spare, 2)
    assert after["pid"] == before["pid"]
    assert after["step"] == stands_in["step"] > 0
    assert_nothing_was_restarted(first, spare)
    second.wait()
    ended_well(done, first, spare)


@run_alone
@pytest.mark.parametrize("who", ["agent", pytest.param("guard", marks=LONG)])
def test_the_others_survive_a_killed_agent_or_guard(start: Start, job: Job, done: Path, who: str) -> None:
    flags: list[Any] = ["--until", done]
    conf = "last_call_timeout=1,settle_timeout=0.2,reconnect_grace=60"
    nodes = [start(number, *flags, nnodes="1:2", nproc=1, script=STEPS, conf=conf) for number in (2, 3)]
    before = [world_of(node, 2) for node in nodes]
    committed = until_commit(nodes[0])
    host = next(i for i, node in enumerate(nodes) if any("hosts the coordinator" in line for line in node.lines))
    kept, lost = nodes[host], nodes[1 - host]
    mark = kept.mark()
    if who == "agent":
        lost.signal(signal.SIGKILL)
        lost.wait()
        after = world_of(kept, 1, since=mark)
        kept.line("is lost: its process has ended", since=mark)  # a connection refused proves it, and nobody waits
    else:
        guard = int(Path(f"/proc/{before[1 - host]['pid']}/stat").read_text().rpartition(")")[2].split()[1])
        assert guard != lost.pid
        os.kill(guard, signal.SIGKILL)
        after = world_of(kept, 2, since=mark)
        job.until_gone(before[1 - host]["pid"])
    assert after["pid"] == before[host]["pid"]
    assert after["step"] >= committed
    assert after["step"] % COMMIT_EVERY == 0
    ended_well(done, kept, *(() if who == "agent" else (lost,)))


@LONG
@run_alone
@pytest.mark.parametrize("phase", ["sync", "restore", "leave", "group", "grouped", "reset", "synced"])
def test_a_second_worker_may_be_killed_in_any_phase_of_a_change(start: Start, done: Path, phase: str) -> None:
    (node, ours), (other, theirs), committed = committed_worlds(start, done, "--die-in", phase)
    mark = other.mark()
    os.kill(theirs[3]["pid"], signal.SIGKILL)
    node.line(f"SIGKILL in {phase}")
    after = worlds_of(node, 4, workers=2, since=node.mark())
    assert after[0]["pid"] == ours[0]["pid"]
    assert after[1]["pid"] != ours[1]["pid"]
    assert len({world["step"] for world in after.values()}) == 1
    assert after[0]["step"] >= committed
    assert after[0]["step"] % COMMIT_EVERY == 0
    until_step(other, after[0]["step"] + 5, since=mark)
    assert_nothing_was_restarted(node, other)
    ended_well(done, node, other)


@LONG
@run_alone
def test_the_source_may_be_killed_while_the_successor_of_rank_0_gets_the_state(start: Start, done: Path) -> None:
    """The successor has the number of the source's commit by then, and its own initial state."""
    (node, ours), (other, theirs), committed = committed_worlds(start, done, "--die-in", "sync")
    marks = node.mark(), other.mark()
    os.kill(ours[0]["pid"], signal.SIGKILL)
    node.line("SIGKILL in sync")
    after = worlds_of(other, 4, workers=2, since=marks[1])
    assert pids(after) == pids(theirs)
    after |= worlds_of(node, 4, workers=2, since=marks[0])
    assert len({world["step"] for world in after.values()}) == 1
    assert after[2]["step"] >= committed > 0
    assert_nothing_was_restarted(node, other)
    ended_well(done, node, other)


@LONG
@run_alone
@pytest.mark.parametrize("phase", ["reset", "sync"])
def test_a_worker_that_hangs_while_a_world_is_formed_is_replaced_alone(start: Start, done: Path, phase: str) -> None:
    """A stopped process answers nobody. The others wait for it in collectives."""
    (node, ours), (other, theirs), committed = committed_worlds(start, done, "--hang-in", phase)
    os.kill(theirs[3]["pid"], signal.SIGKILL)
    node.line(f"SIGSTOP in {phase}")
    marks = [one.mark() for one in (node, other)]
    node.line("local rank 1 has not left its world within 30s, and is replaced")
    after = [worlds_of(one, 4, workers=2, since=mark) for one, mark in zip((node, other), marks, strict=True)]
    assert after[0][0]["pid"] == ours[0]["pid"]
    assert after[0][1]["pid"] != ours[1]["pid"]
    assert after[1][2]["pid"] == theirs[2]["pid"]
    assert {world["step"] >= committed > 0 for one in after for world in one.values()} == {True}
    assert_nothing_was_restarted(node, other)
    ended_well(done, node, other)


@LONG
@run_alone
def test_a_worker_that_does_not_leave_its_world_is_replaced_alone(start: Start, done: Path) -> None:
    flags: list[Any] = ["--until", done, "--stuck", "1"]
    node = start(2, *flags, nnodes="1", nproc=3, script=STEPS)
    before = worlds_of(node, 3, workers=3)
    until_step(node)
    mark = node.mark()
    os.kill(before[2]["pid"], signal.SIGKILL)
    node.line("local rank 1 has not left its world within 30s, and is replaced")
    after = worlds_of(node, 3, workers=3, since=mark)
    assert {rank for rank in range(3) if after[rank]["pid"] == before[rank]["pid"]} == {0}
    ended_well(done, node)


@run_alone
def test_a_node_that_stands_still_for_a_while_costs_the_others_no_process(start: Start, done: Path) -> None:
    """It is back before another round has formed, which needs it. Its own workers have to end."""
    nodes = [start(number, "--until", done, nnodes="2", script=STEPS, conf=SHORT_LEASE) for number in (2, 3)]
    before = [world_of(node, 2) for node in nodes]
    host = next(i for i, node in enumerate(nodes) if any("hosts the coordinator" in line for line in node.lines))
    kept, still = nodes[host], nodes[1 - host]
    committed = until_commit(kept)
    mark, mark_of_still = kept.mark(), still.mark()
    still.signal(signal.SIGSTOP)
    kept.line("the workers leave their world, and wait for the next: ", since=mark)
    still.signal(signal.SIGCONT)
    after = world_of(kept, 2, since=mark)
    assert after["pid"] == before[host]["pid"]
    assert after["step"] >= committed > 0
    assert after["step"] % COMMIT_EVERY == 0
    assert world_of(still, 2, since=mark_of_still)["pid"] != before[1 - host]["pid"]
    assert_nothing_was_restarted(kept)
    ended_well(done, *nodes)


@run_alone
def test_two_workers_of_a_node_that_die_in_one_instant_cost_the_other_node_no_process(start: Start) -> None:
    """The end of a worker's connection may be seen before the end of its process: it had used the interface."""
    nodes = [start(number, nnodes="2", nproc=2, restarts=1, script=WAITS) for number in (2, 3)]
    before = [worlds_of(node, 4, workers=2) for node in nodes]
    marks = [node.mark() for node in nodes]
    # The next world forms in milliseconds, which two signals may take on a loaded machine.
    nodes[1].signal(signal.SIGSTOP)
    for pid in pids(before[1]).values():
        os.kill(pid, signal.SIGKILL)
    nodes[1].signal(signal.SIGCONT)
    after = [worlds_of(node, 4, workers=2, since=mark) for node, mark in zip(nodes, marks, strict=True)]
    assert pids(after[0]) == pids(before[0])
    assert_nothing_was_restarted(*nodes)
    for node in nodes:
        node.signal(signal.SIGKILL)
        node.wait()


@run_alone
@pytest.mark.parametrize(
    ("kept", "state"), [(1, []), pytest.param(0, [], marks=LONG), pytest.param(1, ["--torch-state"], marks=LONG)]
)
def test_a_node_that_missed_a_round_does_not_bring_an_old_state_back(
    start: Start, job: Job, tmp_path: Path, kept: int, state: list[str]
) -> None:
    """The others are lost after they have begun again from the checkpoint, and a new node comes.

    Args:
        kept: the rank of the node that misses a round.
        state: options of the script.
    """
    done, checkpoint = tmp_path / "done", tmp_path / "checkpoint"
    serve = job.start(
        [str(ELASTIC_RS), "store", "serve", "--host=127.0.0.1", "--port=0"], env={"ELASTIC_RS_LOG": "info"}
    )
    endpoint = f"127.0.0.1:{serve.line(r'listening on 127.0.0.1:([0-9]+)')[1]}"

    def begin(number: int, every: int = 100) -> Process:
        flags = ["--until", done, *state, "--checkpoint", checkpoint, f"--checkpoint-every={every}", "--pause=0.01"]
        return start(number, *flags, nnodes="2", script=STEPS, conf=SHORT_LEASE, endpoint=endpoint)

    def lose(*nodes: Process) -> None:
        for node in nodes:
            node.signal(signal.SIGKILL)
            node.wait()

    first = [begin(number, every=1000) for number in (2, 3)]
    ranks = [world_of(node, 2)["rank"] for node in first]
    until_step(first[0], beyond=76)
    missing = first[ranks.index(kept)]
    mark = missing.mark()
    lose(first[ranks.index(1 - kept)])
    # Its worker has gone back to its commit, and waits for a world of two nodes.
    serve.line("round 2 has 1 of at least 2 nodes")
    missing.signal(signal.SIGSTOP)
    serve.line("is lost: silent for ")
    others = [begin(number) for number in (4, 5)]
    assert {world_of(node, 2)["step"] for node in others} == {0}
    until_step(others[0], beyond=120)
    lose(*others)
    missing.signal(signal.SIGCONT)
    new = begin(6)
    began = [world_of(node, 2, since=at)["step"] for node, at in ((missing, mark), (new, 0))]
    assert began == [100, 100], "120 steps were committed, and the checkpoint has 100"
    ended_well(done, missing, new)
    serve.signal(signal.SIGTERM)
    serve.wait()


@run_alone
def test_programs_that_do_not_use_it_are_restarted_with_those_that_do(start: Start, done: Path) -> None:
    nodes = [
        start(number, "--until", done, *flags, nnodes="2", nproc=1, script=STEPS)
        for number, flags in ((2, []), (3, ["--deaf"]))
    ]
    before = [world_of(node, 2) for node in nodes]
    until_step(nodes[0])
    marks = [node.mark() for node in nodes]
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = [world_of(node, 2, since=mark) for node, mark in zip(nodes, marks, strict=True)]
    assert [world["step"] for world in after] == [0, 0]
    assert after[0]["pid"] != before[0]["pid"]
    nodes[0].line("restarting all workers: ")
    ended_well(done, *nodes)


@LONG
@run_alone
def test_in_place_off_restarts_all(start: Start, done: Path) -> None:
    node = start(2, "--until", done, nnodes="1", nproc=2, script=STEPS, options=["--in-place=off"])
    before = worlds_of(node, 2, workers=2)
    until_step(node)
    mark = node.mark()
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = worlds_of(node, 2, workers=2, since=mark)
    assert not {*pids(after).values()} & {*pids(before).values()}
    ended_well(done, node)


@run_alone
def test_a_failure_without_restarts_left_ends_the_job(start: Start, job: Job, done: Path) -> None:
    node = start(2, "--until", done, nnodes="1", nproc=2, script=STEPS, restarts=0)
    before = worlds_of(node, 2, workers=2)
    until_step(node)
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert node.wait() == 1
    job.until_gone(*pids(before).values())
    assert any("SIGKILL" in line for line in node.lines)


@pytest.mark.parametrize("agent", ["run", "rust"], indirect=True)
def test_nccl_groups_that_elastic_makes_can_be_resized_under_the_agent(start: Start, tmp_path: Path) -> None:
    """NCCL's own error handling would end the survivors, and PyTorch's agent switches it on for all workers."""
    script = tmp_path / "asks.py"
    script.write_text(
        "import os\n"
        "from elastic_rs.elastic._decisions import attendance, nccl_variables\n"
        "before = os.environ.get('TORCH_NCCL_ASYNC_ERROR_HANDLING')\n"
        "os.environ.update(nccl_variables(os.environ, frozenset({'nccl'})))\n"
        "print(f\"NCCL {before} {attendance(os.environ, frozenset({'nccl'})).reason or 'can be resized'}\")\n"
    )
    for in_place, says in (
        ("nccl", "None can be resized"),
        ("gloo", "1 process groups of backend nccl are not resized"),
    ):
        node = start(2, nnodes="1", script=script, conf=f"last_call_timeout=1,in_place={in_place}")
        assert node.wait() == 0
        node.line(f"NCCL {says}")
