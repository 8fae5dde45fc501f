"""Unusual surroundings of an agent: closed streams, missing temporary folders, an interrupt that is not handled."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.procs import Job

from .test_elastic_run import LAUNCHERS

pytestmark = [pytest.mark.torchrun]

STREAMS = """
import os, sys
streams = [os.readlink(f"/proc/self/fd/{fd}") if os.path.exists(f"/proc/self/fd/{fd}") else "closed" for fd in (0, 1)]
print("printed")
open(sys.argv[1], "w").write(" ".join(streams))
"""


def command(launcher: str, *args: str | Path) -> list[str]:
    by = ["--rdzv-backend=rust-c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [sys.executable, "-m", LAUNCHERS[launcher], *by, *map(str, args)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_closed_streams_are_not_taken_by_sockets(job: Job, tmp_path: Path, launcher: str) -> None:
    script, output = tmp_path / "streams.py", tmp_path / "output"
    script.write_text(STREAMS)
    agent = job.start(["sh", "-c", 'exec "$@" <&- >&-', "sh", *command(launcher, script, output)], name=launcher)
    assert agent.wait() == 0, agent.tail()
    assert output.read_text() == "/dev/null /dev/null"


def test_an_unhandled_interrupt_ends_the_agent(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, signal\nprint('pid', os.getpid(), flush=True)\nsignal.pause()\n")
    agent = job.start(command("elastic-run", "--signals-to-handle=SIGTERM", script), name="elastic-run")
    worker = int(agent.line(r"pid (\d+)")[1])
    agent.signal(signal.SIGINT)
    assert agent.wait() == -signal.SIGINT
    job.until_gone(worker)


@pytest.mark.parametrize("folder", ["/nonexistent", "", "relative"])
def test_a_temporary_folder_is_found_as_python_finds_it(job: Job, tmp_path: Path, folder: str) -> None:
    script = tmp_path / "where.py"
    script.write_text("import os\nprint('file', os.environ['TORCHELASTIC_ERROR_FILE'])\n")
    env = {**os.environ, "TMPDIR": folder}
    agent = job.start(command("elastic-run", script), name="elastic-run", env=env)
    file = agent.line(r"file (\S+)")[1]
    assert agent.wait() == 0
    assert file.startswith("/tmp/torchelastic_")
