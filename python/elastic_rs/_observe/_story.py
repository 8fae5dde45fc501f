"""What happened, from events alone: each recovery with its root, its consequences, and what it cost. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastic_rs._observe._events import Event, host_of, incarnation_of
from elastic_rs._observe._merge import merge

PHASES = ("detect", "stop", "rendezvous", "start", "import", "group", "state", "first_step")
"""The parts of a recovery, in their order."""
_KEYS = tuple((phase, f"{phase}_us") for phase in PHASES)

BROKEN = ("round.broken", "round.changes")
_PEER_ENDED = ("Connection closed by peer", "Connection reset by peer")
"""How gloo says that another worker of a collective has ended."""
_MISMATCH = ("op.preamble.length <= op.nbytes", "collective mismatch")
"""How gloo says that a worker got more bytes than its collective has."""
LOSSES = ("node.lost", "node.left", "node.replaced", "node.withdrew")


@dataclass(frozen=True)
class Part:
    """One part of a recovery, over all nodes that reported its duration."""

    median_s: float
    longest_s: float
    slowest: str
    nodes: int


@dataclass(frozen=True)
class Redo:
    """Steps that are made again, because the last checkpoint was before them.

    Attributes:
        seconds: what they cost, at the mean time of a step before.
    """

    steps: int
    seconds: float


@dataclass
class Hang:
    """The training stood still until its limit, or a rank was in a state that never goes on by itself.

    Attributes:
        found: the event with its lines.
        over: the training went on.
        ended_us: when it went on, or its world was broken. None: it still hangs.
    """

    found: Event
    over: Event | None = None
    ended_us: int | None = None

    @property
    def lines(self) -> list[str]:
        """What stands still, why, and where: at most six lines."""
        lines = self.found.data.get("lines")
        return [str(line) for line in lines[:6]] if isinstance(lines, list) else []

    def began_us(self) -> int:
        """Return when the last progress was, on the coordinator's clock."""
        return max(0, self.found.mono_us - _silent_us(self.found))


@dataclass
class Recovery:
    """A world had to re-form.

    Attributes:
        root: its root cause. Without causes it is ``broken`` itself.
        consequences: failures and losses that followed from it.
        stopped: ends of workers that their agents have stopped because of it, as far as nodes' own events are known.
        redo: the steps that are repeated. None: the training script does not report its steps, or not their numbers.
        began_us: when it began, on the coordinator's clock. ``root`` is recorded once it is known, a little later.
        ended_us: when the workers had made their first step. If the training reports no steps, when the last worker
            was started.
        ends_with_step: ``ended_us`` is the end of a first step.
        hang: the hang that it ended: ``root``, or one that was found before ``root``.
        early: workers that ended with 0 while others ran on, which then lost connections. ``root`` is the first.
        mismatched: the worker that gloo aborted, because another one had entered a different collective.
    """

    broken: Event
    root: Event
    consequences: list[Event] = field(default_factory=list)
    stopped: list[Event] = field(default_factory=list)
    completed: Event | None = None
    nodes_before: int | None = None
    workers: int | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    redo: Redo | None = None
    began_us: int | None = None
    ended_us: int | None = None
    ends_with_step: bool = False
    hang: Hang | None = None
    early: list[Event] = field(default_factory=list)
    mismatched: Event | None = None

    @property
    def trigger(self) -> Event:
        """The event that began it by the recorded causes. It is ``root``, unless a worker ended early before it."""
        return self.consequences[0] if self.early else self.root

    def lasted_s(self, now_us: int, since_us: int = 0) -> float:
        """Return how long it has taken since then, in seconds. Its end is ``now_us`` if it has not ended."""
        begin, end = self.period_us(now_us, since_us)
        return (end - begin) / 1e6

    def period_us(self, now_us: int, since_us: int = 0) -> tuple[int, int]:
        """Return when it began and ended, on the coordinator's clock. See :meth:`lasted_s`."""
        begin = max(since_us, self.root.mono_us if self.began_us is None else self.began_us)
        return begin, max(begin, now_us if self.ended_us is None else self.ended_us)


@dataclass(frozen=True)
class Period:
    """A time of the job or of a node, on the coordinator's clock.

    Attributes:
        kind: ``forming`` (the first round), ``round``, ``recovery``, or a phase.
    """

    kind: str
    begin_us: int
    end_us: int
    round: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.round is None else f"{self.kind} {self.round}"


