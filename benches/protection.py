"""Measure what a token costs: a coordinator with many nodes, with and without, in turn.

    python benches/protection.py [--quick]

Nodes are real sessions on loopback (examples/rendezvous_load.rs), all in one process; the host is another one. Both
ends of all connections share this machine's cores. Measured are the time to connect all nodes (with the start of their
process), a first round, rounds joined again, the same beside strangers, how long a node of another job takes to connect
beside them, and the host's memory per node. Rounds are joined again with and without a token by turns.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measuring import RESULTS, keep, machine
from rendezvous_scale import LOAD, ROOT, Peer, host, nodes, usage

TOKEN_FILE = "ELASTIC_RS_TOKEN_FILE"
OUTPUT = RESULTS / "protection.json"
STRANGERS = (b"\x16\x03", b"\x16\x03\x01\x00\x05hello", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n")
"""Half of them begin a handshake and say no more."""


@contextmanager
def strangers(port: int, count: int) -> Iterator[None]:
    """Have this many strangers connected at any time, each for as long as it is let."""
    over = threading.Event()

    def stranger(number: int) -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                    connection.sendall(STRANGERS[number % len(STRANGERS)])
                    connection.settimeout(1.0)
                    connection.recv(1)
            except OSError:
                pass
            over.wait(0.5)

    threads = [threading.Thread(target=stranger, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def protected(token: Path | None) -> Iterator[None]:
    """Let the processes that are started have this token."""
    os.environ.pop(TOKEN_FILE, None)
    if token:
        os.environ[TOKEN_FILE] = str(token)
    try:
        yield
    finally:
        os.environ.pop(TOKEN_FILE, None)


class Job:
    """A coordinator, and all nodes of its job."""

    def __init__(self, token: Path | None, count: int, until: ExitStack) -> None:
        self.token = token
        self.count = count
        with protected(token):
            self.host, self.port = until.enter_context(host())
            _, self.empty = usage(self.host.process.pid)
            began = time.monotonic()
            self.nodes = until.enter_context(nodes(self.port, 0, count, count))
            self.connect_ms = (time.monotonic() - began) * 1000
        self.first_ms = self.join()
        self.again: list[float] = []

    def join(self) -> float:
        began, ended = self.nodes.times("join")
        return (ended - began) / 1e6

    def enter(self, number: int) -> float:
        """Return how long a node of another job takes to connect."""
        began = time.monotonic()
        with protected(self.token), Peer(LOAD, "nodes", self.port, f"newcomer{number}", 0, 1, 1) as newcomer:
            newcomer.answer()
            return time.monotonic() - began

    def measured(self, repetitions: int, many: int) -> dict[str, float]:
        """Return times in milliseconds, and KiB per node."""
        _, resident = usage(self.host.process.pid)
        alone, beside, entered = [], [], []
        for _ in range(3):
            alone += [self.join() for _ in range(repetitions)]
            with strangers(self.port, many):
                beside += [self.join() for _ in range(repetitions)]
                entered += [self.enter(number) for number in range(repetitions)]
        return {
            "connect_ms": self.connect_ms,
            "first_ms": self.first_ms,
            "again_ms": statistics.median(self.again),
            "before_strangers_ms": statistics.median(alone),
            "beside_strangers_ms": statistics.median(beside),
            "newcomer_beside_strangers_ms": statistics.median(entered) * 1000,
            "newcomer_at_most_ms": max(entered) * 1000,
            "kib_per_node": (resident - self.empty) / self.count,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few nodes and repetitions, to check that it works")
    quick = parser.parse_args().quick
    subprocess.run(["cargo", "build", "--quiet", "--release", "--example", "rendezvous_load"], cwd=ROOT, check=True)
    count, turns, rounds, repetitions, many = (64, 1, 3, 3, 50) if quick else (1000, 5, 50, 10, 1000)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "token": []}
    with tempfile.TemporaryDirectory(prefix="elastic_rs-bench-") as folder:
        path = Path(folder, "token")
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        for _ in range(turns):
            with ExitStack() as until:
                jobs = {kind: Job(token, count, until) for kind, token in (("plain", None), ("token", path))}
                # The machine's speed changes from second to second. By turns, such changes affect both jobs.
                for _ in range(rounds):
                    for job in jobs.values():
                        job.again.append(job.join())
                for kind, job in jobs.items():
                    found[kind].append(job.measured(repetitions, many))
    print(f"{count} nodes; {many} strangers")
    for what in found["plain"][0]:
        plain, token = (statistics.median(one[what] for one in found[kind]) for kind in found)
        print(f"{what:28} plain {plain:9.1f}   token {token:9.1f}   {token / plain if plain else 0:5.2f} times")
    keep({"machine": machine(), "nodes": count, "strangers": many, **found}, OUTPUT)


if __name__ == "__main__":
    main()
