"""Events, as a coordinator records them. ``docs/events.md`` has the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from elastic_rs._terminal import plain


@dataclass(frozen=True)
class Event:
    """One event of a run.

    Attributes:
        id: the origin, and ``order``.
        order: the coordinator's count; an event's causes have smaller ones.
        cause: ids of the events without which this one would not have happened.
        type: what happened: ``worker.exited``, ``round.broken``, …
        node: name of the node that it is about.
        mono_us: time on the coordinator's clock, in microseconds since it started.
        wall: time of day, only to be shown.
        data: further facts; which ones depends on the type.
        incarnation: id of the clock of ``mono_us`` and the count of ``order``, if origins were merged; else empty.
        follows: the ``order`` of its causes, if events of several origins were merged.
        raw: the fields as they were read, those of later releases too.
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
    incarnation: str = ""
    follows: tuple[int, ...] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def origin(self) -> str:
        """The beginning of its id: the incarnation of a coordinator and the run in it, or a node."""
        return self.id.rpartition(".")[0]

    def facts(self) -> dict[str, Any]:
        """Return the fields of the schema."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in own.items() if name not in ("incarnation", "follows", "raw")}


SCHEMA = 1
"""The version of the schema that is read here."""


def schema(event: Event) -> int:
    """Return the version of the schema by which an event was written."""
    version = event.raw.get("v", SCHEMA)
    return version if isinstance(version, int) else SCHEMA


_NO_EVENT = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What reading a line raises that is no event."""


def parse(lines: Iterable[str]) -> list[Event]:
    """Read events from lines of JSON, and sort them. Empty lines, and fields of later releases, are ignored.

    Raises:
        ValueError: a line is no event; the message has its number, from 1.
    """
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        # Without an escape in it, a line that is printable has only texts that are.
        tidy = str if line.isprintable() and "\\" not in line else _tidy
        try:
            events.append(_event(json.loads(line), tidy))
        except _NO_EVENT as error:
            raise ValueError(f"line {number} is no event of a job: {plain(str(error))}") from None
    # A restarted coordinator numbers its events from 1 again. They belong after those of the coordinator before it.
    incarnations: dict[str, int] = {}
    for event in events:
        incarnations.setdefault(incarnation_of(event), len(incarnations))
    return sorted(events, key=lambda event: (incarnations[incarnation_of(event)], event.order))


