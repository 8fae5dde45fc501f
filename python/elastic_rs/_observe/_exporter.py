"""Recoveries of a running job as OTLP, each as soon as its cost is known.

``Recoveries`` is pure and bounded: it finds the ones that are to be printed.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs
from elastic_rs._observe._events import parse
from elastic_rs._observe._otlp import recovery_traces
from elastic_rs._observe._story import Names, story_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_rs._observe._events import Event
    from elastic_rs._observe._source import Live
    from elastic_rs._observe._story import Story

__all__ = ["Recoveries", "export"]

SETTLE_S = 60.0
"""A recovery is printed when no event about it came for so long: phases of slow nodes come late."""
KEPT_EVENTS = 20_000
"""Most events that are kept since the world before the recovery was formed."""

_ENDS = ("round.broken", "round.changes", "run.closed")
"""After one of these no further event is about the recovery before it."""
_REPORTS = ("phase", "round.completed")


class Recoveries:
    """Finds the recoveries of one run that are to be printed, from its events as they come."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._events: list[Event] = []
        self._done: set[str] = set()
        self._reported_at: float | None = None
        self._names = Names()

    def take(self, events: Sequence[Event], now_s: float) -> list[dict[str, Any]]:
        """Take the next events. Returns the traces of recoveries that are to be printed.

        Args:
            events: in their order. There may be none.
            now_s: the time of any clock that never jumps.
        """
        for event in events:
            self._names.count(event)
        self._events += events
        del self._events[:-KEPT_EVENTS]
        if any(event.type in _REPORTS for event in events):
            self._reported_at = now_s
        ended = any(event.type in _ENDS for event in events)
        settled = self._reported_at is not None and now_s - self._reported_at >= SETTLE_S
        return self._ready(settled=settled) if ended or settled else []

    def rest(self) -> list[dict[str, Any]]:
        """Return the traces that are left, because no further event will come."""
        return self._ready(settled=True, last=True)

    def _ready(self, *, settled: bool, last: bool = False) -> list[dict[str, Any]]:
        story = story_of(self._events)
        story.shared |= self._names.story.shared  # of nodes that joined before the events that are kept
        ready = []
        for recovery, trace in recovery_traces(story, self._version):
            ended = last or story.closed is not None or recovery is not story.recoveries[-1]
            # A training that reports its steps may need longer than SETTLE_S for its first step.
            known = settled and recovery.ended_us is not None
            if recovery.trigger.id not in self._done and (ended or known):
                self._done.add(recovery.trigger.id)
                ready.append(trace)
        if settled:
            self._reported_at = None
        self._forget(story)
        return ready

    def _forget(self, story: Story) -> None:
        """Forget events before the world in which the oldest pending recovery began, or before the present world."""
        pending = next((one.broken for one in story.recoveries if one.trigger.id not in self._done), None)
        before = itertools.takewhile(lambda event: event is not pending, story.events)
        world = [event.id for event in before if event.type == "round.completed"][-1:]
        del self._events[: next((at for at, event in enumerate(self._events) if [event.id] == world), 0)]
        # A member's report to a restarted coordinator has an id of its own in the story.
        self._done &= {event.id for event in (*self._events, *story.events)}


def export(live: Live, version: str) -> None:
    """Print each recovery of a run, until the coordinator has gone or a signal ends the process.

    Then what is left is printed, with what is known of it.

    Raises:
        AnswerError: the coordinator has gone.
        KeyboardInterrupt, SystemExit: the process got SIGINT or SIGTERM.
    """
    recoveries = Recoveries(version)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through what follows
    _elastic_rs.watch_signals([signal.SIGTERM, signal.SIGINT])  # one that is delivered twice does not break off the end
    try:
        for lines in live.batches():
            _print(recoveries.take(parse(lines), time.monotonic()))
    finally:
        _print(recoveries.rest())


def _print(traces: Iterable[dict[str, Any]]) -> None:
    for trace in traces:
        print(json.dumps(trace), flush=True)
