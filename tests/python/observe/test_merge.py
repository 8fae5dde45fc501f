"""Events of several origins are shown once, in the order of causes, whatever the clocks of their hosts say."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from elastic_rs._observe import _text
from elastic_rs._observe._events import Event, parse
from elastic_rs._observe._merge import merge
from elastic_rs._observe._story import story_of

A, B = "n000000000000000a", "n000000000000000b"
ONE, TWO = "a:1", "b:2"
EXIT = {"rank": 1, "local_rank": 0, "pid": 77, "exit": "SIGKILL", "returncode": -9, "message": "", "first": True}


class File:
    """Writes the events of one origin, whose clock shows ``ahead_s`` more than the story's."""

    def __init__(self, origin: str, node: str | None = None, ahead_s: float = 0.0, wall: str = "00:48:48") -> None:
        self.origin, self.node, self.ahead_s, self.wall = origin, node, ahead_s, wall
        self.lines: list[str] = []

    def add(self, kind: str, at_s: float, *cause: int | str, round_: int = 1, **fields: Any) -> int:
        number = len(self.lines) + 1
        causes = [one if isinstance(one, str) else f"{self.origin}.{one}" for one in cause]
        event = {
            "v": 1,
            "id": f"{self.origin}.{number}",
            "order": number,
            "cause": causes,
            "run": "job",
            "round": round_,
            "restart": 0,
            "type": kind,
            "data": fields.pop("data", {}),
            "node": fields.pop("node", self.node),
            "mono_us": round((at_s + self.ahead_s) * 1e6),
            "wall": f"2026-11-22T{self.wall}.000Z",
            "text": fields.pop("text", None),
        }
        assert not fields
        self.lines.append(json.dumps(event))
        return number


def completed(round_: int, *, by: str = "round") -> dict[str, Any]:
    with_ = " with 2 nodes" if by == "round" else ""
    return {"round_": round_, "text": f"round {round_} is complete{with_}: all are here: 1 (a:1), 2 (b:2)"}


def node(origin: str, name: str, rank: int, *, ahead_s: float, late_s: float, wall: str = "00:48:48") -> File:
    """The file of a node. Worker 77 is the second one's, and is killed at 10 s; round 2 is complete at 11 s."""
    file = File(origin, name, ahead_s, wall)
    data = {"rank": rank, "nodes": 2, "workers": 4}
    first = file.add("received.completed", 1.0 + late_s, **completed(1, by="heard"), data=data)
    file.add("phase", 1.2 + late_s, first, data={"start_us": 100_000})
    if name == TWO:
        file.add("worker.ended", 10.0, data=EXIT)
    exit_ = file.add("received.exited", 10.1 + late_s, node=TWO, data=EXIT)
    broken = file.add("received.broken", 10.1 + late_s, exit_, data={"in_place": False}, text="round 1 is interrupted")
    second = file.add("received.completed", 11.0 + late_s, broken, **completed(2, by="heard"), data=data)
    file.add("phase", 11.3 + late_s, second, round_=2, data={"stop_us": 500_000, "start_us": 200_000})
    return file


def coordinator() -> File:
    file = File("c1-1")
    file.add("run.opened", 0.0, round_=0)
    joined = file.add("node.joined", 0.5, round_=0, node=ONE)
    file.add("node.joined", 0.9, round_=0, node=TWO)
    first = file.add("round.completed", 1.0, joined, **completed(1), data={"nodes": 2, "workers": 4})
    for name in (ONE, TWO):
        file.add("phase", 1.3, first, node=name, data={"start_us": 100_000})
    exit_ = file.add("worker.exited", 10.05, node=TWO, data=EXIT)
    broken = file.add("round.broken", 10.06, exit_, data={"why": "worker.failed"})
    second = file.add("round.completed", 11.0, broken, **completed(2), data={"nodes": 2, "workers": 4})
    for name in (ONE, TWO):
        file.add("phase", 11.4, second, round_=2, node=name, data={"stop_us": 500_000, "start_us": 200_000})
    return file


