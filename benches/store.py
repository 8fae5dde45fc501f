"""Compare store servers: PyTorch's (libuv) and ours under the same load, alternating in one run.

The server has one CPU and the load generator (examples/store_load) another. With a single connection both share one
CPU, so that the figures do not contain the wake-up of an idle core. Two CPUs are needed.

PyTorch's server looks up the name of each peer that it accepts, in its only thread. Look-ups must affect only the
measurements that are about them, so servers run where look-ups fail at once. Bursts are also measured with a name
server that takes 20 ms, and start and burst with one that does not answer. This needs a user namespace, and for the
latter two the right to listen on port 53 of a loopback address. If something is missing, that is printed, and the rows
are left out. Without namespaces this machine's names are used.

Prints a table with medians, the ratio (the median over pairs of measurements), and whether the target is met. Writes
benches/results/store.json, and after a complete run docs/store-bench.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import plot
from measuring import machine
from store_servers import (
    AT_ONCE,
    BLACK_HOLED,
    LOAD_CPU,
    OURS,
    PYTORCH,
    ROOT,
    SERVER_CPU,
    SERVERS,
    SLOW,
    Client,
    Load,
    Server,
    names,
    why_no_names,
)

RESULTS = ROOT / "benches/results/store.json"
PLOT = ROOT / "docs/store-bench.svg"


@dataclass(frozen=True)
class Case:
    """One continuous load."""

    operation: str
    connections: int
    depth: int
    value_bytes: int
    target: float | None

    @property
    def one_cpu(self) -> bool:
        return self.connections == 1

    def __str__(self) -> str:
        size = f"{self.value_bytes // 1024} KiB" if self.value_bytes >= 1024 else f"{self.value_bytes} B"
        size = f"{size} x 100" if self.operation == "multi_get" else size
        return f"{self.operation} {size}, {self.connections} x {self.depth}"


ONE = 1 / 0.95
CASES = [
    *(Case(operation, 1, 1, 64, ONE) for operation in ("ping", "get", "add", "compare_set", "multi_get")),
    *(Case(operation, 1, 1, 65536, ONE) for operation in ("get", "compare_set")),
    *(Case(operation, connections, 1, 64, 1.3) for operation in ("get", "add") for connections in (64, 256)),
    *(Case(operation, c, 16, 64, 3.0) for operation in ("get", "add", "check") for c in (64, 256)),
    *(Case("set", connections, 16, 64, 1.0) for connections in (64, 256)),
    Case("multi_get", 8, 16, 64, 1.5),
    Case("get", 8, 4, 65536, 1.0),
    Case("compare_set", 8, 4, 65536, 2.0),
]
CLIENT_OPERATIONS = ("get", "add", "multi_get")
BURSTS = (128, 512, 2048, 4000)
QUICK_BURSTS = (128,)
WAITERS = (64, 512, 2048)


@dataclass(frozen=True)
class Sample:
    """One measurement. A larger rate is better; of everything else, less is better."""

    value: float
    over: bool = False
    """Whether the time limit ended the measurement, so that the true value is larger."""


@dataclass
class Row:
    """The measurements of both servers."""

    what: str
    unit: str
    target: float | None
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in SERVERS})

    def median(self, name: str) -> float:
        return statistics.median(sample.value for sample in self.samples[name])

    def is_over(self, name: str) -> bool:
        return any(sample.over for sample in self.samples[name])

    @property
    def ratio(self) -> float:
        pairs = zip(self.samples[PYTORCH], self.samples[OURS], strict=True)
        ratios = [theirs.value / max(ours.value, 1e-3) for theirs, ours in pairs]
        ratio = statistics.median(ratios)
        return 1 / ratio if self.unit == "k/s" else ratio

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.ratio >= self.target and not self.is_over(OURS) else "MISSED"

    @property
    def ratio_shown(self) -> str:
        return f"{'at least ' if self.is_over(PYTORCH) else ''}{_short(self.ratio)}"

    def shown(self, name: str) -> str:
        return f"{'> ' if self.is_over(name) else ''}{self.median(name):,.1f}"

    def line(self) -> str:
        target = "" if self.target is None else f">= {self.target:.3g}"
        cells = f"{self.what:52} {self.shown(PYTORCH):>12} {self.shown(OURS):>12} {self.unit:4}"
        return f"{cells} {self.ratio_shown:>14}  {target:8} {self.verdict}"

    def result(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "pytorch": self.median(PYTORCH),
            "pytorch_is_lower_bound": self.is_over(PYTORCH),
            "ours": self.median(OURS),
            "better_by": self.ratio,
            "target": self.target,
            "met": None if self.target is None else self.verdict == "met",
            "samples": {name: [asdict(sample) for sample in samples] for name, samples in self.samples.items()},
        }


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


@dataclass(frozen=True)
class Parties:
    """A server of each kind, with its load generator."""

    servers: dict[str, Server]
    loads: dict[str, Load]


class Run:
    """One run of the benchmark: its options and results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[Row] = []
        self.plain = why_no_names(AT_ONCE)
        if self.plain:
            print(f"no names of our own ({self.plain}): connecting is as slow as this machine's DNS makes it")

    def wanted(self, what: str) -> bool:
        return re.search(self.args.only, what) is not None

    @contextlib.contextmanager
    def prefix(self, dns: str) -> Iterator[list[str]]:
        """Return the command prefix with which servers see names that are as slow as that."""
        if dns == AT_ONCE and self.plain:
            yield []
        else:
            with names(dns) as prefix:
                yield prefix

    @contextlib.contextmanager
    def parties(self) -> Iterator[Parties]:
        with contextlib.ExitStack() as stack:
            prefix = stack.enter_context(self.prefix(AT_ONCE))
            servers = {name: stack.enter_context(Server(name, prefix)) for name in SERVERS}
            loads = {name: stack.enter_context(Load(server.port)) for name, server in servers.items()}
            yield Parties(servers, loads)

    def measure(
        self, what: str, unit: str, target: float | None, repeat: int, how: Callable[[str], Sample | float]
    ) -> Row:
        """Measure both servers in turn. Each of them goes first equally often."""
        row = Row(what, unit, target)
        for number in range(repeat):
            for name in list(SERVERS) if number % 2 == 0 else reversed(SERVERS):
                sample = how(name)
                row.samples[name].append(sample if isinstance(sample, Sample) else Sample(sample))
        self.rows.append(row)
        print(row.line(), flush=True)
        return row


