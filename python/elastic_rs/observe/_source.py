"""Where events come from: a coordinator that answers, or files."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs
from elastic_rs.observe._events import Event, parse
from elastic_rs.rendezvous._config import DEFAULT_PORT
from elastic_rs.rendezvous._protection import TLS_CERT, TOKEN_FILE, protection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["AnswerError", "Live", "endpoint", "from_files"]


def endpoint(text: str) -> tuple[str, int]:
    """Read ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    found = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]/]+))(?::(?P<port>\d{1,5}))?", text)
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port <= 65535:
        raise ValueError(
            f"`{text}` is not an endpoint, must be HOST, HOST:PORT or [IPv6]:PORT with a port from 1 to 65535"
        )
    return found["v6"] or found["host"], port


class AnswerError(Exception):
    """Nobody answers, or the coordinator refuses."""


class Live:
    """A coordinator that is asked.

    Raises:
        AnswerError: nobody answers there, or it does not accept this process's token or certificate.
        ValueError: there is one of these, and no run is named: it is proven for one run.
    """

    def __init__(self, host: str, port: int, run_id: str | None, *, timeout_s: float = 5.0) -> None:
        secured = protection()
        if secured is not None and run_id is None:
            raise ValueError(
                f"with a token ({TOKEN_FILE}) or certificates ({TLS_CERT}), name the run: --run-id (torchrun's default "
                "is `none`)"
            )
        self._run_id = run_id
        self._after = 0
        try:
            self._observer = _elastic_rs.Observer.connect(
                host, port, run_id=run_id, protection=secured, timeout_s=timeout_s
            )
        except ConnectionError as error:
            raise AnswerError(error) from None

    def read(self) -> tuple[list[Event], dict[str, Any] | None]:
        """Return the events since the last call, and the run's state. None: the coordinator has no such run yet."""
        said, lines, more = self._ask(state=True)
        events = parse([*lines, *(self.lines() if more else ())])
        return events, None if said is None else json.loads(said)

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
        while True:
            yield from self._ask(waits=True)[1]

    def _ask(self, *, waits: bool = False, state: bool = False) -> tuple[str | None, list[str], bool]:
        try:
            run_id, said, lines, self._after, more = self._observer.ask(
                run_id=self._run_id, after=self._after, waits=waits, state=state
            )
        except ConnectionError as error:
            raise AnswerError(error) from None
        self._run_id = run_id or self._run_id  # from now on this one, whichever others there are
        return said, lines, more


def from_files(paths: Sequence[Path], run_id: str | None) -> list[Event]:
    """Read the events of one run from files. ``-`` is standard input.

    Raises:
        OSError: a file cannot be read.
        ValueError: it holds no events, or those of several runs and none is named; the message says which file.
    """
    found: dict[str, Event] = {}
    for path in paths:
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
            for event in parse(_whole(text)):
                found.setdefault(event.id, event)  # files may overlap
        except ValueError as error:
            raise ValueError(f"`{path}`: {error}") from None
    events = list(found.values())
    runs = sorted({event.run for event in events})
    if run_id is None and len(runs) > 1:
        raise ValueError(
            f"there are several runs in these files: {', '.join(f'`{run}`' for run in runs)}; name one (--run-id)"
        )
    chosen = [event for event in events if run_id is None or event.run == run_id]
    if not chosen:
        there = f"; there are {', '.join(f'`{run}`' for run in runs)}" if runs else ""
        raise ValueError(f"there are no events{f' of run `{run_id}`' if run_id else ''} in these files{there}")
    return chosen


def _whole(text: str) -> list[str]:
    """Return the lines of a file. A last one without its end is left out if it is no event: its writer was killed."""
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        try:
            parse(lines[-1:])
        except ValueError:
            return lines[:-1]
    return lines
