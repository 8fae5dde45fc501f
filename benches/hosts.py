"""Measure a driver: the time until a new host's agent has joined, and until 64 agents have started.

    python benches/hosts.py [--repetitions 10] [--agents 64]

The hosts are names for loopback addresses at which one SSH server of this machine listens (SSHD names it). A host is
added by changing what the discovery script prints; the time runs from the end of the script's first run that prints it
to the moment at which the coordinator says that the node has joined. Many agents are compared with as many `ssh HOST
true` at the same time: both ends of all connections share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import RESULTS, keep, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from ssh_server import SshServer

OUTPUT = RESULTS / "hosts.json"
LIMIT_S = 120.0


@contextlib.contextmanager
def serving(names: int) -> Iterator[SshServer]:
    program = os.environ.get("SSHD") or sys.exit("error: SSHD is not set; tools/find_tool.py finds an SSH server")
    with tempfile.TemporaryDirectory(prefix="elastic_rs-bench-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            port = probe.getsockname()[1]
        server = SshServer(str(program), Path(folder), port, names=names)
        try:
            yield server
        finally:
            server.stop()


class Driver:
    """A driver whose workers wait."""

    def __init__(self, server: SshServer, *flags: str) -> None:
        command = [sys.executable, "-m", "elastic_rs.run", f"--ssh={server.command()}", "--shutdown-timeout=2", *flags]
        env = os.environ | {"ELASTIC_RS_LOG": "info", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, "--no-python", "sleep", "100000"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._seen: list[str] = []

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(LIMIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic(), line))

    def until(self, pattern: str, count: int = 1) -> float:
        """Wait for so many lines, and return when the last one came."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                at, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                shown = "".join(self._seen[-20:])
                raise SystemExit(f"error: no line like `{pattern}` within {LIMIT_S:g} s:\n{shown}") from None
            self._seen.append(line)
            count -= re.search(pattern, line) is not None
            if count == 0:
                return at


def added(server: SshServer, repetitions: int) -> list[float]:
    """Measure the seconds from the script's answer to the join of the host that it names first."""
    found = []
    listing = server.folder / "list"
    script = server.folder / "hosts.py"
    told = server.folder / "told"
    # Says when it first printed two hosts.
    script.write_text(
        "import os, pathlib, time\n"
        f"text = pathlib.Path({str(listing)!r}).read_text()\nprint(text, end='', flush=True)\n"
        f"if text.count('node') > 1 and not os.path.exists({str(told)!r}):\n"
        f"    pathlib.Path({str(told)!r}).write_text(str(time.monotonic()))\n"
    )
    command = shlex.join([sys.executable, "-I", "-S", str(script)])
    for number in range(repetitions + 1):
        listing.write_text("node0:1\n")
        told.unlink(missing_ok=True)
        flags = ("--discovery-interval=0.2", "--min-np=1", "--rdzv-conf=last_call_timeout=1")
        with Driver(server, f"--host-discovery-script={command}", *flags) as driver:
            driver.until(r"rank 0 of 1,")
            listing.write_text("node0:1\nnode1:1\n")
            joined = driver.until(r"\) joined \(2 nodes")
            if number:  # the first one fills caches
                found.append(joined - float(told.read_text()))
                print(f"host added, agent joined: {found[-1]:.3f} s", flush=True)
    return found


def parallel_ssh(server: SshServer, count: int) -> float:
    began = time.monotonic()
    ssh = [*shlex.split(server.command()), "-T", "-o", "BatchMode=yes"]
    # As the driver does, each in a session of its own: the kernel gives every session the same share of the processors.
    processes = [
        subprocess.Popen([*ssh, f"node{number}", "true"], stdin=subprocess.DEVNULL, start_new_session=True)
        for number in range(count)
    ]
    if any(process.wait() for process in processes):
        raise SystemExit("error: ssh has failed")
    return time.monotonic() - began


def many(server: SshServer, count: int) -> float:
    """Measure the seconds until all agents run."""
    hosts = ",".join(f"node{number}" for number in range(count))
    began = time.monotonic()
    with Driver(server, "-H", hosts, "--start-timeout=120") as driver:
        return driver.until(r"an agent runs on node", count) - began


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a driver.")
    parser.add_argument("--repetitions", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--agents", type=int, default=64, help="(default: %(default)s)")
    args = parser.parse_args()
    with serving(args.agents) as server:
        joins = added(server, args.repetitions)
        parallel_ssh(server, args.agents)
        pairs = []
        for _ in range(3):
            pairs.append((parallel_ssh(server, args.agents), many(server, args.agents)))
            print(f"{args.agents} times ssh HOST true: {pairs[-1][0]:.2f} s, agents: {pairs[-1][1]:.2f} s", flush=True)
    ssh_s, agents_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"host added, agent joined: median {statistics.median(joins):.3f} s, at most {max(joins):.3f} s")
    times = agents_s / ssh_s
    print(f"{args.agents} agents: {agents_s:.2f} s; as many ssh HOST true: {ssh_s:.2f} s; {times:.2f} times")
    result = {"machine": machine(), "joins_s": joins, "agents": args.agents, "ssh_s": ssh_s, "agents_s": agents_s}
    keep(result, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