def loads(run: Run) -> None:
    """Measure requests in flight on one, some and many connections."""
    wanted = [case for case in CASES if run.wanted(str(case))]
    if not wanted:
        return
    with run.parties() as parties:
        for case in wanted:

            def how(name: str, case: Case = case) -> float:
                load = parties.loads[name]
                os.sched_setaffinity(load.process.pid, {SERVER_CPU if case.one_cpu else LOAD_CPU})
                words = (case.operation, case.connections, case.depth, case.value_bytes, run.args.seconds)
                result = load.result("load", *words)
                return result["p50_us"] if case.one_cpu else result["per_s"] / 1000

            run.measure(str(case), "us" if case.one_cpu else "k/s", case.target, run.args.repeat, how)


def clients(run: Run) -> None:
    """Measure the same with PyTorch's own client."""
    wanted = {f"PyTorch's client, {operation}": operation for operation in CLIENT_OPERATIONS}
    wanted = {what: operation for what, operation in wanted.items() if run.wanted(what)}
    if not wanted:
        return
    with run.parties() as parties, run.prefix(AT_ONCE) as prefix, contextlib.ExitStack() as stack:
        each = {n: stack.enter_context(Client(server.port, prefix)) for n, server in parties.servers.items()}
        for what, operation in wanted.items():
            run.measure(what, "us", 1.0, run.args.repeat, lambda n, op=operation: float(each[n].ask(op)))


def waiters(run: Run) -> None:
    """Measure the time from a SET until the last connection that waits for the key is released."""
    wanted = {f"one set, {count} waiters released": count for count in WAITERS}
    wanted = {what: count for what, count in wanted.items() if run.wanted(what)}
    if not wanted:
        return
    with run.parties() as parties:
        for what, count in wanted.items():
            repeat = run.args.repeat * 2
            run.measure(what, "ms", 2.0, repeat, lambda n, c=count: parties.loads[n].result("release", c)["ms"])


