"""What a job's events tell: each recovery with its root, its consequences and its cost, and that in words."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs._observe import _text
from elastic_rs._observe._events import Event, escaped, parse, run_state
from elastic_rs._observe._otlp import traces
from elastic_rs._observe._page import page
from elastic_rs._observe._source import AnswerError, Live
from elastic_rs._observe._story import Part, Redo, Story, story_of
from elastic_rs._observe._trace import chrome_trace
from elastic_rs._terminal import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def time_zone() -> Iterator[Callable[[str], None]]:
    """Times of day are those of UTC, or of the zone that the test chooses by what this yields."""
    with pytest.MonkeyPatch.context() as patch:

        def choose(name: str) -> None:
            patch.setenv("TZ", name)
            time.tzset()

        choose("UTC")
        yield choose
    time.tzset()


class Log:
    """Writes the events of a job, as a coordinator does."""

    def __init__(self, origin: str = "c1") -> None:
        self.origin = origin
        self.lines: list[str] = []

    def add(self, kind: str, at_s: float = 0.0, cause: int | None = None, **fields: Any) -> int:
        """Write an event, and return its number. ``at_s`` is the coordinator's clock."""
        number = len(self.lines) + 1
        event = {
            "v": 1,
            "id": f"{self.origin}.{number}",
            "order": number,
            "cause": [] if cause is None else [f"{self.origin}.{cause}"],
            "run": "job",
            "round": fields.pop("round", 1),
            "restart": fields.pop("restart", 0),
            "type": kind,
            "data": fields.pop("data", {}),
            "node": fields.pop("node", None),
            "mono_us": round(at_s * 1e6),
            "wall": "2026-11-22T00:48:48.000Z",
            "text": fields.pop("text", None),
            "of_a_later_release": 1,
        }
        assert not fields
        self.lines.append(json.dumps(event))
        return number

    def events(self) -> list[Event]:
        return parse(self.lines)


def exited(rank: int = 137, *, first: bool = True, message: str = "") -> dict[str, Any]:
    return {"rank": rank, "exit": "exit code 1", "message": message, "first": first, "counts": first}


def recovered(log: Log, at_s: float = 100.0, slow: str = "n41:9") -> int:
    """A worker of n17 fails, one of n2 follows, three nodes form the next round. Returns that event's number."""
    exit_ = log.add("worker.exited", at_s, node="n17.example.org:4711", data=exited(message="uncorrectable ECC"))
    broken = log.add("round.broken", at_s + 0.002, cause=exit_, data={"why": "worker.failed"})
    log.add("worker.exited", at_s + 0.5, cause=broken, node="n2:5", data=exited(4, first=False))
    done = log.add("round.completed", at_s + 32.0, cause=broken, round=2, data={"nodes": 3, "workers": 24})
    for node, stop_us in [("n2:5", 1_100_000), ("n17.example.org:4711", 900_000), (slow, 30_000_000)]:
        data = {"stop_us": stop_us, "rendezvous_us": 1000, "start_us": 20_000, "import_us": None}
        log.add("phase", at_s + 32.1, cause=done, round=2, node=node, data=data)
    return done


def formed() -> Log:
    log = Log()
    log.add("run.opened")
    log.add("node.joined", 1.0, node="n17.example.org:4711")
    log.add("round.completed", 2.0, cause=2, data={"nodes": 4, "workers": 32})
    return log


def state(**values: Any) -> dict[str, Any]:
    usual = {
        "run": "job",
        "state": "running",
        "round": 2,
        "restart": 1,
        "max_restarts": 3,
        "min_nodes": 2,
        "max_nodes": 4,
        "running": 3,
        "finished": 0,
        "workers": 24,
        "waiting": 0,
        "waiting_names": [],
        "unreachable_names": [],
        "progress": "round 3: 0 of 2 to 4 nodes",
        "verdict": None,
        "failed": False,
        "step": None,
        "step_time_us": None,
        "behind": [],
        "unused_hosts": [],
        "unused_hosts_more": 0,
        "restarts_for_nccl": False,
        "hang": None,
    }
    assert values.keys() <= usual.keys()
    return {**usual, **values}


def unused(host: str, how_long: str, why: str, advice: str) -> dict[str, Any]:
    return {"host": host, "reason": "retried", "how_long": how_long, "left_ms": None, "why": why, "advice": advice}