@dataclass
class Story:
    """What happened to one run.

    Attributes:
        events: in their order; those of the last coordinator, if it was restarted.
        first_step_us: when the first training step ended, if the training reports its steps.
        last_first_step: the last event with the number of a first step.
        away: nodes that left or were lost and have not joined again, each with that event.
        gone: how often nodes of each host left or were lost.
        shared: hosts on which several nodes were in the job at the same time.
        incarnations: how many coordinator processes recorded events. Each has its own clock: this is the last one.
        earlier: number of recoveries of the earlier incarnations.
        until_complete_us: of each round that ended a recovery, by the id of the event that completed it: the time from
            the end of the round before until then.
        hangs: those that were found.
    """

    run: str
    events: Sequence[Event] = ()
    recoveries: list[Recovery] = field(default_factory=list)
    formed_us: int | None = None
    first_step_us: int | None = None
    last_first_step: Event | None = None
    closed: Event | None = None
    away: dict[str, Event] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    worlds: list[Event] = field(default_factory=list)
    now_us: int = 0
    shared: set[str] = field(default_factory=set)
    incarnations: int = 1
    earlier: int = 0
    until_complete_us: dict[str, int] = field(default_factory=dict)
    hangs: list[Hang] = field(default_factory=list)

    def phases_us(self, event: Event) -> dict[str, int]:
        """Return how long a node's phases took, in microseconds: those that the event has."""
        return phases_us(event, self.until_complete_us.get(event.cause[0]) if event.cause else None)

    def phase_periods(self, event: Event) -> Iterator[Period]:
        """Yield a node's phases, the last one first. A node reports them when the last has ended."""
        end = event.mono_us
        for phase, micros in reversed(self.phases_us(event).items()):
            yield Period(phase, end - micros, end)
            end -= micros

    def name(self, node: str) -> str:
        """Return a node's name without its process id and its domain, unless several nodes share its host."""
        host, _, pid = node.rpartition(":")
        if not pid.isdecimal() or not host or host in self.shared:
            return node
        return host if host.replace(".", "").isdecimal() else host.partition(".")[0]

    def dropped(self) -> int:
        """Return how many events there were before the first one that is known: the coordinator keeps the last ones."""
        return self.events[0].order - 1 if self.events else 0

    def lost_s(self) -> float:
        """Return the lost time in seconds: that of recoveries, and that of repeated steps."""
        since = self.first_step_us or 0
        stood = sum(recovery.lasted_s(self.end_us(), since) for recovery in self._recoveries())
        return stood + sum(recovery.redo.seconds for recovery in self.recoveries if recovery.redo is not None)

    def _recoveries(self) -> list[Recovery]:
        """Return those that a round ended, or is to end."""
        return [one for one in self.recoveries if one.broken is not self.closed]

    def end_us(self) -> int:
        """Return when the run was closed, or the time now."""
        return self.now_us if self.closed is None else self.closed.mono_us

    def elapsed_s(self) -> float:
        """Return the time since the first round was complete, in seconds."""
        return 0.0 if self.formed_us is None else max(0, self.end_us() - self.formed_us) / 1e6

    def goodput_at_most(self) -> float | None:
        """Return the share of the time since the first step, or else the first round, without known loss.

        Each moment has the weight of the workers of its world.
        """
        since = self.formed_us if self.first_step_us is None else self.first_step_us
        elapsed = 0.0 if since is None else self._worker_seconds(since, self.end_us())
        return None if elapsed <= 0 else max(0.0, 1 - self._lost_worker_seconds() / elapsed)

    def _lost_worker_seconds(self) -> float:
        """Return the time that was lost, as :meth:`lost_s`, but with each second as often as workers lost it."""
        since, lost = self.first_step_us or 0, 0.0
        for recovery in self._recoveries():
            begin, end = recovery.period_us(self.end_us(), since)
            lost += self._worker_seconds(begin, end)
        redone = [(one.redo.seconds, one.completed) for one in self.recoveries if one.redo and one.completed]
        return lost + sum(seconds * _count(completed, self._unit()) for seconds, completed in redone)

    def _worker_seconds(self, begin_us: int, end_us: int) -> float:
        """Return the seconds between two times, each as often as its world has workers."""
        found, unit = 0.0, self._unit()
        for world, later in itertools.zip_longest(self.worlds, self.worlds[1:]):
            until = end_us if later is None else min(end_us, later.mono_us)
            found += max(0, until - max(begin_us, world.mono_us)) / 1e6 * _count(world, unit)
        return found

    def _unit(self) -> str:
        """Return the unit by which worlds are weighted: ``nodes``, if the number of workers of one is not known."""
        return "workers" if all(_count(world, "workers") for world in self.worlds) else "nodes"

    def goodput(self) -> float | None:
        """Return the share of time since the first step that was spent on steps that count. None: unknown."""
        since = self.first_step_us
        if since is None:
            return None
        later = [one for one in self._recoveries() if one.ended_us is None or one.ended_us > since]
        known = all(one.redo is not None for one in later if one.ends_with_step)
        return self.goodput_at_most() if known else None

    def shown_us(self) -> tuple[int, int]:
        """Return when the known time begins and ends, on the coordinator's clock. There is at least one event."""
        return self.events[0].mono_us, max(self.end_us(), self.events[-1].mono_us)

    def periods(self) -> list[Period]:
        """Return the rounds, and the times between them, from the first event to the end of the run."""
        if not self.events:
            return []
        found: list[Period] = []
        kind, number, since = "forming", None, self.events[0].mono_us
        for event in self.events:
            ends = kind == "round" and event.type in ("round.broken", "run.closed")
            if event.type == "round.goes_on" and kind == "recovery":
                last = found.pop()  # it was not broken after all
                kind, number, since = last.kind, last.round, last.begin_us
            elif event.type == "round.completed" or ends:
                found.append(Period(kind, since, event.mono_us, number))
                if event.type == "run.closed":
                    return found
                completed = event.type == "round.completed"
                kind, number = ("round", event.round) if completed else ("recovery", None)
                since = event.mono_us
        return [*found, Period(kind, since, max(since, self.end_us()), number)]

    def slowest(self) -> list[tuple[str, str, int, Part]]:
        """Return the nodes that were slowest in a part more than once: node, phase, how often, and the last time."""
        counts: dict[tuple[str, str], tuple[int, Part]] = {}
        for recovery in self.recoveries:
            for phase, part in recovery.parts.items():
                # Of two nodes one is always slower.
                if part.nodes > 2 and part.longest_s > 2 * part.median_s + 0.1:
                    times, _ = counts.get((part.slowest, phase), (0, part))
                    counts[part.slowest, phase] = (times + 1, part)
        found = [(node, phase, times, part) for (node, phase), (times, part) in counts.items() if times > 1]
        return sorted(found, key=lambda one: (-one[2], -one[3].longest_s))


