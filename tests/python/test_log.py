"""``elastic_rs._log``: a process that has not imported ``logging`` writes the lines that ``logging`` would write."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

RECORDS = """
import sys
from elastic_rs._log import Log, show_logs_if_asked
if {asks}:
    show_logs_if_asked()
for name in ("elastic_rs.run", "elastic_rs.job"):
    log = Log(name)
    log.debug("a %d", 1)
    log.info("b %s of %d", "x", 2)
    log.warning("100%")
    log.debug("not shown", exc_info=True)
sys.exit("logging" in sys.modules)
"""
# Up to Python 3.12 the thread that first imports `threading` is its main thread. It must not be one of the core's.
LAUNCHER = """
import sys
from elastic_rs import run
code = run.main(["--standalone", "--nproc-per-node=1", "--no-python", "true"])
imported = "logging" in sys.modules
import threading
assert threading.current_thread() is threading.main_thread()
sys.exit(code or imported)
"""


def python(code: str, level: str) -> tuple[int, list[str]]:
    """Return whether the program imported ``logging``, and its lines of standard error without times and pids."""
    env = os.environ | {"ELASTIC_RS_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    text = re.sub(r"[\da-f]{8}(-[\da-f]+){4}", "RUN", done.stderr)
    return done.returncode, re.sub(r"\d+", "N", text).splitlines()


@pytest.mark.parametrize("level", ["", "info", "WARNING", "error", "critical", "junk"])
@pytest.mark.parametrize("asks", [True, False], ids=["asked", "not asked"])
def test_records_look_alike_with_and_without_logging(level: str, asks: bool) -> None:
    code = RECORDS.replace("{asks}", str(asks))
    imported, lines = python(code, level)
    assert (1, lines) == python(f"import logging\n{code}", level)
    # `logging` itself knows what no level of ours is.
    assert imported == (asks and level in {"critical", "junk"})
    assert sum("100" in line or "N%" in line for line in lines) == (0 if asks and level in {"error", "critical"} else 2)


def test_a_record_with_an_exception_is_written_by_logging() -> None:
    code = (
        "import sys; from elastic_rs._log import Log, show_logs_if_asked; show_logs_if_asked()\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: Log('elastic_rs.run').warning('no', exc_info=True)\n"
        "sys.exit('logging' in sys.modules)"
    )
    imported, lines = python(code, "")
    assert imported == 1
    assert re.fullmatch(r"\[elastic_rs\] N:N:N\.N WARNING run: no", lines[0])
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("level", ["", "info"])
def test_records_of_the_core_look_alike_with_and_without_logging(level: str) -> None:
    imported, lines = python(LAUNCHER, level)
    assert (1, lines) == python(f"import logging\n{LAUNCHER}", level)
    assert imported == 0
    assert any("INFO agent: " in line for line in lines) == (level == "info")
