"""Events of several origins told as one story: a coordinator's, those of nodes, and what members told of them. Pure.

Each origin has a clock and a count of its own. No time of day is read. What several origins know of (a round that was
completed or broken, a worker that ended) is found by its facts, and tells how their clocks differ. A decision stands
for what nodes have heard of it. If it is in no file, what one node has heard stands for it. Then causes come before
what they caused, each origin's events stay in their order, and apart from that the common clock decides.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elastic_rs._observe._events import Event, life, told

Key = tuple[object, ...]

_DECIDED = {
    "round.completed": "completed",
    "round.broken": "broken",
    "round.changes": "broken",
    "worker.exited": "exited",
    "run.closed": "closed",
    "node.left": "left",
}
_HEARD = {
    "received.completed": "completed",
    "received.broken": "broken",
    "received.exited": "exited",
    "received.closed": "closed",
    "received.signal": "left",
}
_REASON = 200
"""Characters of a round's reason by which it is known again. Members may have told the beginning alone."""


def merge(events: Sequence[Event]) -> tuple[list[Event], int]:
    """Merge events of one run.

    Args:
        events: those of one origin in their order. The origins may come in any order.

    Returns:
        The events, and what to add to a time on the clock of the last coordinator. Events of origins that know of
        nothing in common stay apart, each with its own ``life``. Those of one coordinator alone stay as they are.
    """
    if not any(event.type == "replayed" or life(event).startswith("n") for event in events):
        return list(events), 0
    clocks = _clocks(events)
    merged: list[Event] = []
    shift = 0
    last = max((clock.place for clock in clocks.values() if clock.name.startswith("c")), default=-1)
    for group in _groups(clocks):
        chosen, added = _told_once(group)
        merged += chosen
        if any(clock.place == last for clock in group.clocks):
            shift = added
    return merged, shift


@dataclass
class _Clock:
    name: str
    place: int
    events: list[Event] = field(default_factory=list)
    made: dict[Key, int] = field(default_factory=dict)
    """When something happened here, of which others hear."""
    heard: dict[Key, int] = field(default_factory=dict)
    """When it was heard here."""
    same: dict[str, int] = field(default_factory=dict)
    """When events were recorded that are known of two clocks, by id."""


@dataclass
class _Group:
    """Clocks that know of something in common, the common one first, and how far each is ahead of it."""

    clocks: list[_Clock]
    ahead: dict[str, float]


def _clocks(events: Iterable[Event]) -> dict[str, _Clock]:
    """Sort events by their clocks. What members have told is on the coordinator's, unless it is in a member's file."""
    clocks: dict[str, _Clock] = {}
    recalled: list[Event] = []
    for event in events:
        if event.type == "dropped":
            continue  # it tells of the file
        one = told(event)
        if one is None:
            name = life(event)
            clocks.setdefault(name, _Clock(name, len(clocks))).events.append(event)
        else:
            recalled.append(one)
    known = {event.id: clock for clock in clocks.values() for event in clock.events}
    for event in recalled:
        name = life(event)
        clock = clocks.setdefault(name, _Clock(name, len(clocks)))
        clock.same.setdefault(event.id, event.mono_us)
        if event.id not in known:
            known[event.id] = clock
            clock.events.append(event)
    for clock in clocks.values():
        clock.events.sort(key=lambda event: (event.mono_us, event.order))
        clock.same.update({event.id: event.mono_us for event in clock.events})
    _note_keys(clocks.values())
    return clocks


def _note_keys(clocks: Iterable[_Clock]) -> None:
    reasons = _reasons([event for clock in clocks for event in clock.events])
    for clock in clocks:
        for event in clock.events:
            key = _key(event, reasons)
            if key is None or key[0] == "left":
                continue  # a node gets its signal before others hear that it leaves
            made = event.type == "worker.ended" or (event.type in _DECIDED and event.type != "worker.exited")
            (clock.made if made else clock.heard).setdefault(key, event.mono_us)


