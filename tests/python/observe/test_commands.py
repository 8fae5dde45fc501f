"""``elastic-rs status``, ``why`` and ``events``, of jobs with real processes and of files."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _cli, _elastic_rs
from helpers.observe import again, ask

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
    told: list[dict[str, object]] = []
    while not any(event["type"] == "worker.exited" for event in told):
        _, _, lines, last, _ = observer.ask(after=last, waits=True)
        told += [json.loads(line) for line in lines]
    again(nodes)
    answer = ask("why", endpoint)
    assert answer.returncode == 0, answer
    head, root, broken, *rest = answer.stdout.splitlines()
    assert head.startswith("recovery 1 of 1, round 1 to 2: ")
    assert head.endswith(" x 4 workers")
    assert f" rank {rank} SIGKILL" in root
    assert "   first" in root
    assert broken.startswith(" +- round 1 broken, all told  +")
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
    two_nodes: Callable[..., list[Process]], port: int, tmp_path: Path
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
    follower.line(r"^ +\d+ r0 node.joined ")
    waits = ask("status", f"127.0.0.1:{port}")
    assert waits.returncode == 1
    assert "\nwaits   round 1: 1 of 2 nodes" in waits.stdout, waits.stdout
    node.signal(signal.SIGTERM)
    follower.line(r"^ +\d+ r0 node.withdrew .*gave up waiting")
    node.wait()
    host.signal(signal.SIGTERM)
    assert follower.wait() == 3
    host.wait()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["status"], 2, "give either an endpoint"),
        (["status", "a", "--events=x"], 2, "give either an endpoint"),
        (["why", "a:b"], 2, "`a:b` is not an endpoint, must be HOST, HOST:PORT"),
        (["why", "a:99999"], 2, "with a port from 1 to 65535"),
        (["events", "--events=/nowhere/x"], 2, "No such file"),
        (["events", "--follow", "--events=/dev/null"], 2, "--follow needs an endpoint"),
        (["why", "--events=/dev/null"], 2, "there are no events in these files"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(words) == code
    assert why in capsys.readouterr().err


def test_several_runs_in_files_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "there are several runs in these files: `one`, `other`; name one (--run-id)" in capsys.readouterr().err
    assert _cli.main(["status", "--events", str(path), "--run-id=one"]) == 1
    assert capsys.readouterr().out.startswith("one  FAILED  0 recoveries")
    assert _cli.main(["status", "--events", str(path), "--run-id=other"]) == 0
    assert _cli.main(["why", "--events", str(path), "--run-id=other", "--recovery=1"]) == 2
    assert _cli.main(["events", "--events", str(path), "--run-id=third"]) == 2
    assert "of run `third` in these files; there are `one`, `other`" in capsys.readouterr().err
