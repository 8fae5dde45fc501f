"""Merge the events of several origins: a coordinator's, those of nodes, and those that members replayed. Pure.

Each origin has its own clock and its own count. No time of day is read. Several origins record the same fact: a round
that was completed or broken, a worker that ended. Equal facts show how far the clocks differ. The coordinator's event
replaces the nodes' events about the same decision. If no file has it, the first node's event is used. In the result
causes come before consequences, and each origin's events keep their order. Otherwise the common clock orders them.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elastic_rs._observe._events import Event, incarnation_of, replayed

Key = tuple[object, ...]

_DECIDED = {
    "round.completed": "completed",
    "round.broken": "broken",
    "round.changes": "broken",
    "worker.exited": "exited",
    "run.closed": "closed",
    "node.left": "left",
}
_RECEIVED = {
    "received.completed": "completed",
    "received.broken": "broken",
    "received.exited": "exited",
    "received.closed": "closed",
    "received.signal": "left",
}
_REASON = 200
"""Characters of a round's reason by which it is known again. Members may have replayed the beginning alone."""


def merge(events: Sequence[Event]) -> tuple[list[Event], int]:
    """Merge events of one run.

    Args:
        events: those of one origin in their order. The origins may come in any order.

    Returns:
        The events, and what to add to a time on the clock of the last coordinator. Events of origins that know of
        nothing in common stay apart, each with its own ``incarnation``. Those of one coordinator alone do not change.
    """
    if not any(event.type == "replayed" or incarnation_of(event).startswith("n") for event in events):
        return list(events), 0
    clocks = _clocks(events)
    merged: list[Event] = []
    shift = 0
    last = max((clock.position for clock in clocks.values() if clock.name.startswith("c")), default=-1)
    for group in _groups(clocks):
        chosen, added = _merge_group(group)
        merged += chosen
        if any(clock.position == last for clock in group.clocks):
            shift = added
    return merged, shift


@dataclass
class _Clock:
    name: str
    position: int
    events: list[Event] = field(default_factory=list)
    made: dict[Key, int] = field(default_factory=dict)
    """When something was decided or observed here that other origins receive later."""
    received: dict[Key, int] = field(default_factory=dict)
    """When such a fact of another origin was received here."""
    same: dict[str, int] = field(default_factory=dict)
    """When events were recorded that are known of two clocks, by id."""


@dataclass
class _Group:
    """Clocks that know of something in common, the common one first, and how far each is ahead of it."""

    clocks: list[_Clock]
    ahead: dict[str, float]


def _clocks(events: Iterable[Event]) -> dict[str, _Clock]:
    """Sort events by their clocks. Replayed events are on the coordinator's, unless they are in a member's file."""
    clocks: dict[str, _Clock] = {}
    replays: list[Event] = []
    for event in events:
        if event.type == "dropped":
            continue  # it is about the file, not about the run
        one = replayed(event)
        if one is None:
            name = incarnation_of(event)
            clocks.setdefault(name, _Clock(name, len(clocks))).events.append(event)
        else:
            replays.append(one)
    known = {event.id: clock for clock in clocks.values() for event in clock.events}
    for event in replays:
        name = incarnation_of(event)
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
                continue  # a node gets its signal before the others are notified that it leaves
            made = event.type == "worker.ended" or (event.type in _DECIDED and event.type != "worker.exited")
            (clock.made if made else clock.received).setdefault(key, event.mono_us)


def _reasons(events: Iterable[Event]) -> dict[tuple[str, int], str]:
    """Return why each round was complete, by origin and number.

    The reason names the members with their process ids, so it distinguishes rounds of jobs of one name. An
    origin that does not know it gets the one that all others agree on.
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
    about = _DECIDED.get(event.type) or _RECEIVED.get(event.type)
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

    A fact is received later than it happens, so each such pair is a bound.
    """
    exact = [other.same[id_] - one.same[id_] for id_ in one.same.keys() & other.same.keys()]
    if exact:
        return median(exact)
    most = min((other.received[key] - one.made[key] for key in one.made.keys() & other.received.keys()), default=None)
    least = max((other.made[key] - one.received[key] for key in one.received.keys() & other.made.keys()), default=None)
    if most is not None and least is not None and least <= most:
        return (most + least) / 2
    if most is not None or least is not None:
        return most if most is not None else least
    both = [
        other.received[key] - one.received[key]
        for key in one.received.keys() & other.received.keys()
        if key != ("closed",)
    ]
    return median(both) if both else None


def _groups(clocks: dict[str, _Clock]) -> list[_Group]:
    left = sorted(clocks.values(), key=lambda clock: clock.name)  # whatever the order of the files
    groups = []
    while left:
        coordinators = [clock for clock in left if clock.name.startswith("c")]
        last = max(coordinators, key=lambda clock: clock.position, default=None)
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
    return sorted(groups, key=lambda group: min(clock.position for clock in group.clocks))


def _merge_group(group: _Group) -> tuple[list[Event], int]:
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
    numbers: dict[str, int] = {}
    when: dict[str, int] = {}
    merged = []
    for number, id_ in enumerate(order, start=1):
        at, event = kept[id_]
        known = [cause for cause in causes[id_] if cause in numbers]
        numbers[id_] = number
        when[id_] = max([round(at) + shift, *(when[cause] for cause in known)])
        follows = tuple(numbers[cause] for cause in known)
        merged.append(
            replace(event, order=number, mono_us=when[id_], cause=tuple(known), incarnation=name, follows=follows)
        )
    return merged, shift


def _stand_ins(events: Sequence[tuple[float, Event]]) -> dict[str, str]:
    """Return the event to keep for each that several origins have: the decision, else the first received."""
    reasons = _reasons([event for _, event in events])
    groups: dict[Key, list[Event]] = defaultdict(list)
    for _, event in events:
        key = _key(event, reasons)
        if key is not None:
            groups[key].append(event)
    stands_for = {}
    for same in groups.values():
        decided = [event for event in same if event.type in _DECIDED]
        received = [event for event in same if event.type in _RECEIVED]
        if not decided and not received and same[0].type != "phase":
            continue  # only one node has it
        chosen = (decided or received or same)[0]
        stands_for.update({event.id: chosen.id for event in same if event not in decided})
    return stands_for


def _as_decided(event: Event) -> Event:
    """Return a node's event about a decision as the event of that decision. Other events stay as they are."""
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
            # No other event says that the world of this node was broken.
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
        # A node is not sent the cause of a round. Over a shared cell another node may have recorded it.
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
    for numbered in own.values():
        numbered.sort()
        for (_, one), (_, next_) in itertools.pairwise(numbered):
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
