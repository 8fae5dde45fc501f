"""Notices from metadata servers, as EC2's, Google's and Azure's answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from elastic_rs import _preempt, _python, _signal_options

Answer = tuple[int, str, dict[str, str]]
"""Status, text and headers."""
Answers = Callable[[str, str, dict[str, str]], Answer]
"""Method, path and headers (with small letters) of a request to its answer."""


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """Serve on a free port of this machine, and give ``HOST:PORT``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text, further = answers(self.command, self.path, headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text.encode())), **further}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815 - the base's name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


VARIABLES = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "gcp": "GCE_METADATA_HOST",
    "azure": "ELASTIC_RS_AZURE_METADATA",
}


def in_a_minute() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=60)


class Cloud:
    """A metadata server that says from some time on that the machine is taken away."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.noticed = False
        self.token = "first"
        """EC2's. It changes when it has lapsed."""
        self.override: Answer | None = None

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        self.requests.append(f"{method} {path}")
        if self.override is not None:
            return self.override
        if path == "/latest/api/token":
            assert method == "PUT"
            assert int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
            return 200, self.token, {}
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("x-aws-ec2-metadata-token") != self.token:
                return 401, "", {}
            at = in_a_minute().strftime("%Y-%m-%dT%H:%M:%SZ")
            return (200, json.dumps({"action": "terminate", "time": at}), {}) if self.noticed else (404, "", {})
        if path.startswith("/computeMetadata/v1/instance/preempted"):
            assert headers["metadata-flavor"] == "Google"
            given = {"Metadata-Flavor": "Google", "ETag": "e1/+"}
            return 200, "TRUE" if self.noticed else "FALSE", given
        assert headers["metadata"] == "true"
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "vm1", {}
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        event = {"EventType": "Preempt", "Resources": ["vm1"], "NotBefore": format_datetime(in_a_minute(), usegmt=True)}
        others = [{**event, "Resources": ["vm2"]}, {**event, "EventType": "Freeze"}]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": [*others, *([event] if self.noticed else [])]}), {}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    made = Cloud()
    with serving(made) as where:
        monkeypatch.setenv(VARIABLES["aws"], f"http://{where}")
        monkeypatch.setenv(VARIABLES["gcp"], where)
        monkeypatch.setenv(VARIABLES["azure"], f"http://{where}/")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not used
        yield made


@pytest.mark.parametrize("provider", list(VARIABLES))
def test_a_notice_says_how_many_seconds_are_left(cloud: Cloud, provider: str) -> None:
    looks = _preempt.PROVIDERS[provider]()
    assert [next(looks), next(looks)] == [None, None]
    cloud.noticed = True
    left = next(looks)
    assert left is not None
    assert (left == 30.0) if provider == "gcp" else (40 < left <= 60)


def test_google_is_asked_for_the_next_change(cloud: Cloud) -> None:
    looks = _preempt.gcp()
    next(looks)
    next(looks)
    assert cloud.requests == [
        "GET /computeMetadata/v1/instance/preempted",
        "GET /computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=60&last_etag=e1/%2B",
    ]


def test_a_token_that_has_lapsed_is_renewed(cloud: Cloud) -> None:
    looks = _preempt.aws()
    assert next(looks) is None
    cloud.token = "second"
    cloud.noticed = True
    assert next(looks) is not None
    assert cloud.requests.count("PUT /latest/api/token") == 2


@pytest.mark.parametrize("provider", list(VARIABLES))
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((500, "", {}), "answers 500"),
        ((302, "", {"Location": "http://127.0.0.1:1/elsewhere"}), "answers 302 Found"),
        ((200, "\x01<html>junk" * 50, {}), "which is none"),
        ((200, "x", {"Content-Length": "nonsense"}), "which is none"),
        ((200, "\ufffd", {}), "which is none"),
        ((404, "no such thing", {}), "which is none"),
    ],
)
def test_an_answer_that_is_none_is_named(cloud: Cloud, provider: str, answer: Answer, expected: str) -> None:
    cloud.override = answer
    with pytest.raises(_preempt.NoAnswerError, match=expected) as raised:
        next(_preempt.PROVIDERS[provider]())
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("provider", list(VARIABLES))
def test_events_of_another_shape_are_no_notice(cloud: Cloud, provider: str) -> None:
    for text in (
        "{}",
        "[]",
        "null",
        '{"time": 3}',
        '{"Events": [3]}',
        '{"Events": null}',
        '{"time": "tomorrow"}',
        "[" * 60_000,
    ):
        looks = _preempt.PROVIDERS[provider]()
        next(looks)
        cloud.override = (200, text, {"Metadata-Flavor": "Google"})
        with pytest.raises(_preempt.NoAnswerError):
            next(looks)
        cloud.override = None


@pytest.mark.parametrize("provider", list(VARIABLES))
def test_a_server_that_does_not_answer_is_asked_again(
    cloud: Cloud, provider: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    def sleep(_: float) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:  # it has come up
            cloud.override, cloud.noticed = None, True

    cloud.override = (503, "", {})
    monkeypatch.setattr(_preempt.time, "sleep", sleep)
    assert _preempt.main(provider) == 0
    out, err = capsys.readouterr()
    assert 20 < float(out) <= 60
    assert err.count("tells nothing, and is asked again: ") == 1, err
    assert asked == 3


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("https://me", "http://me:port", "ftp://me", "http://[::1"):
        monkeypatch.setenv(VARIABLES["azure"], wrong)
        with pytest.raises(SystemExit, match="must be http://HOST or http://HOST:PORT"):
            next(_preempt.azure())


@pytest.mark.parametrize("provider", list(VARIABLES))
def test_the_program_writes_the_notice_and_ends(cloud: Cloud, provider: str) -> None:
    cloud.noticed = True
    command = [sys.executable, *_python.arguments(_signal_options.WATCH, provider)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 20 < float(done.stdout) <= 60
    assert not done.stderr
