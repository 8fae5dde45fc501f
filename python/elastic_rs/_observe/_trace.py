"""Events in Chrome's trace format, which Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show. Pure.

One process for the job, whose slices are its rounds and recoveries, and one for each node, whose slices are its phases.
Arrows lead from causes to what they caused. Source of the format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_rs._observe._events import Event
from elastic_rs._observe._story import PHASES, Period, Story, story_of

_JOB = 1
_ROUNDS, _EVENTS = 1, 2
_SHORTEST_US = 1


def chrome_trace(events: Sequence[Event], now_us: int | None = None) -> dict[str, Any]:
    story = story_of(events, now_us)
    pids: dict[str | None, int] = {None: _JOB}
    for event in story.events:
        if event.node is not None:
            pids.setdefault(event.node, len(pids) + 1)
    trace: list[dict[str, Any]] = []
    for node, pid in pids.items():
        trace.append(_meta("process_name", pid, 0, node or f"job {story.run}"))
        trace.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        trace.append(_meta("thread_name", pid, _EVENTS, "events"))
    trace.append(_meta("thread_name", _JOB, _ROUNDS, "rounds"))
    for node, pid in pids.items():
        if node is not None:
            trace += [_meta("thread_name", pid, _EVENTS + 1 + at, phase) for at, phase in enumerate(PHASES)]
    trace += [_slice(period, _JOB, _ROUNDS) for period in story.periods()]
    for event in story.events:
        trace += _phases(event, story, pids[event.node]) if event.type == "phase" else _instant(event, pids[event.node])
    trace += _flows(story.events, pids)
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _phases(event: Event, story: Story, pid: int) -> list[dict[str, Any]]:
    return [_slice(phase, pid, _EVENTS + 1 + PHASES.index(phase.kind)) for phase in story.phase_periods(event)]


def _instant(event: Event, pid: int) -> list[dict[str, Any]]:
    args = {"order": event.order, "text": event.text, **event.data}
    instant = Period(event.type, event.mono_us, event.mono_us + _SHORTEST_US)
    return [{**_slice(instant, pid, _EVENTS), "args": args}]


def _flows(events: Sequence[Event], pids: dict[str | None, int]) -> list[dict[str, Any]]:
    known = {event.id: event for event in events}
    flows = []
    for event in events:
        for cause in (known[id_] for id_ in event.cause if id_ in known):
            flow = {"name": "cause", "cat": "cause", "id": f"{cause.id}-{event.id}"}
            at = {"pid": pids[cause.node], "tid": _EVENTS, "ts": cause.mono_us}
            flows.append({**flow, "ph": "s", **at})
            flows.append({**flow, "ph": "f", "bp": "e", "pid": pids[event.node], "tid": _EVENTS, "ts": event.mono_us})
    return flows


def _slice(period: Period, pid: int, tid: int) -> dict[str, Any]:
    lasted = period.end_us - period.begin_us
    return {"name": period.name, "ph": "X", "ts": period.begin_us, "dur": lasted, "pid": pid, "tid": tid}


def _meta(name: str, pid: int, tid: int, shown: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": shown}}
