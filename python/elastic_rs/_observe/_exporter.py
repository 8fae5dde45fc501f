"""Recoveries of a running job for a collector of OpenTelemetry, each as soon as it is known what it has cost.

``Recoveries`` is pure: it finds the ones that are to be sent. ``Outbox`` sends them, and keeps those that a collector
does not take. Both are bounded.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs
from elastic_rs._observe import _text
from elastic_rs._observe._events import parse
from elastic_rs._observe._otlp import RefusedError, checked_headers, recovery_traces, send
from elastic_rs._observe._source import AnswerError
from elastic_rs._observe._story import Names, tell
from elastic_rs._terminal import plain, warning_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from elastic_rs._observe._events import Event
    from elastic_rs._observe._source import Live
    from elastic_rs._observe._story import Story

__all__ = ["Outbox", "Recoveries", "export"]

SETTLE_S = 60.0
"""A recovery is sent when nothing more was told of it for so long: phases of slow nodes come late."""
KEPT_EVENTS = 20_000
"""Most events that are kept since the world before the recovery was formed."""
KEPT_TRACES = 256
"""Most traces that wait for a collector. Of more the newest are kept."""
RETRY_S = 10.0
"""A collector that was out of reach is tried again no sooner."""
SENDING_S = 30.0
"""Longest time of sending at once. The coordinator is asked nothing meanwhile, and closes silent connections."""

_ENDS = ("round.broken", "round.changes", "run.closed")
"""After one of these nothing more is told of the recovery before it."""
_TELLS = ("phase", "round.completed")


class Recoveries:
    """Finds the recoveries of one run that are to be sent, from its events as they come."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._events: list[Event] = []
        self._sent: set[str] = set()
        self._told_at: float | None = None
        self._names = Names()

    def take(self, events: Sequence[Event], now_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Take the next events. Returns what is to be sent: the recovery in words, and its trace.

        Args:
            events: in their order. There may be none.
            now_s: the time of any clock that never jumps.
        """
        for event in events:
            self._names.count(event)
        self._events += events
        del self._events[:-KEPT_EVENTS]
        if any(event.type in _TELLS for event in events):
            self._told_at = now_s
        ended = any(event.type in _ENDS for event in events)
        settled = self._told_at is not None and now_s - self._told_at >= SETTLE_S
        return self._ready(settled=settled) if ended or settled else []

    def rest(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what is left to be sent, because nothing more will be told."""
        return self._ready(settled=True, last=True)

    def _ready(self, *, settled: bool, last: bool = False) -> list[tuple[str, dict[str, Any]]]:
        story = tell(self._events)
        story.shared |= self._names.story.shared  # of nodes that joined before the events that are kept
        ready = []
        for recovery, trace in recovery_traces(story, self._version):
            ended = last or story.closed is not None or recovery is not story.recoveries[-1]
            # A training that tells its steps may need longer for its first one than events are waited for.
            known = settled and recovery.ended_us is not None
            if recovery.root.id not in self._sent and (ended or known):
                self._sent.add(recovery.root.id)
                ready.append((_text.what(recovery.root, story), trace))
        if settled:
            self._told_at = None
        self._forget(story)
        return ready

    def _forget(self, story: Story) -> None:
        """Forget what was before the world in which the first recovery began that was not sent, or before this one."""
        unsent = next((one.broken for one in story.recoveries if one.root.id not in self._sent), None)
        before = itertools.takewhile(lambda event: event is not unsent, story.events)
        world = [event.id for event in before if event.type == "round.completed"][-1:]
        del self._events[: next((at for at, event in enumerate(self._events) if [event.id] == world), 0)]
        # What members told a restarted coordinator has an id of its own in the story.
        self._sent &= {event.id for event in (*self._events, *story.events)}


class Outbox:
    """Sends traces to a collector. Says on standard error when it cannot be reached, and keeps them meanwhile.

    Args:
        url: of the collector.
        sender: sends traces to an address: :func:`send`.
    """

    def __init__(self, url: str, sender: Callable[[str, Iterable[dict[str, Any]]], int] = send) -> None:
        self._url, self._send = url, sender
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._dropped = 0
        self._retry_at: float | None = None

    def put(self, ready: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Take recoveries in words, and their traces."""
        for one in ready:
            if len(self._waiting) == KEPT_TRACES:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(one)

    def flush(self, clock: Callable[[], float] = time.monotonic, *, last: bool = False) -> None:
        """Send what waits, for ``SENDING_S``, unless the collector was out of reach a moment ago.

        Args:
            clock: never jumps.
            last: nothing will be sent later. It is tried in any case, for as long as the collector answers.
        """
        begin = clock()
        if self._retry_at is not None and begin < self._retry_at and not last:
            return
        while self._waiting and (last or clock() - begin < SENDING_S):
            what, trace = self._waiting[0]
            try:
                self._send(self._url, [trace])
            except RefusedError as error:
                _warn(f"{_reason(error)}; not sent: {what}")
            except ConnectionError as error:
                if self._retry_at is None:
                    _warn(
                        f"{_reason(error)}; recoveries wait until the collector answers, at most {KEPT_TRACES}: {what}"
                    )
                self._retry_at = clock() + RETRY_S
                return
            else:
                print(f"sent to {self._url}: {what}", flush=True)
            self._waiting.popleft()
            if self._dropped:
                _warn(f"recoveries were dropped while the collector did not answer: {self._dropped}")
            self._dropped, self._retry_at = 0, None

    def unsent(self) -> int:
        """Return how many recoveries wait, and were dropped."""
        return len(self._waiting) + self._dropped


def export(live: Live, url: str, version: str) -> None:
    """Send each recovery of a run to a collector, until the coordinator has gone or a signal ends the process.

    Then what is left is sent, with what is known of it. What the collector does not take is told.

    Raises:
        AnswerError: the coordinator has gone. Its message says how many recoveries the collector has not taken.
        KeyboardInterrupt, SystemExit: the process got SIGINT or SIGTERM.
        ValueError: ``url`` is no address of HTTP, or a header for it cannot be sent.
    """
    checked_headers(url)
    recoveries, outbox = Recoveries(version), Outbox(url)
    told = False
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through what follows
    _elastic_rs.watch_signals([signal.SIGTERM, signal.SIGINT])  # one that is delivered twice does not break off the end
    try:
        for lines in live.batches():
            events = parse(lines)
            if events and not told:
                print(f"the recoveries of run `{events[0].run}` go to {url}", flush=True)
                told = True
            outbox.put(recoveries.take(events, time.monotonic()))
            outbox.flush()
    except AnswerError as error:
        unsent = _send_rest(recoveries, outbox, url)
        raise AnswerError(f"{error}; {unsent}" if unsent else str(error)) from None
    except (KeyboardInterrupt, SystemExit):
        unsent = _send_rest(recoveries, outbox, url)
        if unsent:
            _warn(unsent)
        raise


def _send_rest(recoveries: Recoveries, outbox: Outbox, url: str) -> str:
    """Send what is left. Returns how many recoveries the collector has not taken, in words; empty: none."""
    outbox.put(recoveries.rest())
    outbox.flush(last=True)
    count = outbox.unsent()
    return f"{count} {'recovery was' if count == 1 else 'recoveries were'} not sent to {url}" if count else ""


def _reason(error: ConnectionError) -> str:
    return str(error).removesuffix(", after 0 traces")


def _warn(text: str) -> None:
    print(warning_line("elastic-rs", plain(text)), file=sys.stderr, flush=True)
