"""Who reads a job without a token: the coordinator's machine, the machines of the job's nodes, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.machines import Lan, Machine
    from helpers.procs import Job

PORT = 29400
LIMIT_S = 120.0
HTTP = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


def said(machine: Machine, *words: str) -> tuple[int, str]:
    """Return the exit code and the output of a Python program on a machine."""
    command = [*machine.inside(), sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("who", ["", "all", "loopback"])
def test_a_machine_without_a_node_of_the_job_reads_nothing_of_it(lan: Lan, job: Job, tmp_path: Path, who: str) -> None:
    first, second, stranger = (lan.machine(name) for name in ("n1", "n2", "n3"))
    env = {"ELASTIC_RS_HTTP": who} if who else {}
    serve = [sys.executable, "-m", "elastic_rs", "store", "serve", f"--host={first.address}", f"--port={PORT}"]
    server = job.start([*first.inside(), *serve], name="serve", env=env)
    endpoint = f"{first.address}:{PORT}"
    flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--nnodes=1", "--no-python"]
    done = tmp_path / "done"
    script = ["sh", "-c", f"echo started; while [ ! -e {done} ]; do sleep 0.05; done"]
    command = [sys.executable, "-m", "elastic_rs.run", *flags, "--rdzv-conf=is_host=0", *script]
    node = job.start([*second.inside(), *command], name="node")
    node.line("started")
    for machine, may in ((first, True), (second, who != "loopback"), (stranger, who == "all")):
        for path in ("metrics", "?run=job"):
            _, text = said(machine, "-c", HTTP, f"http://{endpoint}/{path}")
            assert may != text.startswith("403"), (machine.name, path, text)
        for reader in ("status", "why"):
            _, text = said(machine, "-m", "elastic_rs", reader, endpoint, "--run-id=job")
            refused = "ELASTIC_RS_HTTP=all all there is" in text and "elastic-rs token new" in text
            assert may != refused, (machine.name, reader, text)
    code, text = said(stranger, "-c", HTTP, f"http://{endpoint}/healthz")
    assert (code, text.strip()) == (0, "200")
    done.touch()
    assert node.wait() == 0
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
