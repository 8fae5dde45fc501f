"""Measure what a token costs: a coordinator with many nodes, with and without, in turn.

    python benches/protection.py [--quick]

Nodes are real sessions on loopback (examples/rendezvous_load.rs), all in one process; the host is another one. Both
ends of all connections share this machine's cores. Measured are the time to connect all nodes (with the start of their
process), a first round, rounds joined again, the same beside strangers, how long a node of another job takes to connect
beside them, and the host's memory per node.
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
from contextlib import contextmanager
from pathlib import Path

from measuring import RESULTS, keep, machine
from rendezvous_scale import LOAD, ROOT, Peer, host, nodes, usage

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


def measure(count: int, repetitions: int, many: int) -> dict[str, float]:
    """Return times in milliseconds, and KiB per node."""
    with host() as (peer, port):
        _, empty = usage(peer.process.pid)
        began = time.monotonic()
        with nodes(port, 0, count, count) as sessions:
            connected = time.monotonic()
            rounds = [sessions.times("join") for _ in range(repetitions + 1)]
            _, resident = usage(peer.process.pid)
            with strangers(port, many):
                beside = [sessions.times("join") for _ in range(repetitions)]
                entered = []
                for number in range(repetitions):
                    began_at = time.monotonic()
                    with Peer(LOAD, "nodes", port, f"newcomer{number}", 0, 1, 1) as newcomer:
                        newcomer.answer()
                        entered.append(time.monotonic() - began_at)
    first, *again = [(end - start) / 1e6 for start, end in rounds]
    return {
        "connect_ms": (connected - began) * 1000,
        "first_ms": first,
        "again_ms": statistics.median(again),
        "beside_strangers_ms": statistics.median((end - start) / 1e6 for start, end in beside),
        "newcomer_beside_strangers_ms": statistics.median(entered) * 1000,
        "newcomer_at_most_ms": max(entered) * 1000,
        "kib_per_node": (resident - empty) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few nodes and repetitions, to check that it works")
    quick = parser.parse_args().quick
    subprocess.run(["cargo", "build", "--quiet", "--release", "--example", "rendezvous_load"], cwd=ROOT, check=True)
    count, turns, repetitions, many = (64, 1, 3, 50) if quick else (1000, 3, 10, 1000)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "token": []}
    with tempfile.TemporaryDirectory(prefix="elastic_rs-bench-") as folder:
        path = Path(folder, "token")
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        for _ in range(turns):
            for kind, results in found.items():
                os.environ.pop("ELASTIC_RS_TOKEN_FILE", None)
                if kind == "token":
                    os.environ["ELASTIC_RS_TOKEN_FILE"] = str(path)
                results.append(measure(count, repetitions, many))
    print(f"{count} nodes; {many} strangers")
    for what in found["plain"][0]:
        plain, token = (statistics.median(one[what] for one in found[kind]) for kind in found)
        print(f"{what:20} plain {plain:9.1f}   token {token:9.1f}   {token / plain if plain else 0:5.2f} times")
    keep({"machine": machine(), "nodes": count, "strangers": many, **found}, OUTPUT)


if __name__ == "__main__":
    main()