def still(**values: Any) -> dict[str, Any]:
    """A training that stands still, as a run's state has it."""
    usual = {
        "text": "waits 12 s for rank 3 at train.py:88 (usually 0.20 s)",
        "kind": "not_entered",
        "ranks": [3],
        "certain": False,
        "found": False,
        "still_s": 12.3,
        "lines": [
            "training stands still for 12 s: 7 of 8 ranks wait for rank 3",
            "  rank 3 has not entered all_reduce",
        ],
    }
    assert values.keys() <= usual.keys()
    return {**usual, **values}


STEERING = "\x1b[2J\u202e\x9b"
"""Characters that clear a terminal, and turn what follows around."""


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: STEERING} for name in ("round", "restart", "min_nodes", "max_nodes", "running", "waiting", "mono_us")),
        *({name: STEERING} for name in ("finished", "max_restarts", "workers", "step", "step_time_us")),
        {"round": 1.5},
        {"round": True},
        {"round": -1},
        {"workers": 1 << 64},
        {"run": 1},
        {"state": None},
        {"progress": ["x"]},
        {"unreachable_names": "n1"},
        {"unreachable_names": [1]},
        {"behind": [["n1", STEERING]]},
        {"unused_hosts": [1]},
        {"unused_hosts": [{"host": "n1"}]},
        {"unused_hosts": [unused("n1", "for 2 s", "ssh", "mend it") | {"why": 1}]},
        {"unused_hosts_more": STEERING},
        {"behind": [[1, 1]]},
        {"behind": [["n1"]]},
        {"failed": STEERING},
        {"restarts_for_nccl": STEERING},
        {"verdict": 1},
        {"hang": []},
        {"hang": {"text": "waits"}},
        *({"hang": still(**{name: 1})} for name in ("text", "kind", "ranks", "certain", "found", "lines")),
        *({"hang": still(still_s=wrong)} for wrong in (True, -1, "1", float("nan"), float("inf"))),
        {"hang": still(ranks=[STEERING])},
        {"hang": still(lines=[1])},
    ],
    ids=str,
)
def test_what_is_no_state_of_a_job_is_refused(wrong: dict[str, Any]) -> None:
    said = json.dumps({**state(), "mono_us": 1, **wrong})
    with pytest.raises(ValueError, match="not the state of a job") as error:
        run_state(said)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("said", ["", "[]", "1", "{}", "[" * 10_000])
def test_an_answer_that_is_no_state_is_an_error(said: str) -> None:
    with pytest.raises(ValueError, match="not the state of a job"):
        run_state(said)


