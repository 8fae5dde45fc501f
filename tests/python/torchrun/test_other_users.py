"""Processes of other users, on the machine of the workers' store."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from helpers.workers import place

from .conftest import Start

pytestmark = [pytest.mark.torchrun]

# A user that no process has.
OTHER_USER = 65533
LIMIT_S = 60.0
# What a visitor runs: VALIDATE and PING, and at most four bytes of an answer. Another user cannot read this
# environment's Python, and bash speaks TCP.
VISIT = r"""
exec 3<>/dev/tcp/$0/$1 || exit 3
printf '\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04' >&3
head -c 4 <&3 | od -An -tx1
"""


def visit(host: str, port: int, uid: int) -> str:
    """Return what the store answers a process of that user, in hexadecimal digits."""
    done = subprocess.run(
        ["bash", "-c", VISIT, host, str(port)],
        check=False,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode != 3, done.stderr
    return done.stdout.decode().replace(" ", "").strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("conf", ["", ",store_peers=any"])
def test_another_users_process_cannot_reach_the_workers_store(start: Start, tmp_path: Path, conf: str) -> None:
    done = tmp_path / "done"
    torch = ["--torch"] if not conf else []
    settings = f"last_call_timeout=1{conf}"
    nodes = [start(number, *torch, "--until", done, nnodes="2", conf=settings) for number in (2, 3)]
    for node in nodes:
        node.line(r"SUM rank=\d world=2 ")
    host, _, port = place(nodes[0], 2)["master"].partition(":")
    expected = "01020304" if conf else ""
    for _ in range(3):
        assert visit(host, int(port), OTHER_USER) == expected
        assert visit(host, int(port), 0) == "01020304"
    if not conf:
        serving = nodes[0] if host == "127.0.0.2" else nodes[1]
        result = serving.line(r"connection rejected .*cause=\"?other_user\"? .*").group()
        assert f"uid {OTHER_USER} is neither this process's user (uid 0) nor root" in result
        assert "--rdzv-conf store_peers=any" in result
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0, "the store has ended with its job"
