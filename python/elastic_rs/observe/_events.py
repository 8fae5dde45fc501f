"""Events, as a coordinator records them. ``docs/events.md`` has the schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Event", "host_of", "life", "parse", "plain"]


@dataclass(frozen=True)
class Event:
    """One event of a run.

    Attributes:
        id: the name of the coordinator's life and of the run's opening in it, and ``order``.
        order: the coordinator's count; an event's causes have smaller ones.
        cause: ids of the events without which this one would not have happened.
        run: the run's id.
        round: the round when it happened.
        restart: the job's restart number when it happened.
        type: what happened: ``worker.exited``, ``round.broken``, …
        node: name of the node that it is about.
        mono_us: time on the coordinator's clock, in microseconds since it started.
        wall: time of day, only to be shown.
        text: the sentence in the coordinator's log.
        data: further facts; which ones depends on the type.
    """

    id: str
    order: int
    cause: tuple[str, ...]
    run: str
    round: int
    restart: int
    type: str
    node: str | None
    mono_us: int
    wall: str
    text: str | None
    data: dict[str, Any] = field(default_factory=dict)


def parse(lines: Iterable[str]) -> list[Event]:
    """Read events from lines of JSON, and sort them. Empty lines, and fields of later releases, are ignored.

    Raises:
        ValueError: a line is no event; the message has its number, from 1.
    """
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            events.append(_event(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"line {number} is no event of a job: {plain(str(error))}") from None
    # A restarted coordinator numbers its events from 1 again. They belong after those of the coordinator before it.
    lives: dict[str, int] = {}
    for event in events:
        lives.setdefault(life(event), len(lives))
    return sorted(events, key=lambda event: (lives[life(event)], event.order))


def plain(text: str) -> str:
    """Return one line without characters that steer a terminal: a peer may have written the text."""
    return "".join(char if char.isprintable() else " " for char in text)


def life(event: Event) -> str:
    """Return the name of the coordinator's life, and of the run's opening in it. Each has its own clock and numbers."""
    return event.id.rpartition(".")[0]


def host_of(node: str) -> str:
    """Return the host of a node, whose name is ``HOST:PID``."""
    return node.rpartition(":")[0]


def _count(value: str | float) -> int:
    count = int(value)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"`{str(value)[:40]}` is out of range")
    return count


def _event(fields: dict[str, Any]) -> Event:
    node, text = fields.get("node"), fields.get("text")
    return Event(
        id=plain(str(fields["id"])),
        order=_count(fields["order"]),
        cause=tuple(plain(str(cause)) for cause in fields.get("cause", ())),
        run=plain(str(fields["run"])),
        round=_count(fields.get("round", 0)),
        restart=_count(fields.get("restart", 0)),
        type=plain(str(fields["type"])),
        node=None if node is None else plain(str(node)),
        mono_us=_count(fields["mono_us"]),
        wall=plain(str(fields.get("wall", ""))),
        text=None if text is None else plain(str(text)),
        data={
            plain(str(key)): plain(value) if isinstance(value, str) else value
            for key, value in fields.get("data", {}).items()
        },
    )