def story_of(events: Sequence[Event], now_us: int | None = None) -> Story:
    """Return the story of a run. Events of one origin must be in their order; the origins may come in any order."""
    events, shift_us = merge(events)
    found = [_story_of_incarnation(list(one)) for _, one in itertools.groupby(events, incarnation_of)] or [Story("")]
    story = found[-1]
    story.incarnations, story.earlier = len(found), sum(len(one.recoveries) for one in found[:-1])
    story.now_us = (
        now_us + shift_us if now_us is not None else max((event.mono_us for event in story.events), default=0)
    )
    return story


def _story_of_incarnation(events: Sequence[Event]) -> Story:
    """Return the story of a run under one coordinator process."""
    story = Story(events[0].run, events)
    nodes_of_hosts = _Hosts()
    known: dict[str, Event] = {}
    phases: dict[str, list[Event]] = {}
    open_one: Recovery | None = None
    nodes: int | None = None
    workers: int | None = None
    last_completed = 0
    for event in events:
        known[event.id] = event
        if event.type in BROKEN:
            if open_one is None:
                root = _root(event, known, since=last_completed)
                open_one = Recovery(event, root, nodes_before=nodes, workers=workers)
                story.recoveries.append(open_one)
            elif event.type == "round.broken" and open_one.broken.type == "round.changes":
                open_one.broken = event  # a change in place has failed
                open_one.root = _root(event, known, since=last_completed)
        elif event.type == "round.goes_on" and open_one is not None:
            story.recoveries.remove(open_one)
            open_one = None
        elif event.type == "round.completed":
            nodes, workers = event.data.get("nodes"), event.data.get("workers")
            last_completed = event.order
            story.worlds.append(event)
            story.formed_us = event.mono_us if story.formed_us is None else story.formed_us
            if open_one is not None:
                open_one.completed, open_one.ended_us = event, event.mono_us
                open_one = None
        elif event.type == "phase" and event.cause:
            phases.setdefault(event.cause[0], []).append(event)
        elif event.type == "run.closed":
            story.closed = event
            if open_one is None and event.data.get("verdict") in ("failed", "stopped") and story.formed_us is not None:
                # The failure for which no restart was left.
                root = _root(event, known, since=last_completed)
                story.recoveries.append(Recovery(event, root, nodes_before=nodes, workers=workers))
        elif open_one is not None and event is not open_one.root and _follows(event, open_one):
            open_one.consequences.append(event)
        nodes_of_hosts.count(story, event)
    steps = [event for event in events if event.type == "phase" and "first_step" in phases_us(event)]
    story.first_step_us = min((event.mono_us for event in steps), default=None)
    story.last_first_step = next((event for event in reversed(steps) if isinstance(event.data.get("step"), int)), None)
    stopped: dict[int, list[Event]] = {}
    succeeded: dict[int, list[Event]] = {}
    for event in events:
        if event.type == "worker.ended" and event.data.get("stopped") is True:
            stopped.setdefault(event.round, []).append(event)
        elif event.type == "worker.ended" and event.data.get("returncode") == 0:
            succeeded.setdefault(event.round, []).append(event)
    for recovery, later in itertools.zip_longest(story.recoveries, story.recoveries[1:]):
        recovery.stopped = stopped.get(recovery.broken.round, [])
        reported = [] if recovery.completed is None else phases.get(recovery.completed.id, [])
        lost = [event for event in (recovery.root, *recovery.consequences) if _silent_us(event)]
        until_complete_us = _until_complete_us(recovery)
        if recovery.completed is not None:
            story.until_complete_us[recovery.completed.id] = until_complete_us
        recovery.parts = parts([*reported, *lost], until_complete_us)
        # A node that is about to leave trains on until the world changes.
        begins = recovery.broken if recovery.root.type == "node.leaves" else recovery.root
        recovery.began_us = min([begins.mono_us - _silent_us(begins), *_chains(reported)])
        if recovery.completed is not None:
            _end(recovery, reported, story.first_step_us, None if later is None else later.broken.mono_us)
        _explain(recovery, succeeded.get(recovery.broken.round, []))
    _note_hangs(story)
    return story


