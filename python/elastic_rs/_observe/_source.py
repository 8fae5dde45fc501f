"""Where events come from: a coordinator that answers, or files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_rs import _elastic_rs
from elastic_rs._observe._events import SCHEMA, Event, incarnation_of, parse, run_state, schema
from elastic_rs._terminal import plain, warning_line
from elastic_rs.rendezvous._config import MAX_ENDPOINTS, endpoint_of, parse_endpoint
from elastic_rs.rendezvous._protection import TLS_CERT, TOKEN_FILE, protection

FILES = ("events.jsonl.1", "events.jsonl", "events-coordinator.jsonl.1", "events-coordinator.jsonl")
"""Names of the files that nodes and coordinators write. Those that were put aside are older."""

TAKE_OVER_S = 5.0
"""How long to look for the next leader of a job, once the last one has gone."""
LOOKS_EVERY_S = 0.25


class AnswerError(Exception):
    """No coordinator answers at the endpoint, or it refuses the connection."""


class Live:
    """A coordinator that is asked: of a list of endpoints, that of whichever process leads the job.

    Raises:
        AnswerError: nobody answers there, or it does not accept this process's token or certificate.
        ValueError: there is one of these, and no run is named: it is proven for one run.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], run_id: str | None, *, timeout_s: float = 5.0) -> None:
        self._secured = protection()
        if self._secured is not None and run_id is None:
            raise ValueError(
                f"with a token ({TOKEN_FILE}) or certificates ({TLS_CERT}), name the run: --run-id (torchrun's default "
                "is `none`)"
            )
        self._endpoints = list(dict.fromkeys(endpoints))
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._has_answered = False
        self._heard = "", 0
        """Who has recorded the last event that was heard, and its number."""
        self._connect()

    def read(self) -> tuple[list[Event], dict[str, Any] | None]:
        """Return the events since the last call, and the run's state. None: the coordinator has no such run yet.

        Raises:
            AnswerError: the coordinator has gone, or what it says is no state of a run.
        """
        text, lines, more = self._ask(state=True)
        state = self._state(text)
        return parse([*lines, *(self.lines() if more else ())]), state

    def lines(self) -> Iterator[str]:
        """Yield the events since the last call as lines of JSON, as they were recorded."""
        more = True
        while more:
            _, lines, more = self._ask()
            yield from lines

    def follow(self) -> Iterator[str]:
        """Yield the events as lines of JSON, for ever: those that there are, and then each as it comes.

        Raises:
            AnswerError: the coordinator has gone.
        """
        for lines in self.batches():
            yield from lines

    def batches(self) -> Iterator[list[str]]:
        """Yield the events as :meth:`follow` does: those that came together. An empty list about once a minute.

        Raises:
            AnswerError: the coordinator has gone.
        """
        text, lines, _ = self._ask(state=True)
        self._state(text)
        if lines:
            yield lines
        while True:
            yield self._ask(waits=True)[1]

    def look(self, rank: int | None = None, *, deep: bool = False) -> dict[str, Any]:
        """Return where the ranks stand now, as the agents see it: all ranks in groups, or this one alone.

        Args:
            rank: the rank, or None for all.
            deep: whether ``py-spy`` looks at the rank too.

        Raises:
            AnswerError: the coordinator has gone, or refuses.
        """
        try:
            self._run_id, seen = self._observer.look(run_id=self._run_id, rank=rank, deep=deep)
        except ConnectionError as error:
            raise AnswerError(_with_address(self._where, error)) from None
        answer: dict[str, Any] = json.loads(seen)
        return answer

    def _connect(self) -> None:
        """Connect to the first endpoint at which somebody answers."""
        why = None
        for endpoint in self._endpoints:
            try:
                return self._connect_to(*endpoint)
            except AnswerError as error:
                why = error
        raise why or ValueError("no endpoint is given")

    def _connect_to(self, host: str, port: int) -> None:
        where = endpoint_of(host, port)
        try:
            self._observer = _elastic_rs.Observer.connect(
                host, port, run_id=self._run_id, protection=self._secured, timeout_s=self._timeout_s
            )
        except ConnectionError as error:
            files = f"--events {host}" if Path(host).exists() else "--events FOLDER, the job's --log-dir"
            raise AnswerError(
                f"{_with_address(where, error)} (the endpoint is the job's --rdzv-endpoint; when the job has ended, "
                f"read its files: {files})"
            ) from None
        self._where = where
        self._after = 0  # another process may count its events anew

    def _state(self, text: str | None) -> dict[str, Any] | None:
        """Read the run's state, and learn the job's list of endpoints, if it has one."""
        if text is None:
            return None
        try:
            state = run_state(text)
            if (led := state.get("list")) is not None:
                names = (led["leader"], *led["successors"], *led["missing"])
                listed = [parse_endpoint(name, None) for name in names[:MAX_ENDPOINTS]]
                self._endpoints = list(dict.fromkeys([*self._endpoints, *listed]))[: 2 * MAX_ENDPOINTS]
        except ValueError as error:
            raise AnswerError(f"{self._where}: {error}") from None
        return state

    def _ask(self, *, waits: bool = False, state: bool = False) -> tuple[str | None, list[str], bool]:
        """Ask the process that leads. If it has gone, another one of the list may lead soon."""
        try:
            return self._ask_here(waits=waits, state=state)
        except AnswerError as error:
            if len(self._endpoints) == 1:
                raise
            why = error
        until = time.monotonic() + (TAKE_OVER_S if self._has_answered else 0)
        while True:
            for endpoint in self._endpoints:
                try:
                    self._connect_to(*endpoint)
                    return self._ask_here(waits=waits, state=state)
                except AnswerError as error:
                    why = error
            if time.monotonic() > until:
                raise why
            time.sleep(LOOKS_EVERY_S)

    def _ask_here(self, *, waits: bool = False, state: bool = False) -> tuple[str | None, list[str], bool]:
        try:
            run_id, state_text, lines, self._after, more = self._observer.ask(
                run_id=self._run_id, after=self._after, waits=waits, state=state
            )
        except ConnectionError as error:
            raise AnswerError(_with_address(self._where, error)) from None
        self._run_id = run_id or self._run_id  # from now on this one, whichever others there are
        self._has_answered = True
        return state_text, self._unheard(lines), more

    def _unheard(self, lines: list[str]) -> list[str]:
        """Leave out what was heard before: on another connection to the same process all events come again."""
        if not lines:
            return lines
        origin, first = _numbered(lines[0])
        if origin == self._heard[0] and first <= self._heard[1]:
            lines = [line for line in lines if _numbered(line)[1] > self._heard[1]]
        if lines:
            self._heard = _numbered(lines[-1])
        return lines


