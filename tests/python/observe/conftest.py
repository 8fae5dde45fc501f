"""Fixtures of the tests of ``elastic-rs status``, ``why`` and their like."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.workers import place

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process

WORKER = Path(__file__).parents[1] / "scripts" / "worker.py"


@pytest.fixture
def two_nodes(job: Job, port: int, tmp_path: Path) -> Callable[..., list[Process]]:
    """Return what starts two nodes with two workers each, at 127.0.0.2 and 127.0.0.3, and waits until they run."""

    def start(*, env: dict[str, str] | None = None, logs: Path | None = None, conf: str = "") -> list[Process]:
        nodes = []
        for number in (2, 3):
            options = [
                "--nnodes=2",
                "--rdzv-backend=rust-c10d",
                "--nproc-per-node=2",
                "--max-restarts=3",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--local-addr=127.0.0.{number}",
                "--rdzv-id=job",
                f"--rdzv-conf=last_call_timeout=1{conf}",
                *([] if logs is None else [f"--log-dir={logs / f'node{number}'}"]),
            ]
            command = [sys.executable, "-m", "elastic_rs.run", *options, str(WORKER), "--until", str(tmp_path / "done")]
            nodes.append(job.start(command, name=f"node{number}", env=env))
        for node in nodes:
            place(node, 4)
        return nodes

    return start


def answer_once(server: socket.socket, words: bytes) -> None:
    """Answer one who asks, and read until it goes."""
    with server.accept()[0] as asked:
        asked.recv(1 << 16)
        asked.sendall(words)
        asked.shutdown(socket.SHUT_WR)
        while asked.recv(1 << 16):
            pass