def _explain(recovery: Recovery, succeeded: Sequence[Event]) -> None:
    """Note what failure messages of gloo show: workers that ended early, with exit code 0, or a mismatch."""
    root = recovery.root
    failures = [event for event in (root, *recovery.consequences) if event.type == "worker.exited"]
    recovery.mismatched = next(filter(_is_mismatch, failures), None)
    if recovery.mismatched is None and _mentions(root, _PEER_ENDED):
        recovery.early = [event for event in succeeded if event.order < root.order]
        if recovery.early:
            recovery.root = recovery.early[0]
            recovery.consequences.insert(0, root)


def _is_mismatch(failure: Event) -> bool:
    aborted = failure.data.get("exit") == "SIGABRT"
    return _mentions(failure, _MISMATCH) or (aborted and _mentions(failure, ("EnforceNotMet",)))


def _mentions(event: Event, texts: Iterable[str]) -> bool:
    message = str(event.data.get("message") or "") if event.type == "worker.exited" else ""
    return any(text in message for text in texts)


def _note_hangs(story: Story) -> None:
    """Add the hangs that were found, each with its end, and to recoveries the one that they ended."""
    ends = {recovery.broken.id: recovery for recovery in story.recoveries}
    last: Hang | None = None
    for event in story.events:
        match event.type:
            case "hang.found":
                if last is not None and last.ended_us is None:
                    last.ended_us = event.mono_us
                last = Hang(event)
                story.hangs.append(last)
            case "hang.over" if story.hangs:
                story.hangs[-1].over = event
                story.hangs[-1].ended_us = story.hangs[-1].ended_us or event.mono_us
                last = None
            case "round.broken" | "round.changes" | "run.closed" if last is not None:
                last.ended_us = last.ended_us or event.mono_us
                if event.id in ends:
                    ends[event.id].hang = last
            case "round.goes_on" if last is not None:
                last.ended_us = None
            case "round.completed":
                last = None


def _end(recovery: Recovery, phases: Sequence[Event], first_step_us: int | None, next_us: int | None) -> None:
    """Set the end of a recovery with a completed round, and the steps that its workers repeat."""
    steps = [event for event in phases if "first_step" in phases_us(event)]
    if steps:
        recovery.ends_with_step, recovery.ended_us = True, max(event.mono_us for event in steps)
        recovery.redo = _redo(steps, recovery.root.mono_us - (first_step_us or 0))
    elif first_step_us is not None and first_step_us < recovery.broken.mono_us:
        recovery.ended_us = next_us  # the round has made no step
    else:
        assert recovery.completed is not None
        started = [event.mono_us for event in phases if event.data.get("start_us") is not None]
        recovery.ended_us = max([recovery.completed.mono_us, *started])


