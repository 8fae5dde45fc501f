"""`elastic-rs bug-report`: it has what is asked for first, and nothing that must stay on the machine."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import elastic_rs
import pytest
from elastic_rs import _bug_report, _cli, _elastic_rs
from elastic_rs._bug_report import Cleaner
from elastic_rs._observe._events import parse

TOKEN = "4f" * 32
PASSWORD = "correct horse battery staple"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJx7Zp5dKZc0l0mL2Cw8eY3uF1bq9r7s5t3v1x2z4A6B root@node7"
WORDS = {
    "ELASTIC_RS_TOKEN": TOKEN,
    "DATABASE_PASSWORD": PASSWORD,
    "PET_RDZV_ID": "very-secret-project",
    "SOME_FOLDER": "/data/of/acme-corp",
}


def event(order: int, kind: str, node: str | None, **data: object) -> str:
    return json.dumps(
        {
            "v": 1, "id": f"c1.{order}", "order": order, "cause": [f"c1.{order - 1}"] if order > 1 else [],
            "run": "very-secret-project", "round": 1, "restart": 0, "type": kind, "node": node, "mono_us": order * 1000,
            "wall": "2026-01-01T00:00:00Z", "text": f"{PASSWORD} at acme.example", "data": data,
        }
    )  # fmt: skip


def events() -> list[str]:
    return [
        event(1, "run.opened", None, min_nodes=1, max_nodes=2),
        event(2, "node.joined", "acme.example:17", words=PASSWORD),
        event(3, "worker.exited", "acme.example:17", rank=3, exit="SIGKILL", message=f"token {TOKEN}", argv=HOST_KEY),
        event(4, f"{PASSWORD}!", "other.example:18", why=f"password={PASSWORD}!", how="silence"),
    ]


def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "report.txt"
    assert _cli.main(["bug-report", *words, "-o", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return file.read_text()


def test_it_has_versions_findings_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "events.jsonl"
    logs.write_text("\n".join(events()) + "\n")
    text = report(tmp_path, monkeypatch, "--events", str(logs))
    assert f"elastic_rs {elastic_rs.__version__} (commit {_elastic_rs.COMMIT}, Python " in text
    assert f"protocol {_elastic_rs.PROTOCOL_VERSION}\n" in text
    assert re.search(r"^(ok|mend) +elastic_rs ", text, re.MULTILINE)
    assert re.search(r"^ok +python ", text, re.MULTILINE)
    assert "ELASTIC_RS_TOKEN" in text
    assert "PET_RDZV_ID" in text
    assert "3 0.003 r1 worker.exited node1 rank=3 exit=SIGKILL <- 2\n" in text
    assert "4 0.004 r1 ? node2 how=silence <- 3\n" in text


def test_it_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "events.jsonl"
    logs.write_text("\n".join(events()) + "\n")
    text = report(tmp_path, monkeypatch, "--events", str(logs))
    for secret in (*WORDS.values(), *HOST_KEY.split()[1:], "acme", "other.example", socket.gethostname()):
        assert secret not in text, secret
    for name, value in os.environ.items():
        assert len(value) < 8 or value not in text, name


def test_findings_with_secrets_are_cleaned() -> None:
    clean = Cleaner(WORDS, ["node0.acme.example:29400"])
    for text, shown in (
        (f"variable is {PASSWORD}", "variable is $DATABASE_PASSWORD"),
        (f"unknown host key {HOST_KEY}", "unknown host key ssh-ed25519 KEY root@node7"),
        ("fingerprint SHA256:uNiVztksCsDhcc0u9e8BgrJXVGLDcGf4nVXR1n1L1vI.", "fingerprint SHA256:KEY."),
        (f"token={TOKEN[:20]}", "token HIDDEN"),
        ("Authorization: Bearer abcdefghij", "Authorization HIDDEN HIDDEN"),
        ("protected by a token that it makes", "protected by a token that it makes"),
        ("a" * 40, "HEX"),
        ("https://me:pass@index.example", "https://USER@index.example"),
        ("node0.acme.example answered from 10.0.0.7 and fe80::1", "HOST answered from ADDRESS and ADDRESS"),
        ("1:2:3:4:5:6:7:8, ::1", "ADDRESS, ADDRESS"),
        ("/data/of/acme-corp/logs", "$SOME_FOLDER/logs"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY----- x", "KEY x"),
        ("Python 3.11.7, torch 2.15.0, 12:30:45", "Python 3.11.7, torch 2.15.0, 12:30:45"),
    ):
        assert clean.text(text) == shown


def test_only_the_last_events_are_written() -> None:
    lines = [event(order, "node.joined", "a:1") for order in range(1, 402)]
    written = list(_bug_report.event_lines(parse(lines)))
    assert [line.split()[0] for line in (written[0], written[-1])] == ["202", "401"]


def test_a_job_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    text = report(tmp_path, monkeypatch, f"localhost:{port}")
    assert "none: " in text
    assert "localhost" not in text


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.txt"
    file.write_text("mine")
    assert _cli.main(["bug-report", "-o", str(file)]) == 1
    said = f"elastic-rs: error: cannot write `{file}`: File exists; remove it, or name another file with -o\n"
    assert capsys.readouterr().err == said
    assert file.read_text() == "mine"
    assert _cli.main(["bug-report", "-o", str(tmp_path / "none" / "report.txt")]) == 1
    assert capsys.readouterr().err.endswith("No such file or directory; name a file with -o\n")
    assert _cli.main(["bug-report", "node0", "--events", str(file)]) == 2


@pytest.mark.parametrize("program", ["elastic-run", "elastic-rs"])
def test_the_version_names_torch_and_the_commit(program: str) -> None:
    from importlib.metadata import version

    import torch

    modules = {"elastic-run": "elastic_rs.run", "elastic-rs": "elastic_rs"}
    code = f"""
import runpy, sys
sys.argv = ["{program}", "--version"]
try:
    runpy.run_module("{modules[program]}", run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    commit, python = _elastic_rs.COMMIT, ".".join(map(str, sys.version_info[:3]))
    expected = f"{program} {version('elastic_rs')} (commit {commit}, Python {python}, torch {torch.__version__})\n"
    assert done.stdout == expected
    assert re.fullmatch("unknown|[0-9a-f]{12}(-dirty)?", commit)


def test_the_package_has_a_version() -> None:
    from importlib.metadata import version

    assert elastic_rs.__version__ == version("elastic_rs") == _elastic_rs.VERSION
    assert "__version__" in dir(elastic_rs)
