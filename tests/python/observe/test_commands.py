"""``elastic-rs status``, ``why`` and ``events``, of jobs with real processes and of files."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from elastic_rs import _cli, _elastic_rs
from elastic_rs._observe import _source
from helpers.observe import again, ask

from .conftest import answer_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process


@pytest.mark.torchrun
def test_why_names_host_rank_and_signal_of_a_killed_worker(
    two_nodes: Callable[..., list[Process]], job: Job, port: int, tmp_path: Path
) -> None:
    nodes = two_nodes()
    endpoint = f"127.0.0.1:{port}"
    healthy = ask("status", endpoint)
    assert healthy.returncode == 0, healthy
    assert healthy.stdout.startswith("job  RUNNING  round 1, 2 nodes (2), 4 workers"), healthy.stdout

    observer = _elastic_rs.Observer.connect("127.0.0.1", port)
    _, _, _, last, _ = observer.ask()
    killed = job.workers(nodes[1])
    rank = max(killed)
    os.kill(killed[rank], signal.SIGKILL)
    # The event is there before anything has been stopped: it is waited for, not polled.
    result: list[dict[str, object]] = []
    while not any(event["type"] == "worker.exited" for event in result):
        _, _, lines, last, _ = observer.ask(after=last, waits=True)
        result += [json.loads(line) for line in lines]
    again(nodes)
    answer = ask("why", endpoint)
    assert answer.returncode == 0, answer
    head, root, broken, *rest = answer.stdout.splitlines()
    assert head.startswith("recovery 1 of 1, round 1 to 2: ")
    assert re.search(r" x 4 workers, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+$", head), "when, in this time zone"
    assert f" rank {rank} SIGKILL" in root
    assert "   root cause" in root
    assert broken.startswith(" +- round 1 broken, all nodes notified  +")
    shown = "\n".join(rest)
    for part in ("+- round 2 complete with 2 nodes", "stop ", "rendezvous ", "start "):
        assert part in shown, answer.stdout
    facts = json.loads(ask("why", endpoint, "--json").stdout)
    assert facts["root"]["data"]["returncode"] == -signal.SIGKILL
    assert facts["root"]["data"]["pid"] == killed[rank]
    parts = [part["longest_s"] for phase, part in facts["phases"].items() if phase != "import"]
    assert 0 < max(parts) <= facts["lasted_s"]

    # The same afterwards, from a file.
    kept = tmp_path / "events.jsonl"
    kept.write_text(ask("events", endpoint, "--json").stdout)
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    assert ask("why", "--events", kept).stdout.splitlines()[1:3] == [root, broken]
    listed = ask("events", "--events", kept).stdout
    assert "round.broken" in listed
    assert "<- " in listed
    gone = ask("status", endpoint)
    assert gone.returncode == 3
    assert gone.stderr.startswith(f"elastic-rs: error: {endpoint}: ")
    assert "Connection refused" in gone.stderr


@pytest.mark.torchrun
def test_an_observers_token_reads_and_cannot_join(
    two_nodes: Callable[..., list[Process]], job: Job, port: int, tmp_path: Path
) -> None:
    token, observers = tmp_path / "token", tmp_path / "observer"
    assert _cli.main(["token", "new", "-o", str(token)]) == 0
    assert _cli.main(["token", "observer", f"--of={token}", "-o", str(observers)]) == 0
    nodes = two_nodes(env={"ELASTIC_RS_TOKEN_FILE": str(token)})
    endpoint, reads = f"127.0.0.1:{port}", {"ELASTIC_RS_TOKEN_FILE": str(observers)}
    seen = ask("status", endpoint, "--run-id=job", env=reads)
    assert (seen.returncode, seen.stdout.partition("  ")[0]) == (0, "job"), seen
    unnamed = ask("status", endpoint, env=reads)
    assert unnamed.returncode == 2
    assert "name the run: --run-id" in unnamed.stderr
    stranger = ask("status", endpoint, "--run-id=job")
    assert stranger.returncode == 3
    assert "it is protected by a token" in stranger.stderr
    options = ["--nnodes=2", "--rdzv-backend=rust-c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
    command = [sys.executable, "-m", "elastic_rs.run", *options, "--rdzv-conf=is_host=0", "--no-python", "true"]
    joining = job.start(command, env=reads)
    assert joining.wait() == 1
    assert any("is an observer's: no node may join with it" in line for line in joining.lines), joining.tail()
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]


def test_follow_shows_each_event_as_it_comes(job: Job, port: int) -> None:
    host = job.start([sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"])
    host.line("^listening on")
    options = ["--nnodes=2", "--rdzv-backend=rust-c10d", "--rdzv-conf=is_host=0", "--rdzv-id=job"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
    node = job.start([sys.executable, "-m", "elastic_rs.run", *options, endpoint, "--no-python", "sleep", "600"])
    deadline = time.monotonic() + 60
    while ask("status", f"127.0.0.1:{port}").returncode == 3:
        assert time.monotonic() < deadline, node.tail()
    follower = job.start([sys.executable, "-m", "elastic_rs", "events", f"127.0.0.1:{port}", "--follow"])
    follower.line(r"^ +\d+ \S+ r0 node.joined ")
    waits = ask("status", f"127.0.0.1:{port}")
    assert waits.returncode == 1
    assert "\nwaits   round 1: 1 of 2 nodes" in waits.stdout, waits.stdout
    node.signal(signal.SIGTERM)
    follower.line(r"^ +\d+ \S+ r0 node.withdrew .*gave up waiting")
    node.wait()
    host.signal(signal.SIGTERM)
    assert follower.wait() == 3
    host.wait()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["status"], 2, "give either an endpoint"),
        (["status", "a", "--events=x"], 2, "give either an endpoint"),
        (["why", "a:b"], 2, "the rendezvous endpoint is `a:b`, must be HOST, HOST:PORT"),
        (["why", "a:99999"], 2, "with a port from 0 to 65535"),
        (["why", "a:0"], 2, "the rendezvous endpoint is `a:0`, must have the port on which the job is, not 0"),
        (["why", "fe80::1"], 2, "must have brackets around an IPv6 address: [fe80::1] or [fe80::1]:PORT"),
        (["events", "--events=/nowhere/x"], 2, "error: `/nowhere/x`: No such file or directory"),
        (
            ["events", "--events=/proc/self/fdinfo"],
            2,
            "there are no files of events below this folder (events.jsonl.1, ",
        ),
        (["events", "--follow", "--events=/dev/null"], 2, "--follow needs an endpoint"),
        (["why", "--events=/dev/null"], 2, "`/dev/null`: there are no events in this file"),
    ],
)
def test_an_impossible_request_is_an_error(
    words: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _cli.main(words) == code
    assert why in capsys.readouterr().err


def test_several_runs_in_files_need_a_run_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events"
    lines = [
        json.dumps(
            {
                "id": f"c.{number}",
                "order": number,
                "run": run,
                "type": "run.closed",
                "mono_us": number,
                "data": {"verdict": verdict},
            }
        )
        for number, (run, verdict) in enumerate([("one", "failed"), ("other", "succeeded")], start=1)
    ]
    path.write_text("\n".join(lines))
    assert _cli.main(["status", "--events", str(path)]) == 2
    assert (
        "there are several runs in these files: `one`, `other`; name one (--run-id), or list all"
        in capsys.readouterr().err
    )
    assert _cli.main(["status", "--events", str(path), "--run-id=one"]) == 1
    # The exit code says so although nobody reads the words: `| head -0`.
    theirs, ours = os.pipe()
    os.close(theirs)
    command = [sys.executable, "-m", "elastic_rs", "status", "--events", str(path), "--run-id=one"]
    assert subprocess.run(command, stdout=ours, stderr=subprocess.PIPE, check=False).returncode == 1
    os.close(ours)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    assert subprocess.run(closed, capture_output=True, check=False).stderr == b""
    assert capsys.readouterr().out.startswith("one  FAILED  0 recoveries")
    assert _cli.main(["status", "--events", str(path), "--run-id=other"]) == 0
    assert _cli.main(["why", "--events", str(path), "--run-id=other", "--recovery=1"]) == 2
    capsys.readouterr()
    assert _cli.main(["why", "--events", str(path), "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["one: 0 recoveries; failed", "other: 0 recoveries; succeeded"]
    assert _cli.main(["why", "--events", str(path), "--list", "--json", "--run-id=one"]) == 0
    assert json.loads(capsys.readouterr().out) == {"one": []}
    assert _cli.main(["why", "--events", str(path), "--list", "--recovery=1"]) == 2
    assert "--list and --recovery cannot be combined" in capsys.readouterr().err
    assert _cli.main(["events", "--events", str(path), "--run-id=third"]) == 2
    assert "of run `third` in these files; there are `one`, `other`" in capsys.readouterr().err


def line(number: int, origin: str = "c", **fields: object) -> str:
    about = {"id": f"{origin}.{number}", "order": number, "run": "job", "type": "note", "mono_us": number}
    return json.dumps({"v": 1, **about, **fields})


def test_a_torn_line_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk was full for a moment, and an agent was killed as it wrote."""
    path = tmp_path / "events"
    path.write_text("\n".join([line(1, text="one\u2028two"), line(2)[:40], "", line(3), line(4)[:20]]))
    assert _cli.main(["events", "--events", str(path)]) == 0
    result = capsys.readouterr()
    assert [shown.split()[0] for shown in result.out.splitlines()] == ["1", "3"]
    assert result.err.startswith(f"elastic-rs: warning: `{path}`: 1 line is left out: line 2 is no event of a job: ")
    path.write_text("no\nevents\n")
    assert _cli.main(["events", "--events", str(path)]) == 2
    assert f"`{path}`: line 1 is no event of a job" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["why"], ["status"], ["events"], ["events", "--json"], ["page"]])
