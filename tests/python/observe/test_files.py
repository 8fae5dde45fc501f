"""Files of events that nodes and coordinators write: they tell a job's story when nobody is left to ask."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
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


def kinds(file: Path) -> list[str]:
    return [json.loads(line)["type"] for line in file.read_text().splitlines()]


@pytest.mark.torchrun
def test_the_files_of_nodes_tell_what_happened_together_and_alone(
    two_nodes: Callable[..., list[Process]], job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = two_nodes(logs=tmp_path)
    killed = job.workers(nodes[1])
    rank = max(killed)
    os.kill(killed[rank], signal.SIGKILL)
    again(nodes)
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    own = [next((tmp_path / name).glob("job_*/events.jsonl")) for name in ("node2", "node3")]
    (coordinators,) = tmp_path.glob("node*/job_*/events-coordinator.jsonl")
    assert kinds(coordinators)[0] == "run.opened"
    assert kinds(coordinators)[-1] != "round.completed"
    for file in own:
        found = kinds(file)
        assert (found.count("received.completed"), found.count("received.broken"), found.count("worker.started")) == (
            2,
            1,
            4,
        )
        assert found.count("worker.ended") == 4
        numbers = [int(json.loads(line)["id"].rpartition(".")[2]) for line in file.read_text().splitlines()]
        assert numbers == list(range(1, len(numbers) + 1))

    def why(*files: Path) -> list[str]:
        assert _cli.main(["why", "--events", *map(str, files)]) == 0
        return capsys.readouterr().out.splitlines()

    all_ = [coordinators, *own]
    for count in (1, 2, 3):
        for files in itertools.permutations(all_, count):
            title, root, broken, *rest = why(*files)
            assert title.startswith("recovery 1 of 1, round 1 to 2: "), files
            assert " x 4 workers, at 2" in title, files
            assert f" rank {rank} SIGKILL" in root, files
            assert broken.startswith(" +- round 1 broken, all nodes notified"), files
            shown = "\n".join(rest)
            for part in ("+- round 2 complete with 2 nodes", "stop ", "rendezvous ", "start "):
                assert part in shown, (files, rest)

    # The time of day of each host is shown, and decides nothing.
    def without_time() -> list[list[str]]:
        title, *rest = why(*all_)
        return [[title.partition(", at ")[0], *rest], _shown("status", all_, capsys), _shown("events", all_, capsys)]

    before = without_time()
    for hours, file in zip((1, 23, 5), all_, strict=True):
        file.write_text(re.sub(r'"wall":"([^T]*)T(\d\d)', functools.partial(_later, hours=hours), file.read_text()))
    assert without_time() == before

    # What this release does not know is passed on.
    lines = [line for file in all_ for line in file.read_text().splitlines()]
    with own[0].open("a") as opened:
        opened.write(
            '{"v":1,"id":"n00.1","order":1,"run":"job","type":"of.a.later.release","mono_us":1,"later":[{"x":1}]}\n'
        )
        opened.write('{"v":1,"id":"n00.2","order":')  # an agent was killed as it wrote
    passed = [json.loads(line) for line in _shown("events", all_, capsys, "--json")]
    assert len(passed) == len(lines) + 1
    assert [event["later"] for event in passed if event["type"] == "of.a.later.release"] == [[{"x": 1}]]


def _later(wall: re.Match[str], hours: int) -> str:
    return f'"wall":"{wall[1]}T{(int(wall[2]) + hours) % 24:02}'


def _shown(command: str, files: list[Path], capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    assert _cli.main([command, "--events", *map(str, files), *more]) == 0
    return capsys.readouterr().out.splitlines()


LAUNCHERS = {"torchrun": "torch.distributed.run", "elastic-run": "elastic_rs.run"}
FAMILY = Path(__file__).parents[1] / "scripts" / "family.py"


def _alone(job: Job, launcher: str, logs: Path, *worker: str | Path) -> Process:
    """Start a job of one node with two workers, whose process hosts the coordinator."""
    flags = ["--rdzv-backend=rust-c10d", "--rdzv-id=job", "--nproc-per-node=2", f"--log-dir={logs}"]
    command = [sys.executable, "-m", LAUNCHERS[launcher], *flags, str(FAMILY), *map(str, worker)]
    node = job.start(command, env={"ELASTIC_RS_LOG": "info"})
    for rank in (0, 1):
        node.line(f"^WORKER rank={rank} ")
    return node


def _files(logs: Path) -> tuple[Path, Path]:
    (own,) = logs.glob("job_*/events.jsonl")
    (coordinators,) = logs.glob("job_*/events-coordinator.jsonl")
    return own, coordinators


@pytest.mark.torchrun
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("signals", [1, 2])
def test_the_files_of_a_job_that_a_signal_ends_go_to_its_end(
    job: Job, tmp_path: Path, launcher: str, signals: int, capsys: pytest.CaptureFixture[str]
) -> None:
    node = _alone(job, launcher, tmp_path, *(["--stubborn"] if signals > 1 else []))
    node.signal(signal.SIGTERM)
    if signals > 1:
        node.line("Received 15 death signal")
        time.sleep(2 * _elastic_rs.SAME_SIGNAL_S)  # one that comes at once is no second one
        node.signal(signal.SIGTERM)
    assert node.wait() == 143
    own, coordinators = _files(tmp_path)
    events = [json.loads(line) for line in own.read_text().splitlines()]
    (got,) = [event for event in events if event["type"] == "received.signal"]
    assert got["data"] == {"signal": 15}
    ended = [event for event in events if event["type"] == "worker.ended"]
    assert [event["data"]["exit"] for event in ended] == ["SIGTERM" if signals == 1 else "SIGKILL"] * 2
    assert [event["cause"] for event in ended] == [[got["id"]]] * 2
    assert "node.left" in kinds(coordinators)
    for files in ([own], [coordinators], [own, coordinators]):
        assert _cli.main(["status", "--events", *map(str, files)]) == 1, files
        assert _cli.main(["why", "--events", *map(str, files)]) == 0
        output = capsys.readouterr().out
        assert "SIGTERM" in output, (files, output)
        assert "no recovery so far" not in output, files


@pytest.mark.torchrun
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_files_of_a_job_that_succeeds_say_so(
    job: Job, tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    done.touch()
    node = _alone(job, launcher, tmp_path, "--until", done)
    assert node.wait() == 0
    own, coordinators = _files(tmp_path)
    assert kinds(own).count("worker.ended") == 2
    for kind in ("run.closed", "node.left"):
        assert kind in kinds(coordinators)
    assert _cli.main(["status", "--events", str(coordinators)]) == 0
    assert "SUCCEEDED" in capsys.readouterr().out


@pytest.mark.torchrun
def test_members_replay_the_last_recovery_to_a_restarted_coordinator(
    two_nodes: Callable[..., list[Process]], job: Job, port: int, tmp_path: Path
) -> None:
    serve = [sys.executable, "-m", "elastic_rs", "store", "serve", "--host=127.0.0.1", f"--port={port}"]
    host = job.start(serve)
    host.line("^listening on")
    nodes = two_nodes(logs=tmp_path, conf=",is_host=0")
    killed = job.workers(nodes[1])
    rank = max(killed)
    os.kill(killed[rank], signal.SIGKILL)
    again(nodes)
    host.signal(signal.SIGKILL)
    host.wait()
    host = job.start(serve)
    host.line("^listening on")
    endpoint, deadline = f"127.0.0.1:{port}", time.monotonic() + 120
    while f" rank {rank} SIGKILL" not in (answer := ask("why", endpoint)).stdout:
        assert time.monotonic() < deadline, answer
    title, root, broken, *rest = answer.stdout.splitlines()
    assert title.startswith("recovery 1 of 1, round 1 to 2: "), answer.stdout
    assert "   root cause" in root
    assert broken.startswith(" +- round 1 broken, all nodes notified")
    assert any("+- round 2 complete with 2 nodes" in line for line in rest), answer.stdout
    listed = ask("events", endpoint, "--json").stdout
    assert '"type":"replayed"' in listed
    (tmp_path / "done").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    # Nodes write down what they themselves saw of it.
    for name in ("node2", "node3"):
        found = kinds(next((tmp_path / name).glob("job_*/events.jsonl")))
        assert found.count("line.lost") == 1
        assert found.count("line.found") == 2, "at the start, too"
    host.signal(signal.SIGTERM)
    host.wait()
