"""Recoveries that are sent to a collector as they happen: which, when, once each, and what if it does not answer."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs._observe import _exporter
from elastic_rs._observe._exporter import (
    KEPT_EVENTS,
    KEPT_TRACES,
    RETRY_S,
    SENDING_S,
    SETTLE_S,
    Outbox,
    Recoveries,
    export,
)
from elastic_rs._observe._otlp import RefusedError, traces
from elastic_rs._observe._source import AnswerError
from helpers.observe import again

from .test_merge import completed, read, recalled
from .test_otlp import SCHEMA, check, spans_of
from .test_story import Log, exited, formed, recovered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from helpers.procs import Job, Process

    from .conftest import Collector


def test_a_recovery_is_sent_once_nothing_more_is_told_of_it() -> None:
    log = formed()
    recovered(log)
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.take([], SETTLE_S - 1) == []
    late = Log()
    late.lines = log.lines.copy()
    late.add("phase", 140.0, cause=7, round=2, node="n2:5", data={"first_step_us": 7_900_000})
    assert taken.take(late.events()[-1:], SETTLE_S - 1) == []
    assert taken.take([], 2 * SETTLE_S - 2) == []
    ((what, trace),) = taken.take([], 2 * SETTLE_S)
    assert what == 'n17 rank 137 exit code 1 "uncorrectable ECC"'
    assert trace == next(iter(traces(late.events(), "1")))
    assert taken.take([], 9 * SETTLE_S) == []
    assert taken.rest() == []


def slow_to_step() -> Log:
    """A job makes its first step. Its next round is complete, and makes none yet."""
    log = formed()
    log.add("phase", 20.0, cause=3, node="n2:5", data={"first_step_us": 18_000_000, "step": 1})
    recovered(log)
    return log


def test_a_recovery_is_not_sent_before_the_first_step_of_a_training_that_tells_its_steps() -> None:
    log = slow_to_step()
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.take([], 2 * SETTLE_S) == []
    log.add("phase", 300.0, cause=8, round=2, node="n2:5", data={"first_step_us": 160_000_000, "step": 2})
    assert taken.take(log.events()[-1:], 5 * SETTLE_S) == []
    ((_, trace),) = taken.take([], 6 * SETTLE_S)
    assert lasted_s(trace) == 200.0
    # The next failure comes first.
    log = slow_to_step()
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.take([], 2 * SETTLE_S) == []
    log.add("round.broken", 400.0, round=2, data={"why": "nodes.wait"})
    ((_, trace),) = taken.take(log.events()[-1:], 3 * SETTLE_S)
    assert lasted_s(trace) == 300.0


def test_a_recovery_without_a_step_yet_lasts_as_long_as_its_nodes() -> None:
    log = slow_to_step()
    (trace,) = traces(log.events(), "1")
    assert lasted_s(trace) == 32.1
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.rest()[0][1] == trace


def lasted_s(trace: dict[str, Any]) -> float:
    whole = spans_of(trace)[0]
    return (int(whole["endTimeUnixNano"]) - int(whole["startTimeUnixNano"])) / 1e9


def test_what_members_told_a_restarted_coordinator_is_sent_once() -> None:
    log = recalled()
    broken = log.add("round.broken", 30.0, round_=2, data={"why": "nodes.wait"})
    log.add("round.completed", 31.0, broken, **completed(3), data={"nodes": 2})
    log.add("round.broken", 90.0, round_=3, data={"why": "nodes.wait"})
    taken = Recoveries("1")
    sent = [what for at, event in enumerate(read(log)) for what, _ in taken.take([event], float(at))]
    assert sent == ["b rank 1 SIGKILL", "round.broken"]
    assert taken.take([], 9 * SETTLE_S) == []


def test_nodes_of_one_host_are_told_apart_in_each_recovery() -> None:
    log = formed()
    for pid in (1, 2):
        log.add("node.joined", 3.0, node=f"h:{pid}")
    recovered(log, slow="h:1")
    recovered(log, 300.0, slow="h:2")
    taken = Recoveries("1")
    sent = [trace for event in log.events() for _, trace in taken.take([event], 0.0)] + [taken.rest()[0][1]]
    assert sent == list(traces(log.events(), "1"))
    assert ["node h:2" in [span["name"] for span in spans_of(trace)] for trace in sent] == [False, True]


def test_the_next_recovery_and_the_end_of_the_job_send_at_once() -> None:
    log = formed()
    recovered(log)
    recovered(log, 300.0)
    expected = [spans_of(one)[0]["traceId"] for one in traces(log.events(), "1")]
    exit_ = log.add("worker.exited", 900.0, round=2, node="n2:5", data=exited(4))
    end = log.add("run.closed", 900.1, cause=exit_, round=2, data={"verdict": "failed"}, text="no restarts left")
    taken = Recoveries("1")
    sent: list[list[str]] = []
    for event in log.events():
        ready = taken.take([event], 0.0)
        if ready:
            sent.append([str(event.order), *(spans_of(trace)[0]["traceId"] for _, trace in ready)])
    second_broken = next(event for event in reversed(log.events()) if event.type == "round.broken").order
    assert sent[0] == [str(second_broken), expected[0]]
    assert sent[1][:2] == [str(end), expected[1]]
    assert len(sent[1]) == 3, "the failure that ended the job"
    assert len(sent) == 2


@pytest.mark.parametrize("busy", [False, True])
def test_memory_is_bounded(busy: bool) -> None:
    """Of a job with many recoveries, and of one that never forms again."""
    taken = Recoveries("1")
    sent = 0
    log = formed()
    at = 100.0
    told = 0
    for _ in range(60):
        recovered(log, at)
        at += 100
        if busy:
            broken = log.add("round.broken", at, round=2, data={"why": "nodes.wait"})
            for number in range(400):
                log.add("node.joined", at, cause=broken, round=2, node=f"n{number}:1")
        events = log.events()[told:]
        told += len(events)
        sent += len(taken.take(events, at))
        assert len(taken._events) <= (1000 if busy else 20)
        assert len(taken._sent) <= 3
    assert sent + len(taken.rest()) == 60
    stuck = Log()
    stuck.add("node.lost", node="a:1")
    for _ in range(5):
        taken.take(stuck.events() * (KEPT_EVENTS // 2), 0.0)
    assert len(taken._events) == KEPT_EVENTS


class Sender:
    """Stands for a collector that answers as it is told."""

    def __init__(self, needs_s: float = 0.0) -> None:
        self.got: list[dict[str, Any]] = []
        self.fails: ConnectionError | None = None
        self.now_s, self.needs_s = 0.0, needs_s

    def clock(self) -> float:
        return self.now_s

    def __call__(self, _url: str, requests: Iterable[dict[str, Any]]) -> int:
        self.now_s += self.needs_s
        if self.fails is not None:
            raise self.fails
        self.got += requests
        return 1


def test_a_collector_that_is_away_is_told_of_once_and_gets_everything_later(capsys: pytest.CaptureFixture[str]) -> None:
    sender = Sender()
    outbox = Outbox("http://c", sender)
    sender.fails = ConnectionError("http://c: Connection refused, after 0 traces")
    for number in range(3):
        outbox.put([(f"n{number} lost", {"number": number})])
        outbox.flush(lambda now_s=number * 2 * RETRY_S: now_s)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "elastic-rs: warning: http://c: Connection refused; recoveries wait until the collector answers, at most "
        f"{KEPT_TRACES}: n0 lost"
    ]
    assert outbox.unsent() == 3
    sender.fails = None
    outbox.flush(lambda: 4 * RETRY_S + 1)
    assert sender.got == [], "it was tried a moment ago"
    outbox.flush(lambda: 5 * RETRY_S)
    assert [one["number"] for one in sender.got] == [0, 1, 2]
    assert capsys.readouterr().out.splitlines() == [f"sent to http://c: n{number} lost" for number in range(3)]


def test_what_waits_is_bounded_and_what_is_refused_is_not_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    sender = Sender()
    outbox = Outbox("http://c", sender)
    sender.fails = ConnectionError("http://c: 503 Service Unavailable")
    outbox.put((f"n{number}", {"number": number}) for number in range(KEPT_TRACES + 5))
    outbox.flush(lambda: 0.0)
    assert outbox.unsent() == KEPT_TRACES + 5
    sender.fails = None
    outbox.flush(lambda: RETRY_S)
    assert [one["number"] for one in sender.got] == list(range(5, KEPT_TRACES + 5))
    assert "recoveries were dropped while the collector did not answer: 5" in capsys.readouterr().err
    sender.fails = RefusedError("http://c: 400 Bad Request, after 0 traces")
    outbox.put([("n1\x1b[2J", {})])
    outbox.flush(lambda: RETRY_S)
    assert capsys.readouterr().err == "elastic-rs: warning: http://c: 400 Bad Request; not sent: n1 [2J\n"
    assert outbox.unsent() == 0


def test_a_collector_that_hangs_is_left_alone_between_tries() -> None:
    sender = Sender(needs_s=RETRY_S)
    sender.fails = ConnectionError("http://c: timed out")
    outbox = Outbox("http://c", sender)
    outbox.put([("n1 lost", {})])
    outbox.flush(sender.clock)
    assert sender.now_s == RETRY_S
    outbox.flush(sender.clock)
    assert sender.now_s == RETRY_S, "it was tried a moment ago"
    sender.now_s += RETRY_S
    outbox.flush(sender.clock)
    assert sender.now_s == 3 * RETRY_S


def test_a_slow_collector_does_not_keep_the_coordinator_waiting() -> None:
    sender = Sender(needs_s=1.25)
    outbox = Outbox("http://c", sender)
    outbox.put((f"n{number}", {"number": number}) for number in range(100))
    outbox.flush(sender.clock)
    assert (len(sender.got), sender.now_s) == (24, SENDING_S)
    outbox.flush(sender.clock)
    assert len(sender.got) == 48
    outbox.flush(sender.clock, last=True)
    assert [one["number"] for one in sender.got] == list(range(100))


@pytest.mark.torchrun
def test_a_running_job_is_exported_until_its_coordinator_has_gone(
    two_nodes: Callable[..., list[Process]],
    job: Job,
    port: int,
    tmp_path: Path,
    collector: tuple[str, type[Collector]],
) -> None:
    url, handler = collector
    nodes = two_nodes()
    command = [sys.executable, "-m", "elastic_rs", "events", f"127.0.0.1:{port}", "--follow", "--otlp-http", url]
    exporter = job.start(command, name="exporter")
    exporter.line(f"^the recoveries of run `job` go to {url}$")
    killed = job.workers(nodes[1])
    rank = max(killed)
    os.kill(killed[rank], signal.SIGKILL)
    again(nodes)
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert exporter.wait() == 3, exporter.tail()
    assert any(line.startswith(f"sent to {url}: ") and f" rank {rank} SIGKILL" in line for line in exporter.lines)
    ((_, _, content),) = handler.got
    check(content, SCHEMA)
    assert spans_of(content)[0]["name"] == "recovery"


def test_the_end_says_what_was_not_sent(free_port: Callable[[], int]) -> None:
    class Gone:
        def batches(self) -> Iterable[list[str]]:
            log = formed()
            recovered(log)
            yield log.lines
            raise AnswerError("it has gone")

    url = f"http://127.0.0.1:{free_port()}/v1/traces"
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(AnswerError, match=f"^it has gone; 1 recovery was not sent to {url}$"):
            export(Gone(), url, "1")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ValueError, match="must be an address such as"):
        export(Gone(), "file:///etc/passwd", "1")  # type: ignore[arg-type]


class Interrupted:
    """A job that has recovered once when a signal ends the command that follows it."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def batches(self) -> Iterable[list[str]]:
        log = formed()
        recovered(log)
        yield log.lines
        signal.raise_signal(self._number)
        raise AssertionError("unreachable")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_delivered_twice_does_not_lose_what_is_left(
    number: signal.Signals, collector: tuple[str, type[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_again(*args: Any) -> str:
        signal.raise_signal(number)
        return send_rest(*args)

    send_rest = _exporter._send_rest
    monkeypatch.setattr(_exporter, "_send_rest", interrupted_again)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            export(Interrupted(number), collector[0], "1")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(collector[1].got) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sends_what_is_left_or_says_what_was_not_sent(
    number: signal.Signals,
    collector: tuple[str, type[Collector]],
    free_port: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        for url in (collector[0], f"http://127.0.0.1:{free_port()}/v1/traces"):
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                export(Interrupted(number), url, "1")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(collector[1].got) == 1
    assert capsys.readouterr().err.endswith(f"elastic-rs: warning: 1 recovery was not sent to {url}\n")
