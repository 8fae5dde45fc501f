"""``elastic_rs._logging``: which records are shown, and that those of the core look as Python's do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

RECORDS = """
import logging
from elastic_rs._logging import show_logs_if_asked
if {asks}:
    show_logs_if_asked()
for name in ("elastic_rs.run", "elastic_rs.job"):
    log = logging.getLogger(name)
    log.debug("a %d", 1)
    log.info("b %s of %d", "x", 2)
    log.warning("100%")
"""
# Up to Python 3.12 the thread that first imports `threading` is its main thread. It must not be one of the core's.
LAUNCHER = """
import sys
from elastic_rs import run
code = run.main(["--standalone", "--nproc-per-node=1", "--no-python", "true"])
import threading
assert threading.current_thread() is threading.main_thread()
sys.exit(code)
"""
HEAD = "[elastic_rs] N:N:N.N"
INFO, WARNING = [f"{HEAD} INFO run: b x of N"], [f"{HEAD} WARNING run: N%"]
JOB_INFO, JOB_WARNING = [f"{HEAD} INFO job: b x of N"], [f"{HEAD} WARNING job: N%"]


def python(code: str, level: str) -> list[str]:
    """Return the program's lines of standard error without times and pids."""
    env = os.environ | {"ELASTIC_RS_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, check=True, timeout=60
    )
    text = re.sub(r"[\da-f]{8}(-[\da-f]+){4}", "RUN", done.stderr)
    return re.sub(r"\d+", "N", text).splitlines()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("", WARNING + JOB_INFO + JOB_WARNING),
        ("info", INFO + WARNING + JOB_INFO + JOB_WARNING),
        ("WARNING", WARNING + JOB_WARNING),
        ("error", []),
        ("critical", []),
    ],
)
def test_a_level_is_asked_for_by_a_variable(level: str, expected: list[str]) -> None:
    assert python(RECORDS.replace("{asks}", "True"), level) == expected


@pytest.mark.parametrize("level", ["", "info", "junk"])
def test_a_process_that_does_not_ask_shows_what_logging_shows(level: str) -> None:
    assert python(RECORDS.replace("{asks}", "False"), level) == ["N%", "N%"]


def test_a_level_that_does_not_exist_is_named() -> None:
    lines = python(RECORDS.replace("{asks}", "True"), "junk")
    assert lines == ["ELASTIC_RS_LOG is `junk`, must be one of debug, info, warning, error: ignored", "N%", "N%"]


def test_a_record_shows_its_exception() -> None:
    code = (
        "import logging; from elastic_rs._logging import show_logs_if_asked; show_logs_if_asked()\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('elastic_rs.run').warning('no', exc_info=True)"
    )
    lines = python(code, "")
    assert lines[0] == f"{HEAD} WARNING run: no"
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_lines_do_not_begin_with_a_run_id_that_was_drawn() -> None:
    lines = python(
        "import logging; from elastic_rs._logging import draw_run_id, show_logs_if_asked; show_logs_if_asked()\n"
        "drawn = draw_run_id()\n"
        "for run_id in (drawn, 'a-job'): logging.getLogger('elastic_rs.agent').warning('[%s] a text', run_id)\n",
        "info",
    )
    assert [line.partition("WARNING ")[2] for line in lines] == ["agent: a text", "agent: [a-job] a text"]


@pytest.mark.parametrize("level", ["", "info"])
def test_records_of_the_core_go_the_same_way(level: str) -> None:
    lines = python(LAUNCHER, level)
    assert all(line.startswith(HEAD) for line in lines)
    assert any("INFO agent: " in line for line in lines) == (level == "info")
