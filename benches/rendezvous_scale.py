"""Measure the coordinator with many nodes: rounds, losses, looks, `elastic-rs status`, and bytes, with PyTorch's.

    python benches/rendezvous_scale.py [--quick] [--looks | --list]

Nodes are real sessions on loopback, many per process (examples/rendezvous_load.rs). The host is a separate process. All
nodes join at once, and a round is timed from the last node's join to the last node's release. A relay between nodes and
host counts bytes; it is absent when time is measured. PyTorch's c10d handler is measured through the same relay, with
threads of one process as nodes, for as many nodes as it can serve. Results go to benches/results.
With `--list` a coordinator of its own takes turns with one of three processes that lead and vote (docs/takeover.md).
`ELASTIC_RS_LOAD` names a `rendezvous_load` that is built, such as one of the development profile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plot
from measuring import free_port

ROOT = Path(__file__).resolve().parents[1]
LOAD = os.environ.get("ELASTIC_RS_LOAD") or ROOT / "target/release/examples/rendezvous_load"
RESULTS = ROOT / "benches/results/rendezvous_scale.json"
PLOT = ROOT / "docs/rendezvous-bench.svg"
LIMIT_S = 180.0
LOOKS_SHARED_S = 2.0  # whoever asks for a look within this time gets the last one


class Peer:
    """A process that performs one order per line, and answers each with a line."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        watchdog = threading.Timer(LIMIT_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            sys.exit(f"error: a process ended or did not answer within {LIMIT_S:.0f} s: {self.process.args}")
        return line.strip()

    def times(self, text: str) -> tuple[int, int]:
        self.order(text)
        answer = json.loads(self.answer())
        return answer["began"], answer["ended"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Relay:
    """Passes bytes between clients and a port, and counts them."""

    def __init__(self, port: int) -> None:
        self.bytes = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._to))
            for source, sink in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.bytes += len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


LISTED_S = 1.0  # a list makes a job start half a second later


@contextlib.contextmanager
def host(listed: int = 1) -> Iterator[tuple[Peer, int]]:
    """Start a coordinator, or the processes of a list, the first of which leads."""
    if listed == 1:
        with Peer(LOAD, "serve") as peer:
            yield peer, int(peer.answer())
        return
    ports: set[int] = set()
    while len(ports) < listed:
        ports.add(free_port())
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(LOAD, "serve", endpoints, place)) for place in range(listed)]
        first, *_ = [int(peer.answer()) for peer in peers]
        time.sleep(LISTED_S)
        yield peers[0], first


@contextlib.contextmanager
def nodes(port: int, first: int, count: int, world: int) -> Iterator[Peer]:
    with Peer(LOAD, "nodes", port, "job", first, count, world) as peer:
        peer.answer()
        yield peer


def rounds_ms(count: int, repetitions: int, listed: int = 1) -> list[float]:
    with host(listed) as (_, port), nodes(port, 0, count, count) as peer:
        times = [peer.times("join") for _ in range(repetitions)]
    return [(ended - began) / 1e6 for began, ended in times]


def loss_ms(count: int, how: str) -> float:
    """Return the time from the end of one node until the last of the others is notified."""
    with host() as (_, port), nodes(port, 0, count - 1, count) as others, nodes(port, count - 1, 1, count) as lost:
        return lose_ms(others, lost, how)


def lose_ms(others: Peer, lost: Peer, how: str) -> float:
    """Let all join, end the node that is to be lost, and return the time until the last of the others is notified."""
    others.order("join")
    lost.order("join")
    others.answer()
    lost.answer()
    others.order("await-change")
    if how == "SIGKILL":
        began = time.monotonic_ns()
        lost.process.send_signal(signal.SIGKILL)
    else:  # what an agent does on SIGTERM
        began, _ = lost.times("leave")
    return (json.loads(others.answer())["ended"] - began) / 1e6


def status_ms(count: int, repetitions: int) -> tuple[list[float], int]:
    """Return the times of `elastic-rs status`, and its number of lines."""
    with host() as (_, port), nodes(port, 0, count, count) as peer:
        for _ in range(2):
            peer.times("join")
        took = []
        for _ in range(repetitions):
            command = [Path(sys.executable).with_name("elastic-rs"), "status", f"127.0.0.1:{port}"]
            began = time.monotonic()
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            took.append((time.monotonic() - began) * 1e3)
            if f"{count} nodes" not in shown:
                sys.exit(f"error: status does not name the {count} nodes:\n{shown}")
    return took, len(shown.splitlines())


