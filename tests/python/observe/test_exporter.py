"""Recoveries that are printed as they happen: which, when, and once each."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs._observe._exporter import KEPT_EVENTS, SETTLE_S, Recoveries, export
from elastic_rs._observe._otlp import traces
from elastic_rs._observe._source import AnswerError
from helpers.observe import again, is_connected
from helpers.stores import until

from .test_merge import completed, read, replayed
from .test_otlp import SCHEMA, check, facts, spans_of
from .test_story import Log, exited, formed, recovered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from helpers.procs import Job, Process


def test_a_recovery_is_printed_once_no_more_events_are_about_it() -> None:
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
    (trace,) = taken.take([], 2 * SETTLE_S)
    assert trace == next(iter(traces(late.events(), "1")))
    assert taken.take([], 9 * SETTLE_S) == []
    assert taken.rest() == []


def slow_to_step() -> Log:
    """A job makes its first step. Its next round is complete, and makes none yet."""
    log = formed()
    log.add("phase", 20.0, cause=3, node="n2:5", data={"first_step_us": 18_000_000, "step": 1})
    recovered(log)
    return log


def test_a_recovery_is_not_printed_before_the_first_step_of_a_training_that_reports_its_steps() -> None:
    log = slow_to_step()
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.take([], 2 * SETTLE_S) == []
    log.add("phase", 300.0, cause=8, round=2, node="n2:5", data={"first_step_us": 160_000_000, "step": 2})
    assert taken.take(log.events()[-1:], 5 * SETTLE_S) == []
    (trace,) = taken.take([], 6 * SETTLE_S)
    assert lasted_s(trace) == 200.0
    # The next failure comes first.
    log = slow_to_step()
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.take([], 2 * SETTLE_S) == []
    log.add("round.broken", 400.0, round=2, data={"why": "nodes.wait"})
    (trace,) = taken.take(log.events()[-1:], 3 * SETTLE_S)
    assert lasted_s(trace) == 300.0


def test_a_recovery_without_a_step_yet_lasts_as_long_as_its_nodes() -> None:
    log = slow_to_step()
    (trace,) = traces(log.events(), "1")
    assert lasted_s(trace) == 32.1
    taken = Recoveries("1")
    assert taken.take(log.events(), 0.0) == []
    assert taken.rest()[0] == trace


def lasted_s(trace: dict[str, Any]) -> float:
    whole = spans_of(trace)[0]
    return (int(whole["endTimeUnixNano"]) - int(whole["startTimeUnixNano"])) / 1e9


def test_a_replayed_recovery_is_printed_once() -> None:
    log = replayed()
    broken = log.add("round.broken", 30.0, round_=2, data={"why": "nodes.wait"})
    log.add("round.completed", 31.0, broken, **completed(3), data={"nodes": 2})
    log.add("round.broken", 90.0, round_=3, data={"why": "nodes.wait"})
    taken = Recoveries("1")
    sent = [trace for at, event in enumerate(read(log)) for trace in taken.take([event], float(at))]
    assert [facts(spans_of(trace)[0])["elastic_rs.what"] for trace in sent] == ["b rank 1 SIGKILL", "round.broken"]
    assert taken.take([], 9 * SETTLE_S) == []


def test_nodes_of_one_host_are_distinguished_in_each_recovery() -> None:
    log = formed()
    for pid in (1, 2):
        log.add("node.joined", 3.0, node=f"h:{pid}")
    recovered(log, slow="h:1")
    recovered(log, 300.0, slow="h:2")
    taken = Recoveries("1")
    sent = [trace for event in log.events() for trace in taken.take([event], 0.0)] + [taken.rest()[0]]
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
            sent.append([str(event.order), *(spans_of(trace)[0]["traceId"] for trace in ready)])
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
    output = 0
    for _ in range(60):
        recovered(log, at)
        at += 100
        if busy:
            broken = log.add("round.broken", at, round=2, data={"why": "nodes.wait"})
            for number in range(400):
                log.add("node.joined", at, cause=broken, round=2, node=f"n{number}:1")
        events = log.events()[output:]
        output += len(events)
        sent += len(taken.take(events, at))
        assert len(taken._events) <= (1000 if busy else 20)
        assert len(taken._done) <= 3
    assert sent + len(taken.rest()) == 60
    stuck = Log()
    stuck.add("node.lost", node="a:1")
    for _ in range(5):
        taken.take(stuck.events() * (KEPT_EVENTS // 2), 0.0)
    assert len(taken._events) == KEPT_EVENTS


@pytest.mark.torchrun
def test_a_running_job_is_printed_until_its_coordinator_has_gone(
    two_nodes: Callable[..., list[Process]], job: Job, port: int, tmp_path: Path
) -> None:
    nodes = two_nodes()
    command = [sys.executable, "-m", "elastic_rs", "events", f"127.0.0.1:{port}", "--follow", "--format=otlp"]
    exporter = job.start(command, name="exporter")
    # The job ends a moment after the worker is killed. A command that connects later finds no coordinator.
    until("the command is connected", lambda: is_connected(exporter, port))
    killed = job.workers(nodes[1])
    rank = max(killed)
    os.kill(killed[rank], signal.SIGKILL)
    again(nodes)
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert exporter.wait() == 3, exporter.tail()
    (content,) = (json.loads(line) for line in exporter.lines if line.startswith("{"))
    check(content, SCHEMA)
    (recovery, *_) = spans_of(content)
    assert recovery["name"] == "recovery"
    assert f" rank {rank} SIGKILL" in facts(recovery)["elastic_rs.what"]


class Followed:
    """A job that has recovered once when its coordinator has gone, or a signal ends the command that follows it."""

    def __init__(self, number: signal.Signals | None) -> None:
        self._number = number

    def batches(self) -> Iterable[list[str]]:
        log = formed()
        recovered(log)
        yield log.lines
        if self._number is None:
            raise AnswerError("it has gone")
        signal.raise_signal(self._number)
        raise AssertionError("unreachable")


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_what_is_left_is_printed_at_the_end(
    number: signal.Signals | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rest(recoveries: Recoveries) -> list[dict[str, Any]]:
        if number is not None:
            signal.raise_signal(number)  # as a wrapper delivers it twice
        return rest_of(recoveries)

    rest_of = Recoveries.rest
    monkeypatch.setattr(Recoveries, "rest", rest)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises((AnswerError, KeyboardInterrupt, SystemExit)):
            export(Followed(number), "1")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    (line,) = capsys.readouterr().out.splitlines()
    check(json.loads(line), SCHEMA)