def _redo(steps: Sequence[Event], at_most_us: int) -> Redo | None:
    """Return what is made again, from the first steps of a round. It cannot take longer than what was there before."""

    def numbers(name: str) -> list[int]:
        return [number for event in steps if isinstance(number := event.data.get(name), int)]

    first, before, times = numbers("step"), numbers("step_before"), numbers("step_time_us")
    if not first or not before:
        return None
    count = max(0, max(before) - min(first) + 1)
    seconds = count * (median(times) if times else 0) / 1e6
    return Redo(count, max(0.0, min(seconds, at_most_us / 1e6)))


def _count(completed: Event, unit: str) -> int:
    """Return the number of a world's ``workers`` or ``nodes``. Without a number of nodes it is 1; of workers, 0."""
    count = completed.data.get(unit)
    return count if isinstance(count, int) and count > 0 else int(unit == "nodes")


_SILENT = {"node.lost": "silent_ms", "hang.found": "still_ms"}


def _silent_us(event: Event) -> int:
    """Return for how long a lost node had sent nothing, or a training that hangs had stood still, in microseconds."""
    silent = event.data.get(_SILENT[event.type]) if event.type in _SILENT else None
    return 1000 * silent if isinstance(silent, int) else 0


def _until_complete_us(recovery: Recovery) -> int:
    return 0 if recovery.completed is None else max(0, recovery.completed.mono_us - recovery.broken.mono_us)


def _chains(phases: Iterable[Event]) -> Iterator[int]:
    """Yield when the first phase began, for each node that stopped workers. A joining node may have waited for long."""
    for event in phases:
        durations = phases_us(event)
        if "stop" in durations:
            yield event.mono_us - sum(durations.values())


def phases_us(event: Event, until_complete_us: int | None = None) -> dict[str, int]:
    """Return the durations of a node's phases in microseconds: those that the event has.

    Args:
        event: of type ``phase``, or of a node that was lost, or of a hang.
        until_complete_us: the time from the end of the round before until this one was complete, if one was before.
    """
    if event.type in _SILENT:
        return {"detect": _silent_us(event)}
    values = ((phase, event.data.get(key)) for phase, key in _KEYS)
    durations = {phase: micros for phase, micros in values if isinstance(micros, int)}
    if until_complete_us is not None and "rendezvous" in durations and "stop" not in durations:
        # A spare may have waited for days before the world that it joins was broken.
        durations["rendezvous"] = min(durations["rendezvous"], until_complete_us)
    return durations


def parts(phases: Iterable[Event], until_complete_us: int) -> dict[str, Part]:
    found: dict[str, list[tuple[float, str]]] = {}
    for event in phases:
        for phase, micros in phases_us(event, until_complete_us).items():
            found.setdefault(phase, []).append((micros / 1e6, event.node or "?"))
    return {
        phase: Part(median(seconds for seconds, _ in times), *max(times), len(times))
        for phase, times in sorted(found.items(), key=lambda item: PHASES.index(item[0]))
    }


def _root(event: Event, known: dict[str, Event], *, since: int) -> Event:
    # Causes are earlier events, so this ends. An event may name one that was dropped, or one of an earlier recovery.
    while event.cause and event.cause[0] in known and since < known[event.cause[0]].order < event.order:
        event = known[event.cause[0]]
    return event


def _follows(event: Event, recovery: Recovery) -> bool:
    if event.type == "worker.exited":
        return True
    return event.type in LOSSES and event.mono_us >= recovery.broken.mono_us


class Names:
    """The names of a job's nodes, from one event after the other. It keeps the hosts of all nodes that ever came."""

    def __init__(self) -> None:
        self.story = Story("")
        self._hosts = _Hosts()

    def count(self, event: Event) -> Story:
        """Take the next event. Returns a story that names nodes, and nothing else."""
        self._hosts.count(self.story, event)
        return self.story


class _Hosts:
    """The nodes of each host that are in the job, and those that have gone."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        self._away: dict[str, set[str]] = {}

    def count(self, story: Story, event: Event) -> None:
        """Note that a node has come or gone."""
        if event.node is None:
            return
        host = host_of(event.node)
        if event.type in ("node.lost", "node.left", "node.replaced"):
            if self._present.get(host) == event.node:
                del self._present[host]
            if event.type != "node.replaced":
                story.away[event.node] = event
                self._away.setdefault(host, set()).add(event.node)
                story.gone[host] = story.gone.get(host, 0) + 1
        elif event.type == "node.joined":
            if self._present.setdefault(host, event.node) != event.node:
                story.shared.add(host)
            # An agent that was started again has another process id.
            for node in self._away.pop(host, ()):
                story.away.pop(node, None)
