"""Recoveries as traces of OpenTelemetry: their form, and a collector that takes them or refuses."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import _cli
from elastic_rs._observe._otlp import HEADERS, LIMIT_S, RefusedError, _content, checked_headers, send, traces

from .conftest import answer_once
from .test_story import Log, exited, formed, recovered

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Collector

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
    told = list(traces(two_recoveries().events(), "1.2.3"))
    assert len(told) == 2
    for request in told:
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
    first, second = (spans_of(request) for request in told)
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


def test_what_goes_on_is_not_told_and_the_end_of_a_job_is_an_error() -> None:
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


def test_a_collector_gets_each_recovery(
    collector: tuple[str, type[Collector]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    url, handler = collector
    monkeypatch.setenv(HEADERS, "authorization=Bearer%20x, other=1")
    kept = tmp_path / "events.jsonl"
    kept.write_text("\n".join(two_recoveries().lines))
    assert _cli.main(["events", "--events", str(kept), "--otlp-http", url]) == 0
    assert capsys.readouterr().out == f"sent 2 recoveries to {url}\n"
    assert [path for path, _, _ in handler.got] == ["/v1/traces"] * 2
    for _, headers, content in handler.got:
        assert headers["Content-Type"] == "application/json"
        assert headers["Authorization"] == "Bearer x"
        check(content, SCHEMA)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((503, b""), "503 Service Unavailable, after 0 traces"),
        ((200, b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}'), "refuses spans: 3: too old"),
    ],
)
def test_a_collector_that_refuses_is_named(
    collector: tuple[str, type[Collector]], answer: tuple[int, bytes], why: str
) -> None:
    url, handler = collector
    handler.answer = answer
    with pytest.raises(ConnectionError, match=why):
        send(url, traces(two_recoveries().events(), "1"))
    assert len(handler.got) == 1


@pytest.mark.parametrize(
    "words",
    [b"\x00\x00\x06\x04" * 16, b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\n\r\n"],
    ids=["grpc", "ssh", "http"],
)
def test_what_answers_without_http_is_told(words: bytes) -> None:
    """Such as gRPC, a mistake of port. What is no JSON has been taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=lambda: answer_once(server, words))
        answering.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"
        try:
            if words.startswith(b"HTTP"):
                assert send(url, list(traces(two_recoveries().events(), "1"))[:1]) == 1
            else:
                with pytest.raises(
                    ConnectionError, match=r"(?s)not valid HTTP .*HTTP on port 4318 .*, after 0 traces$"
                ):
                    send(url, traces(two_recoveries().events(), "1"))
        finally:
            answering.join()


@pytest.mark.parametrize(
    "words",
    [b"[" * 60_000, b'{"partialSuccess":{"rejectedSpans":Infinity}}', b'{"partialSuccess":[1]}', b"<html>"],
    ids=["deep", "infinite", "a list", "html"],
)
def test_an_answer_of_junk_ends_nothing(collector: tuple[str, type[Collector]], words: bytes) -> None:
    url, handler = collector
    handler.answer = (200, words)
    assert send(url, traces(two_recoveries().events(), "1")) == 2


def test_an_answer_that_comes_byte_by_byte_is_not_read_to_its_end() -> None:
    now_s = iter(range(100))

    class Slow:
        def read1(self, _most: int) -> bytes:
            return b"x"

    assert len(_content(Slow(), lambda: float(next(now_s)))) < LIMIT_S  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(
    collector: tuple[str, type[Collector]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose the trace, and hand the headers to another host."""
    url, handler = collector
    monkeypatch.setenv(HEADERS, "authorization=Bearer%20x")
    handler.answer, handler.headers_too = (code, b""), {"Location": f"{url}/login"}
    with pytest.raises(RefusedError, match=f"{code} .* to `{url}/login`, and redirects are not followed: give that"):
        send(url, traces(two_recoveries().events(), "1"))
    assert handler.paths == ["/v1/traces"]


@pytest.mark.parametrize(
    "url",
    [
        "http://c:43l8/v1",
        "http://c/a b",
        "http://c/tr\u00e4ces",
        "http://[::1/x",
        "http://c:99999/",
        "http://c:0/",
        "http://me:secret@c/",
        "http:///v1",
        "http://c/\n",
    ],
)
def test_an_address_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)^--otlp-http is `http:.*must be an address such as"):
        checked_headers(url)


@pytest.mark.parametrize("pair", ["authorization=SECRET%0Ax", "authorization=SECRET%E2%82%AC", "a%20b=SECRET"])
def test_a_header_that_cannot_be_sent_is_named_without_its_value(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, pair)
    with pytest.raises(ValueError, match=f"^{HEADERS}: the header `a") as told:
        checked_headers("http://c:4318/v1/traces")
    assert "SECRET" not in str(told.value)


def test_what_cannot_be_sent_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: Any) -> None:
    kept = tmp_path / "events.jsonl"
    kept.write_text("\n".join(two_recoveries().lines))
    events = ["events", "--events", str(kept)]
    assert _cli.main([*events, f"--otlp-http=http://127.0.0.1:{free_port()}/v1/traces"]) == 3
    assert "Connection refused, after 0 traces" in capsys.readouterr().err
    for flags, why in [
        (["--otlp-http=file:///etc/passwd"], "must be an address such as http://collector:4318/v1/traces"),
        (["--otlp-http=http://x", "--format=chrome-trace"], "--otlp-http sends --format=otlp"),
        (["--format=otlp", "--json"], "give neither --follow nor --json"),
    ]:
        assert _cli.main([*events, *flags]) == 2
        assert why in capsys.readouterr().err