def looks_ms(count: int, repetitions: int) -> list[float]:
    """Return how long an observer waits for a look at eight ranks of each node."""
    took = []
    with host() as (_, port), nodes(port, 0, count, count) as peer:
        peer.times("join")
        for _ in range(repetitions):
            began, ended = peer.times("look")
            took.append((ended - began) / 1e6)
            time.sleep(LOOKS_SHARED_S)
    return took


def measure_looks(repetitions: int) -> dict[str, Any]:
    count = 64
    took = looks_ms(count, repetitions)
    print("\na look at eight ranks of each node, until the observer has the answer")
    print(f"{count:>6} nodes {statistics.median(took):>23.1f} ms {max(took):>7.1f} ms {1500:>7} ms")
    return {"nodes": count, "ms": took}


def usage(pid: int) -> tuple[float, int]:
    """Return CPU seconds and resident KiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[21]) * 4


def measure_list(repetitions: int, seconds: float) -> None:
    """Let a coordinator of its own take turns with one of a list of three."""
    alone, led = [], []
    for turn in range(2 * repetitions):
        (led if turn % 2 else alone).extend(rounds_ms(1000, 6, 3 if turn % 2 else 1)[1:])
    medians = [statistics.median(took) for took in (alone, led)]
    print(f"a round of 1,000 nodes, {len(alone)} each: alone {medians[0]:.1f} ms, of a list {medians[1]:.1f} ms")
    for listed in (1, 3):
        share, each = at_rest(2, seconds, listed)
        print(f"at rest, of {listed}: {share * 600:.1f} ms of CPU a minute, {each * 2:.0f} KiB more with two nodes")


def at_rest(count: int, seconds: float, listed: int = 1) -> tuple[float, float]:
    """Return the coordinator's share of a core, in percent, and its KiB per node."""
    with host(listed) as (peer, port):
        _, empty = usage(peer.process.pid)
        with nodes(port, 0, count, count) as ours:
            ours.times("join")
            cpu, _ = usage(peer.process.pid)
            time.sleep(seconds)
            cpu_after, resident = usage(peer.process.pid)
    return (cpu_after - cpu) / seconds * 100, (resident - empty) / count


# PyTorch's nodes: threads of one process, each with a handler that is polled for waiting nodes, as by PyTorch's agent.
# Without the variable, a second round of one handler hangs, because it still uses the first round's store.
PYTORCH = """
import json, os, sys, threading, time
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
import torch.distributed as d
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
port, count = int(sys.argv[1]), int(sys.argv[2])
def make(i):
    store = d.TCPStore("127.0.0.1", port)
    backend = C10dRendezvousBackend(store, "job")
    return DynamicRendezvousHandler.from_backend("job", store, backend, count, count, local_addr=f"node{i}")
handlers = [make(i) for i in range(count)]
def every(what):
    threads = [threading.Thread(target=what, args=(h,)) for h in handlers]
    began = time.monotonic_ns()
    for t in threads: t.start()
    for t in threads: t.join()
    print(json.dumps({"began": began, "ended": time.monotonic_ns()}), flush=True)
def rest(h):
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        h.num_nodes_waiting()
        time.sleep(0.1)
print("{}", flush=True)
for line in sys.stdin:
    order, _, seconds = line.strip().partition(" ")
    every((lambda h: h.next_rendezvous()) if order == "join" else rest)
"""
PYTORCH_STORE = (
    "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
    "print(s.port, flush=True); sys.stdin.read()"
)


def traffic(backend: str, count: int, seconds: float) -> dict[str, float]:
    """Return the bytes per node in both directions: of a first join, of a second join, and per second at rest."""
    with contextlib.ExitStack() as stack:
        if backend == "rust-c10d":
            _, port = stack.enter_context(host())
            relay = Relay(port)
            peer = stack.enter_context(Peer(LOAD, "nodes", relay.port, "job", 0, count, count))
        else:
            store = stack.enter_context(Peer(sys.executable, "-c", PYTORCH_STORE))
            relay = Relay(int(store.answer()))
            peer = stack.enter_context(Peer(sys.executable, "-c", PYTORCH, relay.port, count))
        peer.answer()
        marks = [0]  # connecting belongs to the first join
        for order in ("join", "join"):
            peer.times(order)
            if backend == "rust-c10d":
                peer.times("report")
                time.sleep(0.5)  # phases are sent with what else there is to say
            marks.append(relay.bytes)
        if backend == "rust-c10d":
            time.sleep(seconds)
        else:
            peer.times(f"rest {seconds}")
        marks.append(relay.bytes)
    join, again, rest = (after - before for before, after in itertools.pairwise(marks))
    return {"join": join / count, "join again": again / count, "at rest, per second": rest / count / seconds}