def _with_address(where: str, error: ConnectionError) -> str:
    text = str(error)
    return text if text.startswith(where) else f"{where}: {text}"


def _numbered(line: str) -> tuple[str, int]:
    """Return who has recorded an event, and its number there. ``parse`` checks the rest."""
    try:
        origin, _, number = json.loads(line)["id"].rpartition(".")
        return str(origin), int(number)
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", 0


def from_files(paths: Sequence[Path], run_id: str | None) -> list[Event]:
    """Read the events of one run from files, as :func:`runs_of_files` does.

    Raises:
        ValueError: none has an event, or there are several runs and none is named; the message says which.
    """
    runs = runs_of_files(paths, run_id)
    if len(runs) > 1:
        raise ValueError(
            f"there are several runs in these files: {', '.join(f'`{run}`' for run in sorted(runs))}; name one "
            "(--run-id), or list all (elastic-rs why --list)"
        )
    (chosen,) = runs.values()
    return chosen


def runs_of_files(paths: Sequence[Path], run_id: str | None) -> dict[str, list[Event]]:
    """Read the events of each run, or of this one, from files. ``-`` is standard input.

    Of a folder, all such files below it are read. A line that is no event is left out, and named on standard error: its
    writer was killed, or the disk was full. So is a file or folder without events, as long as another one has some: its
    node did not get as far as writing any.

    Returns:
        The events by run, of which there is at least one. The run whose first event is the oldest comes first.

    Raises:
        ValueError: none has an event, or none of the run that is named.
    """
    found: dict[str, Event] = {}
    without: list[str] = []
    for path in paths:
        before = len(without)
        events = _events_of(path, without)
        for event in events:
            found.setdefault(event.id, event)  # files may overlap
        if not events and len(without) == before:
            where = "in the files below this folder" if path.is_dir() else "in this file"
            without.append(f"`{path}`: there are no events {where}")
    if not found and without:
        *without, last = without
        for text in without:
            _warn(text)
        raise ValueError(last)
    for text in without:
        _warn(f"{text}; it is left out")
    runs: dict[str, list[Event]] = {}
    for event in found.values():
        if run_id is None or event.run == run_id:
            runs.setdefault(event.run, []).append(event)
    if not runs:
        others = sorted({event.run for event in found.values()})
        there = f"; there are {', '.join(f'`{run}`' for run in others)}" if others else ""
        raise ValueError(f"there are no events{f' of run `{run_id}`' if run_id else ''} in these files{there}")
    warn_of_later(found.values())
    in_order = {run: _by_beginning(events) for run, events in runs.items()}
    return dict(sorted(in_order.items(), key=lambda item: item[1][0].wall))