def files(hours: float = 0.0, wall: str = "00:48:48") -> dict[str, File]:
    return {
        "c": coordinator(),
        "a": node(A, ONE, 0, ahead_s=3600 * (hours + 5), late_s=0.01, wall=wall),
        "b": node(B, TWO, 1, ahead_s=3600 * (9 - hours), late_s=0.02),
    }


def read(*chosen: File) -> list[Event]:
    return parse([line for file in chosen for line in file.lines])


@pytest.mark.parametrize("chosen", ["c", "a", "b", "ca", "cb", "ab", "ba", "abc", "cba", "bca"])
def test_any_part_of_the_files_has_the_recovery_once(chosen: str) -> None:
    all_ = files()
    story = story_of(read(*(all_[name] for name in chosen)))
    (recovery,) = story.recoveries
    assert (story.incarnations, story.run, recovery.workers) == (1, "job", 4)
    assert (recovery.root.type, recovery.root.node, recovery.root.data["pid"]) == ("worker.exited", TWO, 77)
    assert recovery.completed is not None
    assert (recovery.broken.round, recovery.completed.round) == (1, 2)
    assert recovery.consequences == []
    parts = len(set(chosen) - {"c"}) if "c" not in chosen else 2
    assert {phase: part.nodes for phase, part in recovery.parts.items()} == {"stop": parts, "start": parts}
    assert recovery.lasted_s(story.end_us()) == pytest.approx(1.3, abs=0.3)
    lines = _text.why(story)
    assert lines[1] == " b rank 1 SIGKILL   root cause", lines
    assert [event.type for event in story.events].count("round.completed") == 2
    orders = [event.order for event in story.events]
    assert orders == list(range(1, len(orders) + 1))
    for event in story.events:
        assert all(number < event.order for number in event.follows or ())
        assert event.mono_us >= 0


def test_clocks_an_hour_off_change_nothing_but_the_time_of_day() -> None:
    def times(hours: float, wall: str) -> list[Any]:
        story = story_of(read(*files(hours, wall).values()))
        shown = [
            *_text.why(story),
            *_text.status(story, None),
            *(_text.event_line(one, story, 0) for one in story.events),
        ]
        return [*shown, *(one.mono_us for one in story.events)]

    assert times(0, "00:48:48") == times(1, "01:48:48") == times(-1, "23:48:48")


def test_what_is_merged_is_merged_to_itself() -> None:
    merged, shift = merge(read(*files().values()))
    assert shift == 0
    assert merge(merged) == (merged, 0)


def test_the_order_of_files_does_not_matter() -> None:
    all_ = list(files().values())
    lines = [line for file in all_ for line in file.lines]
    expected = [event.id for event in merge(read(*all_))[0]]
    for seed in range(20):
        shuffled = lines.copy()
        random.Random(seed).shuffle(shuffled)
        assert [event.id for event in merge(parse(shuffled))[0]] == expected


def test_two_jobs_of_one_name_stay_apart() -> None:
    """Their rounds have the same numbers, and other members."""
    before = files()
    after = [
        line.replace("a:1", "a:3").replace("b:2", "b:4").replace("n00000000", "n11111111") for line in before["a"].lines
    ]
    story = story_of(parse([*before["a"].lines, *before["b"].lines, *after]))
    assert (story.incarnations, story.earlier, len(story.recoveries)) == (2, 1, 1)


def cell() -> tuple[File, File]:
    """Two nodes over a shared cell. The one broke the round, the other completed the next."""
    one = node(A, ONE, 0, ahead_s=0, late_s=0.3)
    two = node(B, TWO, 1, ahead_s=500, late_s=0.2)
    one.add("round.completed", 1.0, "@joined.b:2", **completed(1), data={"nodes": 2, "workers": 4})
    exit_ = two.add("worker.exited", 10.1, node=TWO, data=EXIT)
    two.add("round.broken", 10.1, exit_, data={"why": "worker.failed"})
    two.add("node.joined", 10.5, "@broken.1", data={"new": False})
    one.add("node.joined", 10.6, "@broken.1", data={"new": False})
    one.add("round.completed", 11.0, "@broken.1", **completed(2), data={"nodes": 2, "workers": 4})
    # In the order of their clocks, as nodes write them.
    for file in (one, two):
        events = sorted(map(json.loads, file.lines), key=lambda event: event["mono_us"])
        names = {event["id"]: f"{file.origin}.{number}" for number, event in enumerate(events, start=1)}
        for number, event in enumerate(events, start=1):
            causes = [names.get(cause, cause) for cause in event["cause"]]
            event.update(id=names[event["id"]], order=number, cause=causes)
        file.lines = [json.dumps(event) for event in events]
    return one, two