def plot_traffic(rows: list[dict[str, Any]]) -> None:
    """Plot bytes per node over the number of nodes."""
    colors = {"c10d": plot.WORSE, "rust-c10d": plot.BETTER}
    series = []
    for backend, color in colors.items():
        of = [row for row in rows if row["backend"] == backend]
        for what in ("join again", "at rest, per second"):
            points = [(row["nodes"], max(row[what], 0.1)) for row in of]
            series.append(plot.Series(f"{backend}, {what.split(',')[0]}", color, points))
    axes = ("nodes", "bytes per node: of a round joined again, and per second at rest")
    plot.write_lines(PLOT, "What a node says and hears", axes, series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few nodes, few repetitions: a minute")
    parser.add_argument("--looks", action="store_true", help="only looks, and no result is kept")
    parser.add_argument("--list", action="store_true", help="only what a list costs, and no result is kept")
    args = parser.parse_args()
    quick = args.quick
    if "ELASTIC_RS_LOAD" not in os.environ:
        build = ["cargo", "build", "--quiet", "--release", "--example", "rendezvous_load"]
        subprocess.run(build, cwd=ROOT, check=True)
    if args.looks:
        measure_looks(10)
        return
    if args.list:
        measure_list(2 if quick else 8, 10.0 if quick else 60.0)
        return
    results: dict[str, list[dict[str, Any]]] = {
        "rounds": [],
        "losses": [],
        "status": [],
        "looks": [],
        "at rest": [],
        "traffic": [],
    }

    print(f"{'last join to last release':28} {'median':>10} {'worst':>10} {'target':>10}")
    for count, target in ((8, 5), (64, 10), (256, 30), (1000, 100), (4000, 500)):
        if quick and count > 256:
            continue
        took = rounds_ms(count, 4 if quick else 12)
        print(
            f"{count:>6} nodes {'':15} {statistics.median(took):>7.1f} ms {max(took):>7.1f} ms {target:>7} ms",
            flush=True,
        )
        results["rounds"].append({"nodes": count, "ms": took, "target_ms": target})

    print("\nend of a node until the last of the others was notified")
    for count in (64,) if quick else (64, 1000):
        for how, target in (("SIGKILL", 50.0), ("SIGTERM", 20.0)):
            took = [loss_ms(count, how) for _ in range(2 if quick else 10)]
            print(
                f"{count:>6} nodes, {how:12} {statistics.median(took):>7.1f} ms {max(took):>7.1f} ms {target:>7.0f} ms",
                flush=True,
            )
            results["losses"].append({"nodes": count, "how": how, "ms": took, "target_ms": target})

    print("\nelastic-rs status, from the start of its process to its end")
    for count in (256,) if quick else (64, 4000):
        took, lines = status_ms(count, 3 if quick else 10)
        print(f"{count:>6} nodes, {lines} lines {statistics.median(took):>15.1f} ms {max(took):>7.1f} ms {100:>7} ms")
        results["status"].append({"nodes": count, "ms": took, "lines": lines})

    results["looks"].append(measure_looks(3 if quick else 10))

    count, seconds = (256, 6.0) if quick else (1000, 30.0)
    cpu, kib = at_rest(count, seconds)
    print(
        f"\ncoordinator with {count} nodes at rest for {seconds:.0f} s: {cpu:.2f} % of a core (target 1), "
        f"{kib:.1f} KiB per node (target 20)"
    )
    results["at rest"].append({"nodes": count, "cpu_percent": cpu, "kib_per_node": kib})

    print(f"\n{'bytes per node':28} {'join':>10} {'again':>10} {'at rest':>12}")
    for backend, counts in (("rust-c10d", (2, 8, 32, 128)), ("c10d", (2, 8) if quick else (2, 8, 32))):
        for count in counts:
            of = traffic(backend, count, 10.0)
            join, again, rest = of.values()
            print(f"{count:>6} nodes, {backend:14} {join:>10.0f} {again:>10.0f} {rest:>9.1f} /s", flush=True)
            results["traffic"].append({"nodes": count, "backend": backend, **of})

    plot_traffic(results["traffic"])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"cpus": os.cpu_count(), **results}, indent=1) + "\n")
    print(f"\n{RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