def _reasons(events: Iterable[Event]) -> dict[tuple[str, int], str]:
    """Return why each round was complete, by origin and number.

    The reason names the members with their process ids. So it tells apart the rounds of jobs with one name. An origin
    that does not know it gets the one that all others agree on.
    """
    found: dict[tuple[str, int], str] = {}
    of_round: dict[int, set[str]] = defaultdict(set)
    pairs = set()
    for event in events:
        pairs.add((event.origin, event.round))
        if event.type in ("round.completed", "received.completed"):
            reason = (event.text or "").partition(": ")[2][:_REASON]
            found[event.origin, event.round] = reason
            of_round[event.round].add(reason)
    for pair in pairs:
        reasons = of_round[pair[1]]
        if pair not in found and len(reasons) == 1:
            found[pair] = next(iter(reasons))
    return found


def _key(event: Event, reasons: dict[tuple[str, int], str]) -> Key | None:
    """Return what the event is about, if several origins may know of it."""
    about = _DECIDED.get(event.type) or _HEARD.get(event.type)
    if event.type == "worker.ended":
        about = "exited"
    reason = reasons.get((event.origin, event.round))
    match about:
        case "completed" | "broken":
            return about, event.round, reason
        case "exited":
            return about, event.node, str(event.data.get("pid")), str(event.data.get("rank"))
        case "closed":
            return (about,)
        case "left":
            return about, event.node
    if event.type == "phase":
        phases = frozenset(name for name, micros in event.data.items() if micros is not None)
        return "phase", event.node, event.round, reason, phases
    return None


def _ahead(one: _Clock, other: _Clock) -> float | None:
    """Return how far the second clock is ahead of the first, in microseconds; None if they know of nothing in common.

    What is heard is heard later than it happens, so each such pair is a bound.
    """
    exact = [other.same[id_] - one.same[id_] for id_ in one.same.keys() & other.same.keys()]
    if exact:
        return median(exact)
    most = min((other.heard[key] - one.made[key] for key in one.made.keys() & other.heard.keys()), default=None)
    least = max((other.made[key] - one.heard[key] for key in one.heard.keys() & other.made.keys()), default=None)
    if most is not None and least is not None and least <= most:
        return (most + least) / 2
    if most is not None or least is not None:
        return most if most is not None else least
    both = [other.heard[key] - one.heard[key] for key in one.heard.keys() & other.heard.keys() if key != ("closed",)]
    return median(both) if both else None


def _groups(clocks: dict[str, _Clock]) -> list[_Group]:
    left = sorted(clocks.values(), key=lambda clock: clock.name)  # whatever the order of the files
    groups = []
    while left:
        coordinators = [clock for clock in left if clock.name.startswith("c")]
        last = max(coordinators, key=lambda clock: clock.place, default=None)
        first = last or max(left, key=lambda clock: len(clock.events))
        group = _Group([first], {first.name: 0.0})
        left.remove(first)
        for clock in group.clocks:  # grows meanwhile
            for other in list(left):
                ahead = _ahead(clock, other)
                if ahead is not None:
                    group.ahead[other.name] = group.ahead[clock.name] + ahead
                    group.clocks.append(other)
                    left.remove(other)
        groups.append(group)
    return sorted(groups, key=lambda group: min(clock.place for clock in group.clocks))


def _told_once(group: _Group) -> tuple[list[Event], int]:
    """Return the group's events in one order on the common clock, and by how much that was shifted to begin at 0."""
    events: list[tuple[float, Event]] = [
        (event.mono_us - group.ahead[clock.name], event) for clock in group.clocks for event in clock.events
    ]
    events.sort(key=lambda item: (item[0], item[1].id))
    stands_for = _stand_ins(events)
    kept = {
        event.id: (at, _as_decided(event)) for at, event in events if stands_for.get(event.id, event.id) == event.id
    }
    meant = _references(kept)
    causes = {id_: _causes(event, at, stands_for, kept, meant) for id_, (at, event) in kept.items()}
    order = _order(kept, causes)
    begin = min((at for at, _ in kept.values()), default=0.0)
    shift = max(0, round(-begin))
    first = group.clocks[0].name
    name = first if first.startswith("c") else f"*{first}"
    place: dict[str, int] = {}
    when: dict[str, int] = {}
    merged = []
    for number, id_ in enumerate(order, start=1):
        at, event = kept[id_]
        known = [cause for cause in causes[id_] if cause in place]
        place[id_] = number
        when[id_] = max([round(at) + shift, *(when[cause] for cause in known)])
        follows = tuple(place[cause] for cause in known)
        merged.append(replace(event, order=number, mono_us=when[id_], cause=tuple(known), life=name, follows=follows))
    return merged, shift