def _events_of(path: Path, without: list[str]) -> list[Event]:
    """Return the events of a file, or of those below a folder. Adds to ``without`` why a file or folder has none."""
    found: list[Event] = []
    try:
        files = _files(path)
    except ValueError as error:
        without.append(str(error))
        return found
    for file in files:
        try:
            events, refused = _parsed(_content(file).decode(errors="replace"))
        except OSError as error:
            without.append(f"`{file}`: {error.strerror or error}")
            continue
        except ValueError as error:
            without.append(str(error))
            continue
        if refused and not events:
            without.append(f"`{file}`: {refused[0]}")
        elif refused:
            count = "1 line is" if len(refused) == 1 else f"{len(refused)} lines are"
            _warn(f"`{file}`: {count} left out: {refused[0]}")
        found += events
    return found


def _by_beginning(events: list[Event]) -> list[Event]:
    """Sort events by the time of day at which what recorded them began. Each one's own stay in their order.

    It decides which of several jobs of one name was the last, if nothing else connects them.
    """
    begun: dict[str, str] = {}
    for event in events:
        begun.setdefault(incarnation_of(event), event.wall)
    return sorted(events, key=lambda event: begun[incarnation_of(event)])


def warn_of_later(events: Iterable[Event]) -> None:
    """Say on standard error if events are of a later schema: their meaning is not known here."""
    later = max((schema(event) for event in events), default=SCHEMA)
    if later > SCHEMA:
        _warn(
            f"there are events of schema v{later}, and this release knows v{SCHEMA}: what is shown may be wrong; use "
            "the elastic-rs of the release that wrote them"
        )


def _content(path: Path) -> bytes:
    if str(path) != "-":
        return path.read_bytes()
    if sys.stdin is None:
        raise ValueError("`-`: standard input is closed")
    return sys.stdin.buffer.read()


def _warn(text: str) -> None:
    print(warning_line("elastic-rs", plain(text)), file=sys.stderr)


def _files(path: Path) -> list[Path]:
    """Return the files to read: this one, or those of events below this folder.

    Raises:
        ValueError: there are none.
    """
    if not path.is_dir():
        return [path]
    below = [Path(folder, name) for folder, _, names in os.walk(path, onerror=_warn_of_folder) for name in names]
    found = sorted(one for one in below if one.name in FILES)
    if not found:
        raise ValueError(f"`{path}`: there are no files of events below this folder ({', '.join(FILES)})")
    return sorted(found, key=lambda one: FILES.index(one.name))


def _warn_of_folder(error: OSError) -> None:
    _warn(f"`{error.filename}`: {error.strerror}; files of events below this folder are left out")


def _parsed(text: str) -> tuple[list[Event], list[str]]:
    """Return the events of a file, and why lines are none. A torn event at the end is not counted."""
    lines = text.split("\n")
    try:
        return parse(lines), []
    except ValueError:
        pass
    good: list[str] = []
    refused: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            parse([line])
        except ValueError as error:
            if number < len(lines) or not (good or line.startswith('{"v":')):
                refused.append(str(error).replace("line 1", f"line {number}", 1))
        else:
            good.append(line)
    return parse(good), refused