def test_decisions_of_several_nodes_follow_from_one_another() -> None:
    story = story_of(read(*cell()))
    (recovery,) = story.recoveries
    assert recovery.completed is not None
    known = {event.id: event for event in story.events}
    assert [known[cause].type for cause in recovery.completed.cause] == ["round.broken"]
    assert [known[cause].type for cause in known[recovery.completed.cause[0]].cause] == ["worker.exited"]
    backs = [event for event in story.events if event.type == "node.joined"]
    assert len(backs) == 2
    assert all(known[event.cause[0]].type == "round.broken" for event in backs)
    for part in cell():
        assert _text.why(story_of(read(part)))[1] == " b rank 1 SIGKILL   root cause"


def replayed(*, replayed_at_s: float = 3.0, ago_s: float = 20.0) -> File:
    """The events of a coordinator that was restarted, to which the second node has replayed its own."""
    file = File("c2-1")
    file.add("run.opened", 1.0, round_=0)
    file.add("coordinator.restarted", 2.0, node=TWO, round_=0, data={"reported": 2})
    for line in node(B, TWO, 1, ahead_s=0, late_s=0.02).lines:
        inner = json.loads(line)
        if inner["type"] == "worker.ended":
            continue
        said = {
            name: inner[name] for name in ("id", "order", "cause", "round", "restart", "node", "type", "data", "text")
        }
        ago_us = round((ago_s + 11.3) * 1e6) - inner["mono_us"]
        file.add("replayed", replayed_at_s, round_=2, node=TWO, data={**said, "ago_us": ago_us})
    return file


def test_replayed_events_are_part_of_a_restarted_coordinators_story() -> None:
    after = replayed()
    story = story_of(read(after), now_us=10_000_000)
    (recovery,) = story.recoveries
    assert _text.why(story)[1] == " b rank 1 SIGKILL   root cause"
    assert recovery.parts["stop"].nodes == 1
    # Round 2 was complete 20.3 s before it was replayed at 3 s, and the first event of the story is at 0.
    assert recovery.completed is not None
    assert (story.now_us - recovery.completed.mono_us) / 1e6 == pytest.approx(7 + 20.3, abs=0.1)
    assert [event.type for event in story.events if event.type.startswith("coordinator")] == ["coordinator.restarted"]
    # With the member's own file, and with that of the coordinator before, nothing is shown twice.
    for others in (["b"], ["c"], ["c", "b"], ["a", "b", "c"]):
        all_ = files()
        for order in ([*(all_[name] for name in others), after], [after, *(all_[name] for name in others)]):
            again = story_of(read(*order))
            assert len(again.recoveries) == 1, others
            assert (again.incarnations, _text.why(again)[1]) == (1, " b rank 1 SIGKILL   root cause")


def test_a_replayed_event_that_cannot_be_read_is_left_out() -> None:
    file = replayed()
    for data in ({}, {"ago_us": "x"}, {"ago_us": 5, "id": 7}, {"ago_us": 5, "id": "n1.1", "order": -1, "type": "x"}):
        file.add("replayed", 4.0, data=data)
    assert len(story_of(read(file)).recoveries) == 1


def test_causes_in_a_circle_end() -> None:
    one = File(A, ONE)
    one.add("note", 1.0, f"{B}.1")
    other = File(B, TWO)
    other.add("note", 1.0, f"{A}.1")
    for file in (one, other):
        file.add("received.completed", 2.0, **completed(1), data={"rank": 0, "nodes": 2})
    assert len(merge(read(one, other))[0]) == 3
