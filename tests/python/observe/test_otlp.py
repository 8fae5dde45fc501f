"""Recoveries as traces of OpenTelemetry: their form."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import _cli
from elastic_rs._observe._otlp import traces

from .test_story import Log, exited, formed, recovered

if TYPE_CHECKING:
    from pathlib import Path

# What opentelemetry-proto 1.x has in `trace.proto`, `common.proto` and `resource.proto`, as far as it is used: its
# JSON names, and each field's type.
STRING, NANOS, COUNT = str, re.compile(r"\d{1,20}"), int
VALUE = {"stringValue": STRING, "intValue": re.compile(r"-?\d{1,19}"), "boolValue": bool}
ATTRIBUTES = [{"key": STRING, "value": VALUE}]
SCHEMA: Any = {
    "resourceSpans": [
        {
            "resource": {"attributes": ATTRIBUTES},
            "scopeSpans": [
                {
                    "scope": {"name": STRING, "version": STRING},
                    "spans": [
                        {
                            "traceId": re.compile(r"(?!0{32})[0-9a-f]{32}"),
                            "spanId": re.compile(r"(?!0{16})[0-9a-f]{16}"),
                            "parentSpanId": re.compile(r"(?!0{16})[0-9a-f]{16}"),
                            "name": STRING,
                            "kind": COUNT,
                            "startTimeUnixNano": NANOS,
                            "endTimeUnixNano": NANOS,
                            "attributes": ATTRIBUTES,
                            "events": [{"timeUnixNano": NANOS, "name": STRING, "attributes": ATTRIBUTES}],
                            "status": {"code": COUNT, "message": STRING},
                        }
                    ],
                }
            ],
        }
    ]
}


def check(value: Any, schema: Any, where: str = "") -> None:
    """Fail if the value has a field that the schema has not, or one of another type."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in schema, f"{where}.{key}"
            check(inner, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for at, inner in enumerate(value):
            check(inner, schema[0], f"{where}[{at}]")
    elif isinstance(schema, re.Pattern):
        assert isinstance(value, str), where
        assert schema.fullmatch(value), f"{where}: {value}"
    else:
        assert type(value) is schema, f"{where}: {value!r}"


def spans_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    return list(request["resourceSpans"][0]["scopeSpans"][0]["spans"])


def facts(of: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in of["attributes"]}


def two_recoveries() -> Log:
    log = formed()
    recovered(log)
    recovered(log, 300.0)
    return log


def test_a_recovery_is_a_trace_of_nodes_and_phases() -> None:
    output = list(traces(two_recoveries().events(), "1.2.3"))
    assert len(output) == 2
    for request in output:
        check(request, SCHEMA)
        assert facts(request["resourceSpans"][0]["resource"]) == {"service.name": "elastic_rs", "elastic_rs.run": "job"}
        spans = spans_of(request)
        ids = [span["spanId"] for span in spans]
        assert len(set(ids)) == len(ids)
        assert {span["traceId"] for span in spans} == {spans[0]["traceId"]}
        assert all(span["kind"] == 1 for span in spans)
        assert [span["name"] for span in spans if "parentSpanId" not in span] == ["recovery"]
        assert all(span.get("parentSpanId", ids[0]) in ids for span in spans)
        assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans)
    first, second = (spans_of(request) for request in output)
    assert first[0]["traceId"] != second[0]["traceId"]
    names = {span["spanId"]: span["name"] for span in first}
    tree = [(names.get(span.get("parentSpanId", "")), span["name"]) for span in first]
    assert tree[:5] == [
        (None, "recovery"),
        ("recovery", "node n2"),
        ("node n2", "stop"),
        ("node n2", "rendezvous"),
        ("node n2", "start"),
    ]
    # The root was at 00:48:48, on the coordinator's clock at 100 s. 32.1 s later the last worker was started.
    root = 1_795_308_528 * 10**9
    assert int(first[0]["startTimeUnixNano"]) == root
    assert int(first[0]["endTimeUnixNano"]) == root + 32_100_000_000
    stop = next(span for span in first if span["name"] == "stop")
    assert int(stop["endTimeUnixNano"]) - int(stop["startTimeUnixNano"]) == 1_100_000_000
    assert [event["name"] for event in first[0]["events"]] == [
        "worker.exited",
        "worker.exited",
        "round.broken",
        "round.completed",
    ]
    assert facts(first[0])["elastic_rs.what"] == 'n17 rank 137 exit code 1 "uncorrectable ECC"'


def test_two_who_export_agree_also_if_one_knows_less() -> None:
    log = two_recoveries()
    whole, late = (list(traces(log.events()[skip:], "1")) for skip in (0, 8))
    assert len(late) == 1
    same = ("traceId", "spanId", "parentSpanId", "name", "startTimeUnixNano", "endTimeUnixNano")
    known, other = ([[span.get(key) for key in same] for span in spans_of(one)] for one in (whole[1], late[0]))
    assert known == other
    assert list(traces(log.events(), "1", now_us=10**12)) == whole


def test_only_an_ended_recovery_is_printed_and_that_of_a_failed_job_is_an_error() -> None:
    log = formed()
    exit_ = log.add("worker.exited", 50.0, node="n2:5", data=exited(4))
    log.add("round.broken", 50.1, cause=exit_, data={"why": "worker.failed"})
    assert list(traces(log.events(), "1")) == []
    log = formed()
    exit_ = log.add("worker.exited", 50.0, node="n2:5", data=exited(4))
    log.add("run.closed", 50.1, cause=exit_, data={"verdict": "failed"}, text="no restarts left")
    (request,) = traces(log.events(), "1")
    check(request, SCHEMA)
    assert spans_of(request)[0]["status"] == {"code": 2, "message": "no restarts left"}


def test_lines_are_for_the_collectors_file_receiver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "events.jsonl"
    kept.write_text("\n".join(two_recoveries().lines))
    assert _cli.main(["events", "--events", str(kept), "--format=otlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        check(json.loads(line), SCHEMA)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--otlp-http=http://x"], "--otlp-http is not supported: write `elastic-rs events HOST:PORT --format=otlp"),
        (["--format=otlp", "--json"], "--format=otlp must be given without --json"),
        (["--format=otlp", "--follow"], "--follow needs an endpoint"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "events.jsonl"
    kept.write_text("\n".join(two_recoveries().lines))
    assert _cli.main(["events", "--events", str(kept), *flags]) == 2
    assert why in capsys.readouterr().err
