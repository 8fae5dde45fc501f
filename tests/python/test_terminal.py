"""What an agent says on a terminal, and where there is none: colours, who is who, and what a recovery has cost."""

from __future__ import annotations

import io
import logging
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _logging
from elastic_rs._terminal import RED, paint, shows_colours

if TYPE_CHECKING:
    from helpers.procs import Job

SCRIPTS = Path(__file__).parent / "scripts"
ON_TERMINAL = [sys.executable, str(SCRIPTS / "on_terminal.py")]
RUN = [sys.executable, "-m", "elastic_rs.run", "--standalone"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=rust-c10d", "--rdzv-endpoint=127.0.0.1:0"]
OPTIONS = ["--nproc-per-node=2", "--max-restarts=1"]
# Rank 1 of the first round kills itself.
WORKER = [str(SCRIPTS / "killed_once.py")]
QUIET = {"ELASTIC_RS_LOG": "", "OMP_NUM_THREADS": "1", "TERM": "xterm"}

ESCAPES = re.compile(r"\x1b\[\d*m")
WHO = re.compile(
    r"INFO job: (?:\[[\w-]+\] )?round 1, node rank 0 of 1 \(\S+:\d+\), by way of \S+:\d+, which this process "
    r"hosts: \S+ runs as rank 0 to 1 of 2, role default, restart 0 of 1; pids \d+, \d+$"
)
COST = re.compile(
    r"INFO job: (?:\[[\w-]+\] )?recovered in \d+(\.\d+)? s: \S+ rank 1 SIGKILL; "
    r"detect \d\S*, stop \d\S*, rendezvous \d\S*, start \d\S*; "
    r"1 node, restart 1 of 1$"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "env", "expected"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"TERM": "xterm-256color"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (None, {}, False),
    ],
)
def test_colours_are_for_terminals_whose_person_wants_them(
    stream: io.StringIO | None, env: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert shows_colours(stream) is expected


def test_a_closed_stream_shows_none() -> None:
    closed = io.StringIO()
    closed.close()
    assert not shows_colours(closed)
    assert paint("x", RED, on=False) == "x"
    assert not paint("", RED, on=True)


def test_a_log_in_a_file_has_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    handler = _logging._Stderr()
    handler.setFormatter(_logging._Short())
    written = {}
    record = logging.LogRecord("elastic_rs.agent", logging.WARNING, "", 0, "it %s", ("failed",), None)
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        handler.emit(record)
        written[kind] = stream.getvalue()
    assert "\x1b" not in written[io.StringIO]
    assert written[Terminal] != written[io.StringIO]
    assert ESCAPES.sub("", written[Terminal]) == written[io.StringIO]
    assert written[io.StringIO].endswith(" WARNING agent: it failed\n")


def test_two_threads_that_set_up_the_log_add_one_handler() -> None:
    class Meanwhile(logging.Logger):
        """Another thread adds its handler at the same moment."""

        raced = False

        def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - of logging
            if not self.raced:
                self.raced = True
                _logging._add_handler(self)
            super().addHandler(hdlr)

    logger = Meanwhile("elastic_rs")
    handler = _logging._add_handler(logger)
    assert logger.handlers == [handler]
    again = _logging._add_handler(logger)
    assert logger.handlers == [again]


@pytest.mark.parametrize("launcher", [RUN, pytest.param(TORCHRUN, marks=pytest.mark.torchrun)], ids=["run", "torchrun"])
def test_on_a_terminal_the_agent_prints_ranks_and_the_cost_of_a_recovery(job: Job, launcher: list[str]) -> None:
    output = job.start([*ON_TERMINAL, *launcher, *OPTIONS, *WORKER], env=QUIET)
    assert output.wait() == 0
    lines = [line.rstrip("\r") for line in output.lines]
    plain = [ESCAPES.sub("", line) for line in lines]
    (who,) = [line for line, bare in zip(lines, plain, strict=True) if WHO.search(bare)]
    (cost,) = [line for line, bare in zip(lines, plain, strict=True) if COST.search(bare)]
    assert "\x1b[" in who
    assert "\x1b[" in cost
    assert any("\x1b[33mWARNING\x1b[0m agent: " in line for line in lines)
    # What workers print is not touched.
    assert plain.count("a worker's line") == lines.count("a worker's line") == 2


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_a_terminal_without_colours_gets_the_same_text(job: Job, env: dict[str, str]) -> None:
    output = job.start([*ON_TERMINAL, *RUN, *OPTIONS, *WORKER], env={**QUIET, **env})
    assert output.wait() == 0
    lines = [line.rstrip("\r") for line in output.lines]
    assert not any("\x1b" in line for line in lines)
    assert sum(bool(WHO.search(line)) for line in lines) == 1
    assert sum(bool(COST.search(line)) for line in lines) == 1


def test_without_a_terminal_only_the_recovery_is_printed(job: Job) -> None:
    output = job.start([*RUN, *OPTIONS, *WORKER], env=QUIET)
    assert output.wait() == 0
    assert not any("\x1b" in line for line in output.lines)
    assert not any("INFO job" in line and "runs as rank" in line for line in output.lines)
    assert sum(bool(COST.search(line)) for line in output.lines) == 1


def test_a_recovery_is_logged_once_the_workers_have_imported(job: Job) -> None:
    output = job.start([*RUN, *OPTIONS, str(SCRIPTS / "connects.py")], env=QUIET)
    output.line(r"rank 1 SIGKILL; .*, start \d\S*, import \d\S*; 1 node, restart 1 of 1$")
    output.signal(signal.SIGTERM)
    output.wait()
    assert sum(" recovered in " in line for line in output.lines) == 1


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colours", "NO_COLOR"])
def test_prefixes_of_lines_have_a_colour_for_each_worker(job: Job, tmp_path: Path, env: dict[str, str]) -> None:
    tee = [*OPTIONS, "--tee=3", f"--log-dir={tmp_path / 'logs'}", *WORKER]
    output = job.start([*ON_TERMINAL, *RUN, *tee], env={**QUIET, **env})
    assert output.wait() == 0
    shown = [line.rstrip("\r") for line in output.lines if line.endswith("a worker's line\r")]
    plain = [f"[default{rank}]:a worker's line" for rank in range(2)]
    assert sorted(ESCAPES.sub("", line) for line in shown) == plain
    if env:
        assert sorted(shown) == plain
    else:
        assert sorted(shown) == [
            "\x1b[33m[default1]:\x1b[0ma worker's line",
            "\x1b[36m[default0]:\x1b[0ma worker's line",
        ]
    logs = list((tmp_path / "logs").rglob("*.log"))
    assert logs
    assert not any(b"\x1b" in log.read_bytes() for log in logs)
    piped = job.start([*RUN, *tee], env=QUIET)
    assert piped.wait() == 0
    assert sorted(line for line in piped.lines if "worker's line" in line) == plain


def test_with_a_log_ranks_are_printed_once(job: Job) -> None:
    output = job.start([*ON_TERMINAL, *RUN, *OPTIONS, *WORKER], env={**QUIET, "ELASTIC_RS_LOG": "info"})
    assert output.wait() == 0
    lines = [ESCAPES.sub("", line.rstrip("\r")) for line in output.lines]
    assert sum(bool(WHO.search(line)) for line in lines) == 1
    assert sum("round 1" in line and "runs as rank" in line for line in lines) == 1
    silent = job.start([*RUN, *OPTIONS, *WORKER], env={**QUIET, "ELASTIC_RS_LOG": "error"})
    assert silent.wait() == 0
    assert not any("[elastic_rs]" in line for line in silent.lines), silent.tail()


def test_the_final_report_is_in_colours_on_a_terminal_alone(job: Job) -> None:
    command = [*RUN, "--nproc-per-node=1", "--no-python", "false"]
    shown = job.start([*ON_TERMINAL, *command], env=QUIET)
    plain = job.start(command, env=QUIET)
    assert (shown.wait(), plain.wait()) == (1, 1)
    assert any("\x1b[31mfalse FAILED\x1b[0m" in line for line in shown.lines), shown.tail()
    assert any(line == "false FAILED" for line in plain.lines), plain.tail()