class Peer:
    """What answers at an endpoint, instead of a coordinator."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said

    def ask(self, **_: object) -> tuple[str, str, list[str], int, bool]:
        return "job", json.dumps(self.said, ensure_ascii=False), [], 0, False


def test_no_text_of_a_peer_steers_the_terminal_of_status() -> None:
    live = Live.__new__(Live)
    live._run_id, live._after, live._where = "job", 0, "host:1"
    texts = dict.fromkeys(("run", "state", "progress", "verdict"), f"a{STEERING}b")
    texts_of_hang = {"text": STEERING, "kind": STEERING, "lines": [STEERING]}
    said = {
        **state(
            **texts, hang=still(**texts_of_hang), unreachable_names=[STEERING], unused_hosts=[unused(*[STEERING] * 4)]
        ),
        "mono_us": 1,
        "behind": [[STEERING, 1]],
        "new": {"x": [STEERING]},
    }
    live._observer = Peer(said)  # type: ignore[assignment]
    _, output = live.read()
    assert output is not None
    assert output["new"] == {"x": [" [2J  "]}
    assert (output["hang"]["kind"], output["hang"]["lines"]) == (plain(STEERING), [plain(STEERING)])
    for shown in (said["state"], "waiting"):
        output["state"] = plain(shown)
        lines = _text.status(story_of([], 1), output)
        assert all(line.isprintable() for line in lines), lines
    live._observer = Peer({**said, "round": STEERING})  # type: ignore[assignment]
    with pytest.raises(
        AnswerError,
        match=r"host:1: the answer is not the state of a job, as .* it: `round` is `\x20\[2J  `, must be a count",
    ):
        live.read()


def test_a_line_of_json_says_the_same_once_it_is_escaped() -> None:
    value = {"text": f"ä\u200d{STEERING}\U000e0041\u2028", "plain": "✓"}
    line = json.dumps(value, ensure_ascii=False)
    shown = escaped(line)
    assert shown.isprintable()
    assert json.loads(shown) == value
    assert escaped('{"text":"✓ä"}') == '{"text":"✓ä"}'


def test_a_recovery_has_its_root_its_consequences_and_its_cost() -> None:
    log = formed()
    recovered(log)
    story = story_of(log.events(), now_us=1000 * 10**6)
    (recovery,) = story.recoveries
    assert recovery.root.node == "n17.example.org:4711"
    assert [event.node for event in recovery.consequences] == ["n2:5"]
    assert (recovery.workers, recovery.nodes_before) == (32, 4)
    stop = recovery.parts["stop"]
    assert (stop.median_s, stop.longest_s, stop.slowest, stop.nodes) == (1.1, 30.0, "n41:9", 3)
    assert list(recovery.parts) == ["stop", "rendezvous", "start"]
    assert recovery.lasted_s(story.now_us) == pytest.approx(32.1)
    assert story.elapsed_s() == pytest.approx(998.0)
    # The first world has 32 workers, the second 24.
    assert story.goodput_at_most() == pytest.approx(1 - (32.0 * 32 + 0.1 * 24) / (130 * 32 + 868 * 24))


def stepping(log: Log) -> None:
    """The job makes its first step at 20 s; a recovery from 100 s on ends with step 901 at 140 s, after step 1000."""
    log.add("phase", 20.0, cause=3, node="n2:5", data={"first_step_us": 18_000_000, "step": 1, "step_before": None})
    done = recovered(log)
    before = {"step_before": 1000, "step_time_us": 80_000}
    data = {"first_step_us": 2_000_000, "step": 901, **before}
    log.add("phase", 132.2, cause=done, round=2, node="n2:5", data={"import_us": 5_000_000})
    log.add("phase", 140.0, cause=done, round=2, node="n2:5", data=data)
    log.add("phase", 139.9, cause=done, round=2, node="n41:9", data={**data, "step_before": 999})


def test_a_training_that_reports_its_steps_has_an_exact_goodput() -> None:
    log = formed()
    stepping(log)
    story = story_of(log.events(), now_us=1020 * 10**6)
    (recovery,) = story.recoveries
    assert (recovery.redo, recovery.lasted_s(story.now_us)) == (Redo(100, 8.0), pytest.approx(40.0))
    elapsed, lost = 112 * 32 + 888 * 24, 32 * 32 + 16 * 24  # of 32 workers, then of 24
    assert story.goodput() == story.goodput_at_most() == pytest.approx(1 - lost / elapsed)
    assert _text.status(story, None)[1] == (
        "goodput 94.3 %; 1 recovery lost 48.0 s = stop 30.0 s, redo 8.00 s, import 5.00 s, first_step 2.00 s, "
        "start 0.02 s, rendezvous 1.0 ms"
    )
    assert _text.status(story, None)[2] == "step    901 was the first of round 2, 14:40 min ago"
    watched = _text.status(story, state(step=18_211, step_time_us=1_920_000))
    assert watched[2] == "step    18,211, 1.92 s each"
    assert _text.why(story)[-3:] == [
        "       import     5.00 s",
        "       first_step median 2.00 s; n41 2.00 s",
        "       redo       100 steps redone (8.00 s)",
    ]
    # A round that makes no step is lost, too, and nothing is known of what another one makes again.
    broken = log.add("round.broken", 200.0, round=2, data={"why": "node.left"})
    log.add("round.completed", 201.0, cause=broken, round=3, data={"nodes": 3, "workers": 24})
    story = story_of(log.events(), now_us=220 * 10**6)
    assert story.lost_s() == pytest.approx(48 + 20)
    assert _text.why(story)[-1] == "       no training step yet"
    broken = log.add("round.broken", 230.0, round=3, data={"why": "node.left"})
    done = log.add("round.completed", 240.0, cause=broken, round=4, data={"nodes": 3, "workers": 24})
    data = {"first_step_us": 1, "step": None, "step_before": 1200, "step_time_us": 80_000}
    log.add("phase", 250.0, cause=done, round=4, node="n2:5", data=data)
    story = story_of(log.events(), now_us=1020 * 10**6)
    assert story.lost_s() == pytest.approx(48 + 50)
    assert (story.goodput(), story.goodput_at_most()) == (None, pytest.approx(1 - (lost + 50 * 24) / elapsed))
    assert _text.status(story, None)[1].startswith("goodput at most 89.5 %; 3 recoveries lost 98.0 s = ")


def test_steps_that_were_not_repeated_cost_nothing_and_false_numbers_cost_no_more_than_the_run() -> None:
    for first, before, redo in [(1001, 1000, Redo(0, 0.0)), (1, 2**53 - 1, Redo(2**53 - 1, 80.0)), (None, 9, None)]:
        log = formed()
        log.add("phase", 20.0, cause=3, node="n2:5", data={"first_step_us": 1, "step": 1})
        done = recovered(log)
        data = {"first_step_us": 1, "step": first, "step_before": before, "step_time_us": 10**6}
        log.add("phase", 140.0, cause=done, round=2, node="n2:5", data=data)
        (recovery,) = story_of(log.events()).recoveries
        assert recovery.redo == redo


def test_a_recovery_begins_when_what_began_it_happened() -> None:
    log = formed()
    lost = log.add("node.lost", 100.0, node="n3:1", data={"how": "silence", "silent_ms": 15_000})
    broken = log.add("round.broken", 100.0, cause=lost, data={"why": "node.lost"})
    done = log.add("round.completed", 102.0, cause=broken, round=2, data={"nodes": 3, "workers": 24})
    data = {"stop_us": 1_000_000, "rendezvous_us": 1_000_000, "start_us": 500_000}
    log.add("phase", 102.5, cause=done, round=2, node="n2:5", data=data)
    (recovery,) = story_of(log.events()).recoveries
    assert recovery.lasted_s(0) == pytest.approx(17.5)
    assert recovery.parts["detect"] == Part(15.0, 15.0, "n3:1", 1)
    # A worker's agent knew of its end before the coordinator did. A newcomer's wait for a place belongs to no recovery.
    log = formed()
    exit_ = log.add("worker.exited", 100.0, node="n2:5", data=exited())
    broken = log.add("round.broken", 100.0, cause=exit_, data={"why": "worker.failed"})
    done = log.add("round.completed", 102.0, cause=broken, round=2, data={"nodes": 3, "workers": 24})
    log.add("phase", 102.5, cause=done, round=2, node="n2:5", data={"detect_us": 4_000, **data, "stop_us": 1_296_000})
    log.add("phase", 102.5, cause=done, round=2, node="n9:5", data={"rendezvous_us": 90_000_000, "start_us": 1})
    (recovery,) = story_of(log.events()).recoveries
    assert recovery.lasted_s(0) == pytest.approx(2.8)


def test_a_node_that_is_about_to_leave_trains_on_until_the_world_changes() -> None:
    log = formed()
    leaves = log.add("node.leaves", 100.0, node="n3:1")
    changes = log.add("round.changes", 110.0, cause=leaves)
    log.add("round.completed", 110.5, cause=changes, round=2, data={"nodes": 2, "workers": 16})
    (recovery,) = story_of(log.events()).recoveries
    assert recovery.root.type == "node.leaves"
    assert recovery.lasted_s(0) == pytest.approx(0.5)


def test_why_reads_from_the_root_to_the_new_round() -> None:
    log = formed()
    recovered(log)
    assert _text.why(story_of(log.events())) == [
        "recovery 1 of 1, round 1 to 2: 32.1 s x 32 workers, at 2026-11-22 00:48:48 UTC",
        ' n17 rank 137 exit code 1 "uncorrectable ECC"   root cause; 1 consequence',
        " +- round 1 broken, all nodes notified  +2.0 ms",
        "    |  n2 rank 4 exit code 1  +0.50 s",
        "    +- round 2 complete with 3 of 4 nodes  +32.0 s",
        "       stop       median 1.10 s; n41 30.0 s",
        "       rendezvous median 1.0 ms; n41 1.0 ms",
        "       start      median 0.02 s; n41 0.02 s",
    ]


def test_the_list_has_a_line_for_each_recovery_with_the_time_of_day(time_zone: Callable[[str], None]) -> None:
    log = formed()
    recovered(log)
    recovered(log, 400.0)
    time_zone("Europe/Vienna")
    assert _text.recoveries(story_of(log.events())) == [
        "job: 2 recoveries, 2026-11-22 01:48:48 CET to 2026-11-22 01:48:48 CET",
        '   1  2026-11-22 01:48:48 CET     32.1 s  n17 rank 137 exit code 1 "uncorrectable ECC"',
        '   2  2026-11-22 01:48:48 CET     32.1 s  n17 rank 137 exit code 1 "uncorrectable ECC"',
    ]
    without_times = [replace(event, wall="yesterday") for event in log.events()]
    assert _text.recoveries(story_of(without_times))[1].startswith("   1  ?  ")
    assert _text.why(story_of(without_times))[0].endswith(" x 24 workers")


def test_status_names_the_last_failure_and_nodes_that_are_away_or_slow() -> None:
    log = formed()
    recovered(log)
    log.add("node.lost", 300.0, node="n17.example.org:4711", round=2, data={"how": "silence", "silent_ms": 15_000})
    recovered(log, 400.0)
    assert _text.status(story_of(log.events(), now_us=4032 * 10**6), state()) == [
        "job  RUNNING  round 2, 3 nodes (2 to 4), 24 workers, 1:07 h; restart 1 of 3",
        "goodput at most 98.2 %; 2 recoveries lost 64.2 s = stop 60.0 s, start 0.04 s, rendezvous 2.0 ms",
        'last    1:00 h ago: n17 rank 137 exit code 1 "uncorrectable ECC" (see why)',
        "slow    n41: stop 30.0 s (median 1.10 s), slowest in 2 of 2 recoveries",
        "away    n17: lost 1:02 h ago",
    ]


def test_status_of_a_waiting_job_names_what_it_waits_for() -> None:
    log = Log()
    log.add("run.opened")
    log.add("node.joined", 1.0, node="n1:1")
    shown = state(
        state="waiting",
        round=0,
        restart=0,
        running=0,
        workers=None,
        waiting=1,
        max_restarts=None,
        progress="round 1: 1 of 2 to 4 nodes (n1)\u202e",
        unreachable_names=["n1:1"],
    )
    assert _text.status(story_of(log.events(), now_us=5_000_000), shown) == [
        "job  WAITING  round 0, 0 nodes (2 to 4), 1 wait; restart 0",
        "waits   round 1: 1 of 2 to 4 nodes (n1) ",
        "        no connection to n1",
    ]


def test_status_says_that_workers_with_nccl_are_restarted() -> None:
    assert _text.status(story_of([], 1), state(restarts_for_nccl=True))[1:] == [
        "workers of this job are restarted, not kept, when the world changes: their process group uses NCCL, and "
        "`in_place` is gloo. `elastic-run --in-place=nccl` (torchrun: `--rdzv-conf in_place=nccl`) tries to keep them, "
        "which was run on one GPU, and never on several (docs/gpu.md)"
    ]
    without = state()
    del without["restarts_for_nccl"]
    assert len(_text.status(story_of([], 1), without)) == 1, "a state without it"


def test_status_has_a_line_for_each_host_that_is_not_used() -> None:
    hosts = [unused(f"n{number}", "for the job", "3 failures", "mend it") for number in range(20)]
    shown = state(unused_hosts=hosts[:1])
    assert _text.status(story_of([], 1), shown)[1:] == ["unused  n0 for the job: 3 failures; mend it"]
    # A coordinator names 16. Another one may be anybody.
    lines = _text.status(story_of([], 1), state(unused_hosts=hosts, unused_hosts_more=3))[1:]
    assert (len(lines), lines[-2:]) == (17, ["unused  n15 for the job: 3 failures; mend it", "        and 7 more"])
    del shown["unused_hosts"], shown["unused_hosts_more"]
    assert len(_text.status(story_of([], 1), shown)) == 1, "a state without them"


def test_worlds_are_weighed_by_nodes_if_one_does_not_tell_its_workers() -> None:
    log = formed()
    broken = log.add("round.broken", 102.0, data={"why": "nodes.wait"})
    log.add("round.completed", 132.0, cause=broken, round=2, data={"nodes": 3, "workers": None})
    story = story_of(log.events(), now_us=1032 * 10**6)
    assert story.goodput_at_most() == pytest.approx(1 - 30 * 4 / (130 * 4 + 900 * 3))


def test_an_undisturbed_job_has_nothing_to_explain() -> None:
    log = formed()
    assert _text.why(story_of(log.events())) == ["job: no recovery so far"]
    log.add("run.closed", 9.0, data={"verdict": "succeeded"}, text="closed: all 4 live nodes of round 1 have finished")
    story = story_of(log.events())
    assert _text.why(story) == ["job: no recovery so far; closed: all 4 live nodes of round 1 have finished"]
    assert story.goodput_at_most() == 1
    assert story_of([]) == Story(run="")


def test_a_failed_change_in_place_shows_the_failure_as_root_cause() -> None:
    log = formed()
    joined = log.add("node.joined", 50.0, node="n5:1")
    changes = log.add("round.changes", 50.1, cause=joined)
    log.add("round.broken", 60.0, cause=changes, data={"why": "change.failed"})
    (recovery,) = story_of(log.events()).recoveries
    assert (recovery.broken.type, recovery.root.type) == ("round.broken", "node.joined")
    assert recovery.completed is None
    assert _text.why(story_of(log.events()))[-1] == "    +- the next round is not complete yet"


def test_events_of_a_restarted_coordinator_come_after_those_before() -> None:
    before, after = formed(), Log("c2")
    after.add("coordinator.restarted", 0.1)
    events = parse([*before.lines, *after.lines])
    assert [event.type for event in events][-1] == "coordinator.restarted"
    # A cause of which the event was dropped is no root that is lost.
    later = Log("c3")
    later.add("round.broken", 1.0, cause=None)
    dropped = json.loads(later.lines[0])
    dropped["cause"] = ["c3.0"]
    (recovery,) = story_of(parse([json.dumps(dropped)])).recoveries
    assert recovery.root is recovery.broken


def test_a_trace_has_rounds_phases_and_arrows_from_causes() -> None:
    log = formed()
    recovered(log)
    trace = chrome_trace(log.events(), now_us=200 * 10**6)["traceEvents"]
    rounds = [(it["name"], it["ts"], it["dur"]) for it in trace if it["ph"] == "X" and (it["pid"], it["tid"]) == (1, 1)]
    assert rounds == [
        ("forming", 0, 2_000_000),
        ("round 1", 2_000_000, 98_002_000),
        ("recovery", 100_002_000, 31_998_000),
        ("round 2", 132_000_000, 68_000_000),
    ]
    stops = {it["pid"]: (it["ts"], it["dur"]) for it in trace if it["name"] == "stop"}
    names = {it["args"]["name"]: it["pid"] for it in trace if it["name"] == "process_name"}
    assert stops[names["n41:9"]] == (132_100_000 - 20_000 - 1000 - 30_000_000, 30_000_000)
    begins, ends = ([it for it in trace if it["ph"] == kind] for kind in "sf")
    assert len(begins) == len(ends) == sum(len(event.cause) for event in log.events())
    assert {it["id"] for it in begins} == {it["id"] for it in ends}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 is no event"),
        ("[]", "no event of a job"),
        ('{"id": 1}', "order"),
        ('{"id":"a.1","order":"x"}', "x"),
    ],
)
def test_a_line_that_is_no_event_is_named(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse([line])


def test_texts_of_peers_steer_no_terminal() -> None:
    log = Log()
    data = {"how": "\u009b", "lines": ["\u009b", ["a\nb"], 7]}
    log.add("node.lost", node="n1\u001b[2J:1", text="a\nb\u202ec", data=data)
    (event,) = log.events()
    assert (event.node, event.text, event.data["how"]) == ("n1 [2J:1", "a b c", " ")
    assert event.data["lines"] == [" ", ["a b"], 7]
    assert plain("é 日本 ok") == "é 日本 ok"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("n17:4711", "n17"), ("n17.example.org:1", "n17"), ("10.0.0.7:12", "10.0.0.7"), ("odd", "odd"), (":1", ":1")],
)
def test_nodes_are_named_by_their_host(name: str, shown: str) -> None:
    assert Story("job").name(name) == shown


def test_nodes_that_share_a_host_are_named_with_their_process() -> None:
    log = Log()
    log.add("node.joined", node="vm:1")
    log.add("node.left", node="vm:1")
    log.add("node.joined", node="vm:2")
    assert story_of(log.events()).name("vm:2") == "vm"
    log.add("node.joined", node="vm:3")
    assert [story_of(log.events()).name(node) for node in ("vm:2", "vm:3", "n1:3")] == ["vm:2", "vm:3", "n1"]


def test_a_page_loads_nothing_and_names_cannot_become_markup() -> None:
    log = formed()
    recovered(log)
    evil = "<script>alert(1)</script>"
    log.add("node.lost", 300.0, node=f"{evil}:1", text=f'"><img src=x>{evil}', data={"how": "silence"})
    html = page(log.events())
    assert evil not in html
    assert "<img" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "http" not in html.replace("http-equiv", "")
    policy = re.search(r'content="(default-src [^"]*)"', html)
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert policy is not None
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy[1] == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "style=" not in html
    root = ET.fromstring(html[html.index("<figure ") : html.index("</figure>") + len("</figure>")])
    names = [text.text for text in root.iter("text")]
    assert "n17" in names
    kinds = {rect.get("class") for rect in root.iter("rect")}
    assert {"round", "recovery", "stop", "start"} <= kinds
    assert "rank 137 exit code 1" in html


def test_a_page_of_a_large_job_is_small() -> None:
    log = formed()
    for number in range(1000):
        log.add("node.joined", 3.0, node=f"n{number}:1")
    for again in range(20):
        done = recovered(log, 100.0 * (again + 1))
        for number in range(1000):
            data = {"stop_us": 1000 * number, "rendezvous_us": 5_000_000, "start_us": 20_000}
            log.add("phase", 100.0 * (again + 1) + 33, cause=done, round=2, node=f"n{number}:1", data=data)
    html = page(log.events())
    assert "The 50 nodes that lost most time, of 1003." in html
    assert len(html.encode()) <= 60_000


def test_a_page_with_many_marks_is_small() -> None:
    log = formed()
    for again in range(100):
        for number in range(50):
            log.add("node.lost", 10.0 * again, node=f"n{number}:{again}", text="x" * 4000, data={"how": "silence"})
        recovered(log, 10.0 * again + 5)
    assert len(page(log.events()).encode()) <= 60_000


def test_the_failure_for_which_no_restart_was_left_is_explained() -> None:
    log = formed()
    recovered(log)
    last = log.add("worker.exited", 500.0, node="n2:5", round=2, data=exited(4))
    text = "closed by n2 after a failure: no restarts left"
    log.add("run.closed", 500.1, cause=last, round=2, data={"verdict": "failed"}, text=text)
    story = story_of(log.events())
    assert _text.why(story) == [
        "recovery 2 of 2, round 2: 0.10 s x 24 workers, at 2026-11-22 00:48:48 UTC",
        " n2 rank 4 exit code 1   root cause",
        f"    +- {text}",
    ]
    assert any(line.startswith("last ") and "n2 rank 4" in line for line in _text.status(story, None))
    assert story.lost_s() == pytest.approx(32.1)


def test_events_that_were_dropped_are_not_taken_for_peace() -> None:
    log = formed()
    recovered(log)
    events = log.events()[-3:]
    assert _text.why(story_of(events)) == ["job: the recorded events hold no recovery; 7 earlier events were dropped"]


def test_a_world_that_goes_on_was_not_disturbed() -> None:
    log = formed()
    joined = log.add("node.joined", 50.0, node="n5:1")
    broken = log.add("round.broken", 50.1, cause=joined, data={"why": "nodes.wait"})
    log.add("round.goes_on", 51.0, cause=broken)
    assert story_of(log.events()).recoveries == []
    assert [period.name for period in story_of(log.events()).periods()] == ["forming", "round 1"]
    recovered(log)
    (recovery,) = story_of(log.events()).recoveries
    assert recovery.root.type == "worker.exited"


def test_a_cause_before_the_last_round_is_no_root() -> None:
    log = formed()
    done = recovered(log)
    joined = log.add("node.joined", 3000.0, cause=done - 2, node="n5:1")
    log.add("round.broken", 3600.0, cause=joined, round=2, data={"why": "nodes.wait"})
    assert story_of(log.events()).recoveries[-1].root.node == "n5:1"


def test_after_a_coordinators_restart_status_counts_again() -> None:
    before, after = formed(), Log("c2-1")
    recovered(before)
    after.add("coordinator.restarted", 0.1)
    recovered(after, 5.0)
    story = story_of(parse([*before.lines, *after.lines]))
    assert (len(story.recoveries), story.incarnations, story.earlier) == (1, 2, 1)
    assert story.recoveries[0].lasted_s(story.now_us) == pytest.approx(32.1)
    assert "        since the coordinator or the job was restarted; 1 recovery before that" in _text.status(story, None)
    # The one before had another clock.
    names = [(period.name, period.begin_us) for period in story.periods()]
    assert names == [("forming", 100_000), ("round 2", 37_000_000)]
    trace = chrome_trace(parse([*before.lines, *after.lines]))["traceEvents"]
    assert {it["args"]["order"] for it in trace if it["ph"] == "X" and it["tid"] == 2} == {1, 2, 3, 4, 5}


def test_a_spare_has_not_waited_for_the_recovery_before_it_began() -> None:
    log = formed()
    done = recovered(log)
    day_us = 86_400 * 10**6
    log.add("phase", 132.1, cause=done, round=2, node="n50:1", data={"rendezvous_us": day_us, "start_us": 20_000})
    story = story_of(log.events())
    (recovery,) = story.recoveries
    assert recovery.parts["rendezvous"] == Part(0.001, pytest.approx(31.998), "n50:1", 4)  # type: ignore[arg-type]
    # Nor where its phases are drawn.
    assert min(period.begin_us for event in story.events for period in story.phase_periods(event)) > 100 * 10**6
    assert all(slice_["ts"] >= 0 for slice_ in chrome_trace(log.events())["traceEvents"] if slice_["ph"] == "X")
    (trace,) = traces(log.events(), "1")
    spans = trace["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert min(int(span["startTimeUnixNano"]) for span in spans) == int(spans[0]["startTimeUnixNano"])
    assert "24:00 h" not in page(log.events(), None)


def test_a_long_failure_message_is_cut_between_words() -> None:
    log = formed()
    said = "killed by another process, or because memory ran out (OOM?): see the kernel's log"
    exit_ = log.add("worker.exited", 50.0, node="n2:5", data=exited(4, message=said))
    log.add("round.broken", 50.1, cause=exit_)
    assert _text.why(story_of(log.events()))[1].startswith(
        ' n2 rank 4 exit code 1 "killed by another process, or because memory ran out (OOM?): see the …"   root cause'
    )
    (long,) = parse([log.lines[-2].replace(said, "x" * 100)])
    assert _text.what(long, Story("job")).endswith(f'"{"x" * 72} …"')


def test_the_line_of_an_event_has_its_time_type_and_text() -> None:
    log = formed()
    recovered(log, 3700.5)
    story = story_of(log.events())
    lines = [_text.event_line(event, story, story.events[0].mono_us) for event in story.events]
    assert lines[0] == "    1 0:00:00.000 r1 run.opened                      "
    assert lines[3] == '    4 1:01:40.500 r1 worker.exited      n17          rank 137 exit code 1 "uncorrectable ECC"'
    assert lines[-1].endswith(" n41          stop 30.0 s, rendezvous 1.0 ms, start 0.02 s  <- 7")


def test_why_takes_linear_time_for_nodes_that_leave_and_rejoin() -> None:
    """Asked of each node that comes back, all that are away took minutes."""
    log = formed()
    looked = 0

    class Host(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    count = 2_000
    for number in range(count):
        log.add("node.lost", 3.0, node=f"h{number}:1", data={"how": "silence"})
    for number in range(count):
        log.add("node.joined", 4.0, node=f"h{number}:2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastic_rs._observe._story.host_of", lambda node: Host(node.rpartition(":")[0]))
        story = story_of(log.events())
    assert (story.away, story.gone["h7"]) == ({}, 1)
    assert looked < 20 * count
