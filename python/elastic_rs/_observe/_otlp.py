"""Recoveries as traces of OpenTelemetry, in OTLP's JSON. ``traces`` is pure.

A recovery is a trace: the span of the recovery, below it one for each node, below those its phases. Source of the form:
``opentelemetry/proto/trace/v1/trace.proto`` of opentelemetry-proto 1.x, and "OTLP/HTTP, JSON Protobuf Encoding" of the
OTLP specification: ids in hexadecimal, numbers of 64 bits as text, enums as numbers.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

from elastic_rs._observe import _text
from elastic_rs._observe._events import host_of
from elastic_rs._observe._story import Period, Recovery, Story, story_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_rs._observe._events import Event

__all__ = ["recovery_traces", "traces"]

INTERNAL = 1
"""``SPAN_KIND_INTERNAL``."""
ERROR = 2
"""``STATUS_CODE_ERROR``."""


def traces(events: Sequence[Event], version: str, now_us: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield each recovery that has ended, as an ``ExportTraceServiceRequest``.

    Ids come from the run's name and the id of the event that began the recovery. So every reader of that event writes
    the same ids, and the same times: those of the coordinator's clock since that event, added to its time of day.

    Args:
        events: all of one run, in their order.
        version: of this package.
        now_us: the time on the coordinator's clock; by default that of the last event.
    """
    story = story_of(events, now_us)
    for _, trace in recovery_traces(story, version):
        yield trace


def recovery_traces(story: Story, version: str) -> Iterator[tuple[Recovery, dict[str, Any]]]:
    """Yield each recovery that has ended, and its trace: see :func:`traces`."""
    phases: dict[str, list[Event]] = {}
    for event in story.events:
        if event.type == "phase" and event.cause:
            phases.setdefault(event.cause[0], []).append(event)
    for recovery in story.recoveries:
        completed = recovery.completed
        if completed is not None or recovery.broken is story.closed:
            spans = _Trace(story, recovery).spans(phases.get(completed.id, []) if completed is not None else [])
            scope = {"name": "elastic_rs", "version": version}
            resource = {"attributes": _attributes({"service.name": "elastic_rs", "elastic_rs.run": story.run})}
            yield (
                recovery,
                {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]},
            )


class _Trace:
    """The trace of one recovery."""

    def __init__(self, story: Story, recovery: Recovery) -> None:
        self._story, self._recovery = story, recovery
        self._trace = _id(16, story.run, recovery.trigger.id)
        # The only time of day that is used. What follows is the coordinator's clock, which never jumps.
        self._wall_ns = _nanoseconds(recovery.trigger.wall)

    def spans(self, phases: Sequence[Event]) -> list[dict[str, Any]]:
        """Return all spans, the recovery's first. ``phases``: those of its nodes."""
        story, recovery = self._story, self._recovery
        root, completed = recovery.root, recovery.completed
        known = [event.mono_us for event in (recovery.broken, completed, *phases) if event is not None]
        end_us = recovery.ended_us if recovery.ended_us is not None else max(known)
        period = Period("recovery", recovery.trigger.mono_us, end_us)
        facts = {
            "elastic_rs.round": recovery.broken.round,
            "elastic_rs.restart": recovery.broken.restart if completed is None else completed.restart,
            "elastic_rs.cause": root.type,
            "elastic_rs.what": _text.what(root, story),
            "elastic_rs.workers": recovery.workers,
            "elastic_rs.node": root.node,
            "host.name": host_of(root.node) if root.node else None,
        }
        whole = self._span("recovery", "recovery", period, None, facts)
        happened = [root, *recovery.consequences, recovery.broken, *([completed] if completed is not None else [])]
        distinct = {event.id: event for event in happened}.values()
        whole["events"] = [self._event(event) for event in distinct]
        if completed is None:
            whole["status"] = {"code": ERROR, "message": recovery.broken.text or "the job has ended"}
        spans = [whole]
        for node, periods in _by_node(story, phases).items():
            begin = min(period.begin_us for period in periods)
            end = max(period.end_us for period in periods)
            named = {"elastic_rs.node": node, "host.name": host_of(node)}
            below = self._span(
                f"node {node}", f"node {story.name(node)}", Period("node", begin, end), whole["spanId"], named
            )
            spans.append(below)
            for period in periods:
                facts = {**named, "elastic_rs.phase": period.kind}
                spans.append(self._span(f"{period.kind} {node}", period.kind, period, below["spanId"], facts))
        return spans

    def _span(
        self, key: str, name: str, period: Period, parent: str | None, facts: Mapping[str, object]
    ) -> dict[str, Any]:
        span = {
            "traceId": self._trace,
            "spanId": _id(8, self._trace, key),
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": self._at(period.begin_us),
            "endTimeUnixNano": self._at(max(period.begin_us, period.end_us)),
            "attributes": _attributes(facts),
        }
        return span if parent is None else {**span, "parentSpanId": parent}

    def _event(self, event: Event) -> dict[str, Any]:
        plain = {key: value for key, value in event.data.items() if isinstance(value, str | int)}
        facts = {**plain, "elastic_rs.event": event.id, "elastic_rs.node": event.node, "elastic_rs.text": event.text}
        return {"timeUnixNano": self._at(event.mono_us), "name": event.type, "attributes": _attributes(facts)}

    def _at(self, mono_us: int) -> str:
        return str(max(0, self._wall_ns + (mono_us - self._recovery.trigger.mono_us) * 1000))


def _by_node(story: Story, phases: Sequence[Event]) -> dict[str, list[Period]]:
    """Return the phases of each node, in their order. A node may report them in several events."""
    found: dict[str, list[Period]] = {}
    for event in phases:
        if event.node is not None:
            found.setdefault(event.node, []).extend(story.phase_periods(event))
    return {node: sorted(periods, key=lambda one: one.begin_us) for node, periods in found.items() if periods}


def _attributes(facts: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


def _id(length: int, *words: str) -> str:
    """Return an id of so many bytes, in hexadecimal."""
    return hashlib.sha256("\0".join(["elastic_rs", *words]).encode()).hexdigest()[: 2 * length]


def _nanoseconds(wall: str) -> int:
    """Return a time of day as nanoseconds since 1970. 0: an event of another release has none."""
    try:
        return int(datetime.fromisoformat(wall).timestamp() * 1000) * 1_000_000
    except (ValueError, OverflowError, OSError):
        return 0