def memory(run: Run) -> None:
    """Measure the memory of a key and of an idle connection, once, on new servers, because memory is not freed."""

    def grows(count: int, words: tuple[object, ...]) -> Callable[[str], float]:
        def how(name: str) -> float:
            server, load = parties.servers[name], parties.loads[name]
            load.result("connect", 1)
            before = server.resident_bytes()
            load.result(*words)
            return (server.resident_bytes() - before) / count

        return how

    keys = 100_000 if run.args.quick else 1_000_000
    for what, count, words, target in (
        (f"memory per key, 8 + 64 B, {keys:,} of them", keys, ("fill", keys), 1.25),
        ("memory per idle connection, 2,000 of them", 2000, ("connect", 2001), 1.0),
    ):
        if run.wanted(what):
            with run.parties() as parties:
                run.measure(what, "B", target, 1, grows(count, words))


def beside(run: Run) -> None:
    """Measure how long other clients wait while one client sets and gets big values."""
    total, size = (1 << 28 if run.args.quick else 1 << 30), 8 << 20
    what = f"get of others while one moves {total >> 20:,} MiB, p99"
    if not run.wanted(what):
        return
    alone = Row("the same while nothing else happens, p99", "us", None)

    def how(name: str) -> float:
        result = parties.loads[name].result("beside", size, total)
        alone.samples[name].append(Sample(result["alone_p99_us"]))
        return result["p99_us"]

    with run.parties() as parties:
        run.measure(what, "us", 1.0, run.args.repeat, how)
    run.rows.append(alone)
    print(alone.line(), flush=True)


def bursts(run: Run) -> None:
    """Measure the time until each of many simultaneous connections has its first reply."""
    for dns in (AT_ONCE, SLOW, BLACK_HOLED):
        wanted = {
            f"{count:,} connections to first reply, DNS {dns}": count
            for count in (QUICK_BURSTS if run.args.quick else BURSTS)
        }
        start = "server's start, DNS black-holed"
        wanted = {what: count for what, count in wanted.items() if run.wanted(what)}
        if not wanted and not (dns == BLACK_HOLED and run.wanted(start)):
            continue
        if dns != AT_ONCE and (why := why_no_names(dns)):
            print(f"left out, DNS {dns}: {why}")
            continue
        with run.prefix(dns) as prefix:
            if dns == BLACK_HOLED:

                def start_ms(name: str) -> float:
                    with Server(name, prefix) as server:
                        return server.start_ms

                run.measure(start, "ms", 2.0, 1, start_ms)
            for what, count in wanted.items():

                def how(name: str, count: int = count) -> Sample:
                    # A new server each time, because one whose burst timed out still has a long queue of look-ups.
                    with Server(name, prefix) as server, Load(server.port) as load:
                        result = load.result("burst", count, run.args.limit)
                    over = "over_ms" in result
                    return Sample(result["over_ms"] if over else result["ms"], over)

                run.measure(what, "ms", 2.0, 3 if dns == AT_ONCE and not run.args.quick else 1, how)


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "--repeat", type=int, default=5, help="measurements of each load and server (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one measurement (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="time limit of one burst (default: %(default)g)"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only measurements with a matching name (all)")
    parser.add_argument(
        "--quick", action="store_true", help="each measurement once and briefly, to check that it works: about a minute"
    )
    args = parser.parse_args()
    if args.quick:
        args.repeat, args.seconds, args.limit = 1, 0.1, min(args.limit, 10.0)
    if not {SERVER_CPU, LOAD_CPU} <= os.sched_getaffinity(0):
        sys.exit("this benchmark needs two CPUs: one for the server, one for the load")
    subprocess.run(["cargo", "build", "--quiet", "--release", "--example", "store_load"], cwd=ROOT, check=True)

    print(f"{'load (connections x in flight)':52} {'PyTorch':>12} {'ours':>12}      {'better by':>14}  target")
    run = Run(args)
    for measure in (loads, clients, waiters, memory, beside, bursts):
        measure(run)
    result = {
        "machine": machine(),
        "repeat": args.repeat,
        "quick": args.quick,
        "results": [r.result() for r in run.rows],
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("medians; better by: their time or size to ours, our rate to theirs, in pairs. Written to", RESULTS)
    if not args.quick and not args.only:
        bars = [plot.Bar(row.what, row.ratio, row.ratio_shown, row.target) for row in run.rows]
        note = f"{machine()}, loopback; libuv server; medians of {args.repeat} (bursts: 3 or 1, memory: 1)"
        plot.write(PLOT, "The store's server: ours to PyTorch's", note, bars)
        print("plotted in", PLOT)


if __name__ == "__main__":
    main()
