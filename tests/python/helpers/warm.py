"""Agents whose workers are started warm, or cold to compare them."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_rs._warm import _plan

if TYPE_CHECKING:
    from helpers.procs import Job, Process

SCRIPTS = Path(__file__).parents[1] / "scripts"
DUMP = SCRIPTS / "dump.py"
COLD = "-"
MAIN = _plan.CODE.encode()
# A module that loads quickly. The tests are about how workers start, not about the imports.
WARM = "json"


def run(
    job: Job,
    modules: str,
    *command: str | Path,
    workers: int = 1,
    restarts: int = 0,
    logs: Path | str = "-",
    env: dict[str, str] | None = None,
) -> Process:
    """Start an agent whose workers execute ``python -u COMMAND``, with a template that imports the modules."""
    agent = [sys.executable, str(SCRIPTS / "warm_agent.py"), modules, str(workers), str(restarts), str(logs)]
    return job.start([*agent, sys.executable, "-u", *map(str, command)], env={"PYTHONUNBUFFERED": "", **(env or {})})


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def template_of(job: Job) -> int:
    """Return the process id of the job's template."""
    found = []
    for pid in job.pids():
        process = Path(f"/proc/{pid}")
        # Guards of its workers show the same command, but have another process name.
        if MAIN in (process / "cmdline").read_bytes().split(b"\0") and "guard" not in (process / "comm").read_text():
            found.append(pid)
    assert len(found) == 1
    return found[0]


def dumped(job: Job, modules: str, *command: str | Path, at: int, file: Path) -> dict[str, Any]:
    """Run a worker that dumps what it finds. The dump's file name is inserted into the command at position ``at``."""
    agent = run(job, modules, *command[:at], file, *command[at:])
    assert agent.wait() == 0, agent.tail()
    text = file.read_text()
    text = text.replace(json.loads(text)["env"]["MASTER_PORT"], "PORT")
    return json.loads(re.sub(r"object at 0x[0-9a-f]+", "object", text.replace(str(file), "FILE")))


def said(job: Job, modules: str, *command: str | Path, logs: Path, env: dict[str, str] | None = None) -> list[str]:
    """Return the stdout and stderr of a worker that ends well."""
    agent = run(job, modules, *command, logs=logs, env=env)
    assert agent.wait() == 0, agent.tail()
    output = [(logs / f"0-0.{name}").read_text() for name in ("stdout", "stderr")]
    return [re.sub(r"object at 0x[0-9a-f]+", "object", text) for text in output]