def escaped(line: str) -> str:
    """Return a line of JSON with escapes for characters that steer a terminal. It says the same to a reader of JSON."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


_COUNTS = ("round", "restart", "min_nodes", "max_nodes", "running", "waiting", "mono_us")
_MAYBE_COUNTS = ("finished", "max_restarts", "workers", "step", "step_time_us")


def run_state(text: str) -> dict[str, Any]:
    """Read the state of a run that was received from a coordinator's port. Any program may have sent it.

    Counts are integers, and no text in it steers a terminal. Fields of later releases stay.

    Raises:
        ValueError: it is no state; the message says why.
    """
    try:
        state = _cleaned(json.loads(text))
        for name in _COUNTS:
            _check_count(name, state[name])
        for name in _MAYBE_COUNTS:
            if state.get(name) is not None:
                _check_count(name, state[name])
        for name in ("run", "state", "progress"):
            if not isinstance(state[name], str):
                raise TypeError(f"`{name}` is no text")
        _check_names("unreachable_names", state["unreachable_names"])
        for host in state.get("unused_hosts", ()):
            _check_names("unused_hosts", [host[name] for name in ("host", "how_long", "why", "advice")])
        _check_count("unused_hosts_more", state.get("unused_hosts_more", 0))
        for name, steps in state.get("behind", ()):
            _check_names("behind", [name])
            _check_count("behind", steps)
        for part in ("interruptions", "budget"):
            for name, count in (state.get(part) or {}).items():
                _check_count(name, count)
        if (led := state.get("list")) is not None:
            _check_names("list", [led["leader"], *led["successors"], *led["missing"]])
        if state.get("hang") is not None:
            _check_hang(state["hang"])
    except _NO_EVENT as error:
        raise ValueError(
            f"the answer is not the state of a job, as a coordinator sends it: {plain(str(error))}"
        ) from None
    if not isinstance(state.get("restarts_for_nccl", False), bool):
        raise ValueError(
            "the answer is not the state of a job, as a coordinator sends it: `restarts_for_nccl` is neither true nor "
            "false"
        )
    if not isinstance(state["failed"], bool) or not isinstance(state.get("verdict"), str | None):
        raise ValueError(
            "the answer is not the state of a job, as a coordinator sends it: it does not say how the job has ended"
        )
    return dict(state)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"`{name}` is `{str(value)[:40]}`, must be a count")


def _check_hang(hang: dict[str, Any]) -> None:
    _check_names("hang", [hang["text"], hang["kind"]])
    _check_names("hang", hang["lines"])
    for rank in hang["ranks"]:
        _check_count("hang", rank)
    still_s = hang["still_s"]
    if not isinstance(still_s, int | float) or isinstance(still_s, bool) or not 0 <= still_s < 1e12:
        raise ValueError(f"`hang` is for `{str(still_s)[:40]}`, must be a number of seconds")
    if not isinstance(hang["certain"], bool) or not isinstance(hang["found"], bool):
        raise TypeError("`hang` does not say whether it is found, and certain")


def _check_names(name: str, values: object) -> None:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"`{name}` is no list of names")


def _cleaned(value: Any) -> Any:
    """Return what was read of JSON, with all its texts made plain."""
    match value:
        case str():
            return plain(value)
        case list():
            return [_cleaned(one) for one in value]
        case dict():
            return {plain(name): _cleaned(one) for name, one in value.items()}
        case _:
            return value


def incarnation_of(event: Event) -> str:
    """Return the id of the event's clock and count: that of a coordinator and the run in it, or of a node."""
    return event.incarnation or event.origin


def replayed(event: Event) -> Event | None:
    """Return the event that a member has replayed to a restarted coordinator. Its time is on the coordinator's clock.

    None: this event is no replay, or the replayed event cannot be read.
    """
    ago = event.data.get("ago_us")
    if event.type != "replayed" or not isinstance(ago, int):
        return None
    try:
        inner = _event({**event.data, "run": event.run, "mono_us": 0, "wall": ""})
    except _NO_EVENT:
        return None
    return replace(inner, mono_us=event.mono_us - ago, incarnation=incarnation_of(event))


def host_of(node: str) -> str:
    """Return the host of a node, whose name is ``HOST:PID``."""
    return node.rpartition(":")[0]


def _count(value: str | float) -> int:
    count = int(value)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"`{str(value)[:40]}` is out of range")
    return count


def _tidy(value: object) -> str:
    return plain(str(value))


def _event(record: dict[str, Any], tidy: Callable[[object], str] = _tidy) -> Event:
    node, text = record.get("node"), record.get("text")
    return Event(
        id=tidy(record["id"]),
        order=_count(record["order"]),
        cause=tuple(map(tidy, record.get("cause", ()))),
        run=tidy(record["run"]),
        round=_count(record.get("round", 0)),
        restart=_count(record.get("restart", 0)),
        type=tidy(record["type"]),
        node=None if node is None else tidy(node),
        mono_us=_count(record["mono_us"]),
        wall=tidy(record.get("wall", "")),
        text=None if text is None else tidy(text),
        data={tidy(key): _fact(value, tidy) for key, value in record.get("data", {}).items()},
        raw=record,
    )


def _fact(value: object, tidy: Callable[[object], str]) -> object:
    if isinstance(value, str):
        return tidy(value)
    if isinstance(value, int) and not -1 << 63 <= value < 1 << 63:
        raise ValueError(f"`{str(value)[:40]}` is out of range")
    if isinstance(value, list):
        return [_fact(one, tidy) for one in value]
    return value
