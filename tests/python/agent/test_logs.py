"""Logs of an agent's workers: files, consoles, prefixes and filters."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import elastic_rs
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TheirAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

# Older torch does not substitute it.
HOSTNAME = " ${hostname}" if "hostname" in inspect.getsource(TheirAgent._start_workers) else ""
PRINTS = 'echo "out $RANK"; echo "err $RANK" >&2; echo "loss $RANK"'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch leaves its files to be closed
@pytest.mark.parametrize(
    ("template", "shown_ranks"),
    [(None, None), (f"<${{role_name}} ${{rank}} ${{local_rank}}{HOSTNAME}>", None), (None, {1})],
)
def test_logs_are_those_of_torch(
    agent_of: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    template: str | None,
    shown_ranks: set[int] | None,
) -> None:
    seen = []
    for cls in (TheirAgent, elastic_rs.LocalElasticAgent):
        folder = tmp_path / cls.__module__
        options: dict[str, Any] = {}
        if "duplicate_stdout_filters" in WorkerSpec.__dataclass_fields__:
            options = {"duplicate_stdout_filters": ["loss"], "duplicate_stderr_filters": ["err"]}
        agent = agent_of(
            "sh",
            "-c",
            PRINTS,
            nproc=2,
            cls=cls,
            logs=DefaultLogsSpecs(
                log_dir=str(folder),
                tee={0: Std.ALL, 1: Std.OUT},
                redirects={1: Std.ERR},
                local_ranks_filter=shown_ranks,
            ),
            backend="static",
            log_line_prefix_template=template,
            spec=options,
        )
        capfd.readouterr()
        agent.run()
        shown = capfd.readouterr()
        lines = [sorted(stream.splitlines()) for stream in shown]
        files = {
            str(file.relative_to(next(folder.iterdir()))): sorted(file.read_text().split("\n"))
            for file in folder.rglob("*.log")
        }
        seen.append((files, lines))
    assert seen[0] == seen[1]
    assert "attempt_0/0/stdout.log" in seen[0][0]


def test_teed_lines_go_to_python_s_streams(agent_of: Any, capfd: pytest.CaptureFixture[str]) -> None:
    # As with PyTorch's agent: notebooks replace the streams, and programs redirect them.
    script = "echo out $RANK; echo err $RANK >&2; head -c 300000 /dev/zero | tr '\\0' x; echo"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        agent_of("sh", "-c", script, nproc=2, logs=DefaultLogsSpecs(tee=Std.ALL)).run()
    assert sorted(out.getvalue().split("\n")) == [
        "",
        *(f"[trainer{i}]:{text}" for i in (0, 1) for text in ("out " + str(i), "x" * 300_000)),
    ]
    assert sorted(err.getvalue().split("\n")) == ["", "[trainer0]:err 0", "[trainer1]:err 1"]
    assert capfd.readouterr() == ("", "")


def test_a_closed_stream_stops_no_worker(agent_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed):
        result = agent_of("seq", "1000000", logs=DefaultLogsSpecs(tee=Std.OUT)).run()
    assert not result.is_failed()
    assert "no longer shown" in caplog.text


def test_logs_are_kept_by_generation(agent_of: Any, tmp_path: Path) -> None:
    agent_of(
        "sh",
        "-c",
        "echo $TORCHELASTIC_RESTART_COUNT; exit $((2 - TORCHELASTIC_RESTART_COUNT))",
        restarts=2,
        logs=DefaultLogsSpecs(log_dir=str(tmp_path / "kept"), redirects=Std.ALL),
    ).run()
    kept = {path.parts[-3]: path.read_text() for path in (tmp_path / "kept").rglob("stdout.log")}
    assert kept == {"attempt_0": "0\n", "attempt_1": "1\n", "attempt_2": "2\n"}


def test_a_user_s_logs_specs_decide_where_logs_go(agent_of: Any, tmp_path: Path) -> None:
    class Mine(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            paths = {i: f"{tmp_path}/mine-{env['RANK']}" for i, env in envs.items()}
            files: Any = {}
            if "filtered_stdout" in LogsDest.__dataclass_fields__:
                files = {"filtered_stdout": "", "filtered_stderr": ""}
            return LogsDest(paths, paths, {}, {}, dict.fromkeys(envs, os.devnull), **files)

        @property
        def root_log_dir(self) -> str:
            return str(tmp_path)

    agent_of("sh", "-c", "echo out; echo err >&2", nproc=2, logs=Mine()).run()
    assert [sorted((tmp_path / f"mine-{i}").read_text().split()) for i in (0, 1)] == [["err", "out"]] * 2


@pytest.mark.parametrize(
    ("script", "redirects", "kept"), [("true", 0, False), ("echo x", 3, True), ("exit 1", 0, True)]
)
def test_a_default_log_folder_is_removed_if_it_has_no_logs(
    agent_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, redirects: int, *, kept: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    agent_of("sh", "-c", script, logs=DefaultLogsSpecs(redirects=Std(redirects))).run()
    assert bool(list((tmp_path / "tmp").glob("torchelastic_*"))) == kept


def test_a_folder_that_a_user_has_chosen_is_kept(
    agent_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent_of("true", logs=DefaultLogsSpecs(log_dir=str(tmp_path / "torchelastic_of_mine"))).run()
    assert (tmp_path / "torchelastic_of_mine").is_dir()
