"""Measure the rendezvous on an etcd cluster: joins, cost at rest, losses of members and nodes, and errors.

    ETCD=/path/to/etcd python benches/rust_etcd.py [--quick] [--python-etcd FOLDER]

Three members run on this machine, with their data in memory. Joins and traffic are those of real sessions, many per
process (examples/rendezvous_load.rs). rust-c10d is measured by the same program in the same run. So are PyTorch's
`etcd` and `etcd-v2`, if the folder has the packages that they need (`pip install --target FOLDER python-etcd==0.4.5
'urllib3<2' dnspython`) and this etcd has the API v2 (3.5 at most); their nodes are threads of one process. Losses are
those of rust_etcd_faults.py. One line per figure, with its target, is the table of docs/etcd.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rust_etcd_faults
from measuring import RESULTS, keep, machine
from rendezvous_scale import LOAD, Peer, Relay, host, lose_ms
from rust_etcd_faults import LEASE_S, Cluster

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = RESULTS / "etcd.json"


class Table:
    """The figures, printed as they are measured."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        print(f"{'':58}{'median':>10}{'worst':>10}{'target':>10}")

    def add(self, name: str, values: list[float], unit: str, target: float | None = None) -> None:
        middle, worst = statistics.median(values), max(values)
        shown = "" if target is None else f"{target:g}"
        print(f"{name:58}{middle:>10.3g}{worst:>10.3g}{shown:>10} {unit}", flush=True)
        self.figures[name] = {"values": values, "unit": unit, "target": target}


# --- sessions --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sessions(where: object, run_id: str, first: int, count: int, world: int) -> Iterator[Peer]:
    """Open the sessions of nodes. ``where``: a port for rust-c10d, or an endpoint of etcd."""
    with Peer(LOAD, "nodes", where, run_id, first, count, world) as peer:
        peer.answer()
        yield peer


def joins_ms(where: object, count: int, repetitions: int) -> list[float]:
    with sessions(where, f"joins{count}", 0, count, count) as peer:
        times = [peer.times("join") for _ in range(repetitions)]
    return [(ended - began) / 1e6 for began, ended in times]


def transactions(cluster: Cluster, count: int) -> float:
    """Return the transactions per node of a first join of so many nodes."""

    def total() -> float:
        return cluster.count("grpc_server_handled_total", grpc_method="Txn")

    with sessions(cluster.endpoint, f"transactions{count}", 0, count, count) as peer:
        before = total()
        peer.times("join")
        return (total() - before) / count


def loss_ms(cluster: Cluster, count: int, how: str) -> float:
    """Return the time from the end of one node until the last of the others has been told."""
    run_id = f"loss{how}{time.monotonic_ns()}"
    with (
        sessions(cluster.endpoint, run_id, 0, count - 1, count) as others,
        sessions(cluster.endpoint, run_id, count - 1, 1, count) as lost,
    ):
        return lose_ms(others, lost, how)


def at_rest(cluster: Cluster, count: int, seconds: float) -> dict[str, float]:
    """Return what a node asks and how many bytes pass, per second, while nothing happens."""
    relay = Relay(cluster.members[0].client)
    with sessions(f"127.0.0.1:{relay.port}", "rest", 0, count, count) as peer:
        peer.times("join")
        time.sleep(2)  # what follows a join is no rest
        before = [requests(cluster), relay.bytes, calls(cluster, "Range"), calls(cluster, "Txn")]
        time.sleep(seconds)
        after = [requests(cluster), relay.bytes, calls(cluster, "Range"), calls(cluster, "Txn")]
    asked, passed, ranges, txns = (late - early for early, late in zip(before, after, strict=True))
    each = count * seconds
    return {"requests": asked / each, "bytes": passed / each, "ranges": ranges, "txns": txns}


def requests(cluster: Cluster) -> float:
    """Return the messages that clients have sent: a stream may have many."""
    return cluster.count("grpc_server_msg_received_total")


def calls(cluster: Cluster, method: str) -> float:
    return cluster.count("grpc_server_handled_total", grpc_method=method)


# PyTorch's nodes: threads of one process, as in rendezvous_scale.py. One handler serves one round.
PYTORCH = """
import json, sys, threading, time
sys.path.append(sys.argv[4])
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
backend, endpoint, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("{}", flush=True)
for run_id in sys.stdin:
    parameters = RendezvousParameters(backend, endpoint, run_id.strip(), count, count, protocol="http")
    handlers = [registry.get_rendezvous_handler(parameters) for _ in range(count)]
    threads = [threading.Thread(target=handler.next_rendezvous) for handler in handlers]
    for thread in threads: thread.start()
    began = time.monotonic_ns()
    for thread in threads: thread.join()
    print(json.dumps({"began": began, "ended": time.monotonic_ns()}), flush=True)
"""


def pytorch_ms(cluster: Cluster, backend: str, count: int, repetitions: int, folder: str) -> list[float]:
    command = (sys.executable, "-c", PYTORCH, backend, cluster.members[0].endpoint, count, folder)
    with Peer(*command) as peer:
        peer.answer()
        times = [peer.times(f"{backend}-{count}-{number}") for number in range(repetitions)]
    return [(ended - began) / 1e6 for began, ended in times]


def joins(table: Table, program: str, repetitions: int, folder: str | None) -> None:
    with Cluster(program) as cluster:
        for count, target in ((8, 100), (64, 1000)):
            took = joins_ms(cluster.endpoint, count, repetitions)
            table.add(f"last join to last release, {count} nodes", took, "ms", target)
            with host() as (_, port):
                table.add("  the same with rust-c10d", joins_ms(port, count, repetitions), "ms")
    if folder is None:
        return
    with Cluster(program, options=["--enable-v2"]) as cluster:
        for backend in ("etcd", "etcd-v2"):
            table.add(f"  8 nodes with PyTorch's {backend}", pytorch_ms(cluster, backend, 8, 4, folder), "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and shorter outages: three minutes")
    parser.add_argument(
        "--python-etcd", metavar="FOLDER", help="measure PyTorch's etcd backends too, with this package"
    )
    args = parser.parse_args()
    program = os.environ.get("ETCD")
    if not program:
        sys.exit("error: there is no etcd: ETCD=/path/to/etcd names one; `make bench` gets one")
    build = ["cargo", "build", "--quiet", "--release", "--example", "rendezvous_load"]
    subprocess.run(build, cwd=ROOT, check=True)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    print(f"etcd {version}, {machine()}\n")
    table, few = Table(), 2 if args.quick else 5
    joins(table, program, 4 if args.quick else 12, args.python_etcd)
    with Cluster(program) as cluster:
        table.add("transactions per node, 64 nodes join", [transactions(cluster, 64) for _ in range(few)], "", 12)
        rest = at_rest(cluster, 8, 15 if args.quick else 60)
        table.add("requests per node at rest", [rest["requests"]], "/s", 0.4)
        table.add("bytes per node at rest, both directions", [rest["bytes"]], "/s", 200)
        table.add("ranges and transactions of all nodes at rest", [rest["ranges"] + rest["txns"]], "", 0)
        for how, target in (("SIGTERM", 100.0), ("SIGKILL", (LEASE_S + 1) * 1000)):
            took = [loss_ms(cluster, 8, how) for _ in range(few if how == "SIGTERM" else 2)]
            table.add(f"a node's {how} until the last of 7 others knows", took, "ms", target)
    rust_etcd_faults.measure(table.add, program, quick=args.quick)
    keep({"machine": machine(), "etcd": version, "figures": table.figures}, OUTPUT)


if __name__ == "__main__":
    main()