def _stand_ins(events: Sequence[tuple[float, Event]]) -> dict[str, str]:
    """Return which event stands for each that others know of too: a decision, else the first that was heard."""
    reasons = _reasons([event for _, event in events])
    groups: dict[Key, list[Event]] = defaultdict(list)
    for _, event in events:
        key = _key(event, reasons)
        if key is not None:
            groups[key].append(event)
    stands_for = {}
    for same in groups.values():
        decided = [event for event in same if event.type in _DECIDED]
        heard = [event for event in same if event.type in _HEARD]
        if not decided and not heard and same[0].type != "phase":
            continue  # what a node did, and nobody else speaks of
        chosen = (decided or heard or same)[0]
        stands_for.update({event.id: chosen.id for event in same if event not in decided})
    return stands_for


def _as_decided(event: Event) -> Event:
    """Return what was heard in the words of a decision. Other events stay as they are."""
    match event.type:
        case "received.broken":
            return replace(event, type="round.changes" if event.data.get("in_place") else "round.broken", node=None)
        case "received.completed":
            return replace(event, type="round.completed", node=None)
        case "received.exited":
            return replace(event, type="worker.exited")
        case "received.closed":
            return replace(event, type="run.closed", node=None)
        case "received.signal":
            # Nobody else says what became of the world that the node was in.
            return replace(event, type="round.broken") if event.round else event
        case _:
            return event


def _causes(
    event: Event, at: float, stands_for: dict[str, str], kept: dict[str, tuple[float, Event]], meant: _Meant
) -> list[str]:
    """Return the ids of an event's causes among those that are kept."""
    found: list[str] = []
    for cause in event.cause:
        id_ = _last(meant.get(cause, ()), at) if cause.startswith("@") else stands_for.get(cause, cause)
        if id_ is not None and id_ in kept and id_ != event.id and id_ not in found:
            found.append(id_)
    if not found and event.type == "round.completed":
        # A node does not hear which event it follows from, and over a shared cell it may be another node's.
        before = [one for one in meant.get(f"@broken.{event.round - 1}", ()) if one[0] <= at]
        found = [id_ for id_ in [_last(before, at)] if id_ is not None]
    return found


_Meant = dict[str, list[tuple[float, str]]]
"""What references mean, in the order of time: those to `@broken.ROUND`, `@completed.ROUND`, and `@joined.NODE`."""


def _references(kept: dict[str, tuple[float, Event]]) -> _Meant:
    meant: _Meant = defaultdict(list)
    for id_, (at, event) in kept.items():
        if event.type == "node.joined":
            meant[f"@joined.{event.node}"].append((at, id_))
        elif event.type in _DECIDED:
            meant[f"@{_DECIDED[event.type]}.{event.round}"].append((at, id_))
    return meant


def _last(found: Sequence[tuple[float, str]], at: float) -> str | None:
    """Return the last event up to ``at``, or else the first one after it. ``found``: in the order of time."""
    after = bisect_right(found, at, key=lambda one: one[0])
    return found[max(0, after - 1)][1] if found else None


def _order(kept: dict[str, tuple[float, Event]], causes: dict[str, list[str]]) -> list[str]:
    """Order events: causes first, each origin's in its order, then by the common clock."""
    before: dict[str, set[str]] = {id_: set(found) for id_, found in causes.items()}
    own: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for id_, (_, event) in kept.items():
        own[event.origin].append((event.order, id_))
    for line in own.values():
        line.sort()
        for (_, one), (_, next_) in itertools.pairwise(line):
            before[next_].add(one)
    after: dict[str, list[str]] = defaultdict(list)
    for id_, found in before.items():
        for cause in found:
            after[cause].append(id_)
    ready = [(kept[id_][0], id_) for id_, found in before.items() if not found]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, id_ = heapq.heappop(ready)
        ordered.append(id_)
        for next_ in after[id_]:
            before[next_].discard(id_)
            if not before[next_]:
                heapq.heappush(ready, (kept[next_][0], next_))
    # Files that were changed may have causes in a circle.
    done = set(ordered)
    return ordered + sorted((id_ for id_ in kept if id_ not in done), key=lambda id_: kept[id_][0])
