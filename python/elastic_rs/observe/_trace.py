"""Events in Chrome's trace format, which Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show. Pure.

One process for the job, whose slices are its rounds and recoveries, and one for each node, whose slices are its phases.
Arrows lead from causes to what they caused. Source of the format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_rs.observe._story import PHASES, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_rs.observe._events import Event

__all__ = ["chrome_trace"]

_JOB = 1
_ROUNDS, _EVENTS = 1, 2
_SHORTEST_US = 1


def chrome_trace(events: Sequence[Event], now_us: int | None = None) -> dict[str, Any]:
    """Return the trace of a run's events.

    Args:
        events: all of one run, in their order.
        now_us: the time on the coordinator's clock, which ends what goes on; by default that of the last event.
    """
    story = tell(events, now_us)
    pids: dict[str | None, int] = {None: _JOB}
    for event in events:
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
    trace += _rounds(events, story.end_us())
    for event in events:
        trace += _phases(event, pids[event.node]) if event.type == "phase" else _instant(event, pids[event.node])
    trace += _flows(events, pids)
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _rounds(events: Sequence[Event], end_us: int) -> list[dict[str, Any]]:
    slices = []
    name, since = "forming", events[0].mono_us if events else 0
    for event in events:
        if event.type == "round.completed":
            slices.append(_slice(name, since, event.mono_us, _JOB, _ROUNDS))
            name, since = f"round {event.round}", event.mono_us
        elif event.type in ("round.broken", "run.closed") and name.startswith("round"):
            slices.append(_slice(name, since, event.mono_us, _JOB, _ROUNDS))
            name, since = "recovery" if event.type == "round.broken" else "ended", event.mono_us
    if name != "ended":
        slices.append(_slice(name, since, max(end_us, since), _JOB, _ROUNDS))
    return slices


def _phases(event: Event, pid: int) -> list[dict[str, Any]]:
    # A node tells how long its phases took when the last of them has ended, so they are drawn backwards from then.
    slices, end = [], event.mono_us
    for at, phase in reversed(list(enumerate(PHASES))):
        micros = event.data.get(f"{phase}_us")
        if isinstance(micros, int):
            slices.append(_slice(phase, end - micros, end, pid, _EVENTS + 1 + at))
            end -= micros
    return slices


def _instant(event: Event, pid: int) -> list[dict[str, Any]]:
    args = {"order": event.order, "text": event.text, **event.data}
    return [{**_slice(event.type, event.mono_us, event.mono_us + _SHORTEST_US, pid, _EVENTS), "args": args}]


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


def _slice(name: str, begin_us: int, end_us: int, pid: int, tid: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": begin_us, "dur": end_us - begin_us, "pid": pid, "tid": tid}


def _meta(name: str, pid: int, tid: int, shown: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": shown}}