def test_a_folder_without_events_does_not_hide_the_events_of_others(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of several nodes was killed before it wrote any."""
    one, empty, begun, other = (tmp_path / name for name in ("one", "empty", "begun", "other"))
    for folder in (one, empty, begun, other):
        folder.mkdir()
    (one / "events.jsonl").write_text(line(1) + "\n")
    (begun / "events.jsonl").write_text("")
    (other / "events.jsonl").write_text(line(1, "d", type="run.closed", data={"verdict": "succeeded"}) + "\n")
    paths = [str(path) for path in (one, empty, begun, tmp_path / "nowhere", other)]
    assert _cli.main([*words, "--events", *paths]) == 0
    result = capsys.readouterr()
    assert [said.split(": ")[2] for said in result.err.splitlines()] == [
        f"`{empty}`",
        f"`{begun}`",
        f"`{tmp_path / 'nowhere'}`",
    ]
    assert result.err.count("; it is left out\n") == 3
    assert result.out


def test_what_an_output_cannot_show_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events"
    path.write_text(line(1, text="内存不足 …"))
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert _cli.main(["events", "--events", str(path)]) == 0
    assert shown.getvalue().endswith(b" ???? ?\n")


@pytest.mark.parametrize("command", ["why", "status", "events", "page"])
def test_an_event_with_values_of_other_types_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "events"
    odd = [
        line(2, "n1", type="received.exited", data={"rank": [1], "pid": {"a": 1}}),
        line(3, "n1", type="phase", data={"stop_us": 10**400}),
        line(4, "n1", type="round.completed", data={"nodes": [2], "workers": {}}),
        line(5, "n1", type="worker.ended", data={"rank": [1]}),
    ]
    path.write_text("\n".join([line(1, "n1"), *odd, line(6, "n1"), ""]))
    assert _cli.main([command, "--events", str(path)]) in (0, 1)
    assert "1 line is left out: line 3 is no event of a job: `1000" in capsys.readouterr().err


def test_standard_input_is_read_as_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = line(1, text="\u00e4").replace("\\u00e4", "ä").encode()
    torn = torn[: torn.index("ä".encode()) + 1]
    path = tmp_path / "events"
    path.write_bytes(b"\n".join([line(1).encode(), torn, line(3).encode(), b""]))
    with path.open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert _cli.main(["events", "--events", "-"]) == 0
    result = capsys.readouterr()
    assert len(result.out.splitlines()) == 2
    assert result.err.startswith("elastic-rs: warning: `-`: 1 line is left out: line 2 is no event")
    monkeypatch.setattr(sys, "stdin", None)
    assert _cli.main(["events", "--events", "-"]) == 2
    assert "`-`: standard input is closed" in capsys.readouterr().err


def test_a_file_of_one_line_that_is_no_event_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.write_text(line(1) + "\n")
    other.write_text('{"traceEvents":[]}')
    assert _cli.main(["events", "--events", str(whole), str(other)]) == 0
    assert f"`{other}`: line 1 is no event of a job" in capsys.readouterr().err
    assert _cli.main(["events", "--events", str(other)]) == 2
    assert f"`{other}`: line 1 is no event of a job" in capsys.readouterr().err
    other.write_text(line(2)[:20])  # an agent was killed with its first event
    assert _cli.main(["events", "--events", str(whole), str(other)]) == 0
    assert f"`{other}`: there are no events in this file; it is left out" in capsys.readouterr().err


def test_a_folder_stands_for_the_files_of_events_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "node1" / "job_x"
    node.mkdir(parents=True)
    (node / "events.jsonl").write_text(line(2) + "\n")
    (node / "events.jsonl.1").write_text(line(1) + "\n")
    (node / "other.jsonl").write_text("no event")
    assert _cli.main(["events", "--json", "--events", str(tmp_path)]) == 0
    assert [json.loads(shown)["order"] for shown in capsys.readouterr().out.splitlines()] == [1, 2]


@pytest.mark.parametrize("origin", ["c", "n"])
def test_of_two_jobs_of_one_name_the_later_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], origin: str
) -> None:
    """The name of a folder of logs ends at random."""
    files = []
    for folder, day in [("job_zz", 21), ("job_aa", 22)]:
        file = tmp_path / folder / "events.jsonl"
        file.parent.mkdir()
        broken = line(1, f"{origin}{day}", type="round.broken", wall=f"2026-11-{day}T08:00:00.000Z", text=f"on {day}")
        # A node's clock may be wrong after that.
        later = line(2, f"{origin}{day}", type="round.completed", wall="2026-11-01T08:00:00.000Z", data={"nodes": 1})
        file.write_text(f"{broken}\n{later}\n")
        files.append(str(file))
    for chosen in ([str(tmp_path)], files, files[::-1]):
        assert _cli.main(["why", "--events", *chosen]) == 0
        assert " on 22   root cause" in capsys.readouterr().out.splitlines()
        _cli.main(["status", "--events", *chosen])
        assert "since the coordinator or the job was restarted; 1 recovery before that" in capsys.readouterr().out


def test_a_folder_that_may_not_be_read_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("node1", "node2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(line(1, name) + "\n")
    scanned = os.scandir

    def scan(path: str) -> object:
        if str(path).endswith("node2"):
            raise PermissionError(13, "Permission denied", path)
        return scanned(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert _cli.main(["events", "--events", str(tmp_path)]) == 0
    result = capsys.readouterr()
    assert len(result.out.splitlines()) == 1
    assert (
        f"warning: `{tmp_path}/node2`: Permission denied; files of events below this folder are left out" in result.err
    )


def test_events_of_a_later_schema_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events"
    path.write_text(f"{line(1)}\n{line(2, v=2)}\n")
    assert _cli.main(["events", "--events", str(path)]) == 0
    result = capsys.readouterr()
    assert "there are events of schema v2, and this release knows v1" in result.err
    assert len(result.out.splitlines()) == 2


def test_an_answer_of_another_program_is_reported(
    free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert _cli.main(["status", f"127.0.0.1:{port}"]) == 3
    result = capsys.readouterr().err
    assert result.startswith(f"elastic-rs: error: 127.0.0.1:{port}: Connection refused")
    assert "the endpoint is the job's --rdzv-endpoint; when the job has ended, read its files: --events" in result
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=lambda: answer_once(server, b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        answering.start()
        assert _cli.main(["status", f"127.0.0.1:{server.getsockname()[1]}"]) == 3
        answering.join()
    assert "the server there is not an elastic_rs coordinator: " in capsys.readouterr().err


class FakeObserver:
    """Answers as the process at one of two ports does that are up. Each has lines of its own, and may break once."""

    up: ClassVar[dict[int, list[str]]] = {}
    breaks: ClassVar[set[int]] = set()

    def __init__(self, port: int) -> None:
        self.port = port

    @classmethod
    def connect(cls, _: str, port: int, **__: object) -> FakeObserver:
        if port not in cls.up:
            raise ConnectionError("refused")
        return cls(port)

    def ask(self, *, after: int, **_: object) -> tuple[str, None, list[str], int, bool]:
        if self.port not in self.up or self.port in self.breaks:
            self.breaks.discard(self.port)
            raise ConnectionError("closed")
        lines = self.up[self.port]
        return "job", None, lines[after:], len(lines), False


def lines_of(origin: str, count: int) -> list[str]:
    return [json.dumps({"id": f"{origin}.{number}"}) for number in range(1, count + 1)]


def test_events_are_heard_once_over_broken_connections_and_all_of_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_source._elastic_rs, "Observer", FakeObserver)
    monkeypatch.setattr(_source, "LOOKS_EVERY_S", 0.0)
    FakeObserver.up = {1: lines_of("a", 3)}
    live = _source.Live([("h", 1), ("h", 2)], "job")
    assert list(live.lines()) == lines_of("a", 3)
    FakeObserver.breaks = {1}
    FakeObserver.up[1] = lines_of("a", 4)
    assert list(live.lines()) == lines_of("a", 4)[3:]
    FakeObserver.up = {2: lines_of("b", 2)}
    assert list(live.lines()) == lines_of("b", 2), "fewer than were heard of the one before"
    FakeObserver.up = {}
    monkeypatch.setattr(_source, "TAKE_OVER_S", 0.0)
    with pytest.raises(_source.AnswerError, match=r"h:2: refused .*when the job has ended, read its files"):
        list(live.lines())


def test_another_endpoint_is_asked_if_the_first_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_source._elastic_rs, "Observer", FakeObserver)
    FakeObserver.up, FakeObserver.breaks = {1: [], 2: lines_of("a", 1)}, {1}
    live = _source.Live([("h", 1), ("h", 2)], "job")
    FakeObserver.up = {2: lines_of("a", 1)}
    assert list(live.lines()) == lines_of("a", 1)
