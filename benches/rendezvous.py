"""Measure a rendezvous from the last node's join until the last node is released.

    python benches/rendezvous.py [--nodes 2 8] [--repetitions 10] [--backends c10d rust-c10d]

PyTorch's handler and ours are measured in turn in one run, so that other load on the machine affects both. Each node is
a separate process, because threads of one process would wait for the interpreter lock. It has imported torch and built
its handler before the clock starts. Every round has a new store on a new port, and exactly as many nodes as it needs,
so that there is no `last_call`. All nodes share this machine and its clock. With more nodes than cores, scheduling is
part of both results.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from measuring import RESULTS, keep, machine

OUTPUT = RESULTS / "rendezvous.json"
LIMIT_S = 60.0  # for each answer of a node
BASELINE = "c10d"


# --- in the process of a node ----------------------------------------------------------------------------------------


def node(index: int, orders: Connection) -> None:
    """Perform orders, with one answer for each: build a handler, join at a signal, shut down."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that ends is news to the other nodes' C++ clients
    import torch
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry  # registers what is installed

    orders.send(torch.__version__)

    handler: Any = None
    while (order := orders.recv()) is not None:
        match order:
            case ("build", backend, port, run_id, count):
                parameters = RendezvousParameters(
                    backend, f"127.0.0.1:{port}", run_id, count, count, local_addr=f"127.0.1.{index + 1}"
                )
                handler = registry.get_rendezvous_handler(parameters)
                orders.send(None)
            case ("join",):
                joined_at = time.monotonic()
                info = handler.next_rendezvous()
                orders.send((joined_at, time.monotonic(), info.rank, info.world_size))
                del info
            case ("shutdown",):
                handler.shutdown()
                handler = None  # the store's server ends with it
                orders.send(None)


# --- in the process that measures ------------------------------------------------------------------------------------


@dataclass
class Node:
    process: BaseProcess
    orders: Connection

    def send(self, *order: object) -> None:
        self.orders.send(order)

    def answer(self) -> Any:
        if not self.orders.poll(LIMIT_S):
            raise SystemExit(f"error: a node has not answered for {LIMIT_S:.0f} s")
        try:
            return self.orders.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(f"error: a node has ended with exit code {self.process.exitcode}; see above") from None


def measure(nodes: list[Node], backend: str, run_id: str) -> float:
    """Run one rendezvous, and return its duration in seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The first node starts alone, so it hosts the store.
    for each in nodes:
        each.send("build", backend, port, run_id, len(nodes))
        each.answer()
    for each in nodes:
        each.send("join")
    times = [each.answer() for each in nodes]
    for each in reversed(nodes):  # the host goes last
        each.send("shutdown")
        each.answer()
    ranks = sorted(rank for _, _, rank, _ in times)
    if ranks != list(range(len(nodes))) or {size for *_, size in times} != {len(nodes)}:
        raise SystemExit(f"error: {backend} gave the ranks {ranks} to {len(nodes)} nodes")
    return max(released for _, released, _, _ in times) - max(joined for joined, *_ in times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time from the last join to the last release.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--backends", nargs="+", default=[BASELINE, "rust-c10d"])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()

    context = get_context("spawn")
    nodes: list[Node] = []
    try:
        print(f"starting {max(args.nodes)} processes", file=sys.stderr)
        for index in range(max(args.nodes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=node, args=(index, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            nodes.append(Node(process, ours))
        torch_version = {each.answer() for each in nodes}.pop()

        samples: dict[int, dict[str, list[float]]] = {n: {b: [] for b in args.backends} for n in args.nodes}
        for count in args.nodes:
            for repetition in range(-1, args.repetitions):  # the first is a warm-up
                order = args.backends if repetition % 2 == 0 else args.backends[::-1]
                for backend in order:
                    seconds = measure(nodes[:count], backend, f"bench-{count}-{repetition}")
                    if repetition >= 0:
                        samples[count][backend].append(seconds)
        for each in nodes:
            each.orders.send(None)
        for each in nodes:
            each.process.join(LIMIT_S)
    finally:
        for each in nodes:
            each.process.kill()

    print(
        f"\nlast join to last release, {args.repetitions} repetitions, torch {torch_version}, {os.cpu_count()} cores\n"
    )
    print(f"{'nodes':>5}  {'backend':<10}  {'median':>10}  {'min':>10}  {'max':>10}  {'times faster':>12}")
    for count, by_backend in samples.items():
        for backend, seconds in by_backend.items():
            ratio = ""
            if backend != BASELINE and BASELINE in by_backend:
                ratio = f"{statistics.median(by_backend[BASELINE]) / statistics.median(seconds):.1f}"
            cells = (f"{value * 1000:.2f} ms" for value in (statistics.median(seconds), min(seconds), max(seconds)))
            print(f"{count:>5}  {backend:<10}  {'  '.join(f'{cell:>10}' for cell in cells)}  {ratio:>12}")

    result = {
        "what": "seconds from the last node's join to the last node's release",
        "command": "python benches/rendezvous.py",
        "torch": torch_version,
        "python": platform.python_version(),
        "machine": machine(),
        "samples": [
            {"nodes": count, "backend": backend, "median_s": statistics.median(seconds), "seconds": seconds}
            for count, by_backend in samples.items()
            for backend, seconds in by_backend.items()
        ],
    }
    print()
    keep(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
