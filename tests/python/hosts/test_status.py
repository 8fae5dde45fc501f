"""``elastic-rs status`` of a job whose hosts a driver has found: it says why a host is not used."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _cli
from helpers.observe import ask
from helpers.stores import until
from helpers.workers import place

from .conftest import FAST

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Process
    from ssh_server import SshServer

    from .conftest import Drive, Listing

FAILS = """
import os, pathlib, sys, time
bad, done = map(pathlib.Path, sys.argv[1:])
host = os.environ["ELASTIC_RS_HOST"]
os.write(1, f"WORKER rank={os.environ['RANK']} world={os.environ['WORLD_SIZE']} pid={os.getpid()}\\n".encode())
while not done.exists():
    if bad.exists() and host == bad.read_text():
        sys.exit(3)
    time.sleep(0.05)
"""


@pytest.fixture
def token(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job's token, which observers need too."""
    file = tmp_path / "token"
    assert _cli.main(["token", "new", "-o", str(file)]) == 0
    return {"ELASTIC_RS_TOKEN_FILE": str(file)}


def endpoint_of(driver: Process) -> str:
    return "127.0.0.1:" + driver.line(r"this process hosts the coordinator at port (\d+)")[1]


def test_status_names_the_hosts_that_are_not_used_with_reason_time_and_what_to_do(
    server: SshServer, drive: Drive, listing: Listing, tmp_path: Path, token: dict[str, str]
) -> None:
    script, bad, done = (tmp_path / name for name in ("fails.py", "bad", "done"))
    script.write_text(FAILS)
    listing.write("node0:1", "node1:1", "node2:1")
    flags = ("--min-np=1", "--max-restarts=9", "--host-failures=1", "--rdzv-id=job")
    ssh = f"--ssh={server.command(ports={'node3': 1})}"
    driver = drive(*FAST, listing.flag, *flags, ssh, script=script, worker=(bad, done), **token)
    for host in ("node0", "node1", "node2"):
        place(driver, 3, host=host)
    mark = driver.mark()
    bad.write_text("node1")
    driver.line(r"host `node1` is out for the job: the first failure of a round was there", since=mark)
    listing.write("node0:1", "node1:1", "node3:1")
    driver.line(r"host `node3`: ssh cannot connect: .*Connection refused; it is out for the job", since=mark)
    driver.line(r"the agent on node2:1 has left", since=mark)
    place(driver, 1, host="node0", since=mark)
    expected = [
        r"unused  node1 for the job: the first failure of a round was there \(host_failures\); look for a fault of the "
        r"host, or raise host_failures",
        r"unused  node3 for the job: ssh cannot connect: .*Connection refused; mend it for the next job; .*",
        r"unused  node2 until discovery lists it: discovery does not list it any longer; nothing if you took it .*",
    ]
    endpoint = endpoint_of(driver)

    def shown() -> list[str]:
        seen = ask("status", endpoint, "--run-id=job", env=token)
        assert seen.returncode in (0, 1), seen
        return [line for line in seen.stdout.splitlines() if line.startswith("unused")]

    def agrees() -> bool:
        lines = shown()
        return len(lines) == 3 and all(map(re.fullmatch, expected, lines))

    until("status names the three hosts", agrees)
    told = json.loads(ask("status", endpoint, "--run-id=job", "--json", env=token).stdout)["state"]
    reasons = [(host["host"], host["reason"], host["left_ms"]) for host in told["unused_hosts"]]
    assert reasons == [("node1", "failed_first", None), ("node3", "agents_failed", None), ("node2", "not_listed", None)]
    assert told["unused_hosts_more"] == 0
    # A host that discovery lists again is used again.
    mark = driver.mark()
    listing.write("node0:1", "node1:1", "node2:1", "node3:1")
    place(driver, 2, host="node2", since=mark)
    until("status names two hosts", lambda: len(shown()) == 2)
    done.touch()
    assert driver.wait() == 0


def test_status_says_why_no_host_has_come_yet(
    server: SshServer, drive: Drive, tmp_path: Path, token: dict[str, str]
) -> None:
    flags = ("--host-failures=0", "--rdzv-id=job", f"--ssh={server.command(ports={'node0': 1})}")
    driver = drive("-H", "node0:1", *FAST, *flags, worker=("--until", tmp_path / "never"), **token)
    driver.line(r"host `node0`: ssh cannot connect: .*Connection refused; next try in")
    endpoint = endpoint_of(driver)

    def explains() -> bool:
        seen = ask("status", endpoint, "--run-id=job", env=token)
        assert seen.returncode == 3, seen
        return bool(
            re.search(r"; hosts that its driver does not use: `node0` for \S+ s: .*Connection refused", seen.stderr)
        )

    until("status says why there is no node", explains)
    # Whoever has the token of another run hears of no host.
    other = ask("status", endpoint, "--run-id=other", env=token)
    assert (other.returncode, "node0" in other.stderr) == (3, False), other
    driver.signal(signal.SIGTERM)
    assert driver.wait() == 128 + signal.SIGTERM
