"""Health and metrics over HTTP, and what `examples/monitoring` makes of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _cli, _elastic_rs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.procs import Job

MONITORING = Path(__file__).parents[3] / "examples" / "monitoring"
ALERTS, TESTS = MONITORING / "alerts.yaml", MONITORING / "alerts_test.yaml"
SERIES = re.compile(r"elastic_rs_[a-z_]+")


@pytest.fixture
def endpoint(job: Job, port: int) -> Iterator[str]:
    """Start a coordinator, and return where it answers HTTP."""
    host = job.start([sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"])
    host.line("^listening on")
    yield f"http://127.0.0.1:{port}"
    host.signal(signal.SIGTERM)
    assert host.wait() == 0


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def families(metrics: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics, re.MULTILINE))


def series(kinds: dict[str, str]) -> set[str]:
    """Return the names that the series of these families have."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    return {name + suffix for name, kind in kinds.items() for suffix in suffixes.get(kind, [""])}


def test_the_endpoint_answers_health_and_metrics(endpoint: str) -> None:
    assert got(f"{endpoint}/healthz") == "ok\n"
    metrics = got(f"{endpoint}/metrics")
    assert metrics.endswith("# EOF\n")
    for line in metrics.splitlines()[:-1]:
        assert re.fullmatch(r"# (TYPE|HELP) elastic_rs_\w+ .+|elastic_rs_\w+(\{.*\})? \S+", line), line
    kinds = families(metrics)
    assert kinds["elastic_rs_recovery_seconds"] == "histogram"
    table = {name: kind for name, kind, _, _ in _elastic_rs.metric_families()}
    assert {name + ("_total" if kind == "counter" else ""): kind for name, kind in kinds.items()} == table
    there = series(kinds)
    for line in metrics.splitlines():
        assert line.startswith("#") or line.partition("{")[0].partition(" ")[0] in there, line
    with pytest.raises(urllib.error.HTTPError) as error:
        got(f"{endpoint}/nothing")
    assert error.value.code == 404
    error.value.close()


def test_a_protected_endpoint_shows_metrics_if_asked_to_and_counts_who_has_no_token(
    job: Job, port: int, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    assert _cli.main(["token", "new", "-o", str(token)]) == 0
    env = {"ELASTIC_RS_TOKEN_FILE": str(token), "ELASTIC_RS_HTTP": "metrics"}
    serve = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"]
    host = job.start(serve, env=env)
    host.line("^listening on")
    endpoint = f"http://127.0.0.1:{port}"
    count = 'elastic_rs_auth_failures_total{why="no_tls"} '
    assert f"{count}0\n" in got(f"{endpoint}/metrics")
    status = [sys.executable, "-m", "elastic_rs", "status", f"127.0.0.1:{port}", "--run-id=job"]
    stranger = subprocess.run(status, capture_output=True, text=True, check=False, timeout=60)
    assert "protected by a token" in stranger.stderr
    metrics = got(f"{endpoint}/metrics")
    assert re.search(re.escape(count) + "[1-9]", metrics), metrics
    with pytest.raises(urllib.error.HTTPError) as error:
        got(f"{endpoint}/")
    with error.value as page:
        assert (page.code, "elastic-rs page ENDPOINT" in page.read().decode()) == (403, True)
    host.signal(signal.SIGTERM)
    assert host.wait() == 0


def test_the_dashboard_and_the_alerts_use_series_that_there_are(endpoint: str) -> None:
    there = series(families(got(f"{endpoint}/metrics")))
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = [line for line in ALERTS.read_text().splitlines() if "expr:" in line]
    assert all(panel["targets"] for panel in dashboard["panels"])
    assert len(alerts) == 10
    for expression in [*asked, *alerts]:
        named = set(SERIES.findall(expression))
        assert named <= there or "up{" in expression, expression
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@pytest.fixture
def promtool() -> str:
    if not (found := os.environ.get("PROMTOOL")):
        pytest.skip("PROMTOOL names no promtool; `make` gets one: tools/find_tool.py")
    return found


def ran(program: str, *words: str | Path) -> tuple[int, str]:
    result = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=60)
    return result.returncode, result.stdout + result.stderr


def test_each_alert_has_its_test() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = re.findall(r"alertname: (\w+)", TESTS.read_text())
    assert len(alerts) == 10
    assert {*tested} == {*alerts}
    # Each fires at least once, and is silent at least once.
    fires = re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", TESTS.read_text())
    silent = re.findall(r"alertname: (\w+), exp_alerts: \[\]", TESTS.read_text())
    assert {*fires} == {*silent} == {*alerts}


def test_prometheus_takes_the_alerts_and_they_fire_when_they_should(promtool: str) -> None:
    code, said = ran(promtool, "check", "rules", ALERTS)
    assert (code, "SUCCESS: 10 rules found" in said) == (0, True), said
    code, said = ran(promtool, "test", "rules", TESTS)
    assert code == 0, said


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('state=~"waiting|reforming"', 'state="waiting"'),
        ("> 0.1", "> 0.01"),
        ("> 3", "> 4"),
        ("for: 2m", "for: 9m"),
        ("> 900", "> 90000"),
    ],
)
def test_an_alert_that_is_wrong_fails_its_test(promtool: str, tmp_path: Path, right: str, wrong: str) -> None:
    assert right in ALERTS.read_text()
    (tmp_path / ALERTS.name).write_text(ALERTS.read_text().replace(right, wrong, 1))
    shutil.copy(TESTS, tmp_path)
    assert ran(promtool, "test", "rules", tmp_path / TESTS.name)[0] == 1
