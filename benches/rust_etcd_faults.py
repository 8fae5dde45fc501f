"""Losses of members and nodes of an etcd cluster, and mistakes of users, for benches/rust_etcd.py.

Jobs are elastic-run processes with workers that import nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from etcd_admin import Admin  # noqa: E402
from etcd_cluster import Cluster, Member, Tls  # noqa: E402

LEASE_S = 15.0  # by default
LIMIT_S = 90.0
# Says that it runs, and runs until it is ended.
WORKER = "import os, signal; os.write(1, b'UP %s\\n' % os.environ['WORLD_SIZE'].encode()); signal.pause()"
MARKER = "ELASTIC_RS_BENCH_ID"

Add = Callable[[str, list[float], str, float | None], None]


class Agent:
    """One elastic-run process, and the lines that it and its workers print."""

    def __init__(
        self, endpoint: str, number: int, *flags: str, conf: str = "", env: dict[str, str] | None = None
    ) -> None:
        command = [
            *(sys.executable, "-m", "elastic_rs.run", "--rdzv-backend=rust-etcd", f"--rdzv-endpoint={endpoint}"),
            *("--rdzv-id=agents", f"--rdzv-conf=last_call_timeout=0.5{conf}", f"--local-addr=127.0.0.{number}"),
            *("--max-restarts=100000", *flags, "--no-python", sys.executable, "-I", "-S", "-c", WORKER),
        ]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, MARKER: str(os.getpid()), "ELASTIC_RS_LOG": "info", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), raw.decode(errors="replace")))
                self._changed.notify_all()

    def line(self, pattern: str, *, since: int = 0) -> float:
        """Wait for a line, and return when it came."""
        wanted = re.compile(pattern)

        def found() -> float | None:
            return next((at for at, text in self.lines[since:] if wanted.search(text)), None)

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, LIMIT_S):
                told = "".join(text for _, text in self.lines[-30:])
                raise SystemExit(f"error: no line like `{pattern}` in {LIMIT_S:.0f} s\n{told}")
            at = found()
            assert at is not None
            return at

    def mark(self) -> int:
        with self._changed:
            return len(self.lines)

    def workers(self) -> list[int]:
        """Return the process ids of its workers, which a guard starts each."""
        return [pid for guard in _children(self.process.pid) for pid in _children(guard)]

    def end(self) -> None:
        for pid in (self.process.pid, *self.workers()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def agents(cluster: Cluster, count: int, *flags: str, conf: str = "") -> Iterator[list[Agent]]:
    """Run so many nodes, all in one world."""
    started = [Agent(cluster.endpoint, number, *flags, conf=conf) for number in range(2, 2 + count)]
    try:
        for agent in started:
            agent.line(f"^UP {count}")
        yield started
    finally:
        for agent in started:
            agent.end()


def ended_s(pids: list[int], began: float) -> list[float]:
    """Return for each process how long after ``began`` it has ended."""
    times = []
    for fd in [os.pidfd_open(pid) for pid in pids]:
        ready, _, _ = select.select([fd], [], [], LIMIT_S)
        times.append(time.monotonic() - began if ready else LIMIT_S)
        os.close(fd)
    return times


def renewal_s(program: str, which: str, how: str) -> float:
    """Return the time from the loss of a member until the next renewal. The workers must stay the same."""
    with (
        Cluster(program) as cluster,
        agents(cluster, 1, "--nnodes=1", conf=",keep_alive_interval=0.5,keep_alive_max_attempt=30") as (node,),
    ):
        workers = node.workers()
        victim = _chosen(cluster, cluster.serving(node.process.pid), which)
        cluster.until_renewed()
        getattr(victim, how)()
        took = cluster.until_renewed()
        if node.workers() != workers:
            raise SystemExit(f"error: {which}, {how}: other workers")
        return took


def _chosen(cluster: Cluster, connected: Member, which: str) -> Member:
    if which == "connected":
        return connected
    if which == "leader":
        return cluster.leader()
    return next(member for member in cluster.followers() if member is not connected)


def outage(program: str, how: str, seconds: float) -> dict[str, list[float]]:
    """Stop or kill two of three members for a while. Returns when workers ended, and how long a join took."""
    found: dict[str, list[float]] = {"ended": [], "joined": [], "world": []}
    with Cluster(program) as cluster, agents(cluster, 2, "--nnodes=2:3") as nodes, contextlib.ExitStack() as stack:
        workers = [pid for node in nodes for pid in node.workers()]
        marks = [node.mark() for node in nodes]
        began = time.monotonic()
        lost = cluster.members[:2]
        for member in lost:
            getattr(member, how)()
        if how == "pause":
            found["ended"] = ended_s(workers, began)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        if how == "kill":
            if [pid for node in nodes for pid in node.workers()] != workers:
                raise SystemExit("error: workers were restarted in the outage")
            third = Agent(cluster.endpoint, 4, "--nnodes=2:3")
            stack.callback(third.end)
            third.line("etcd at")
        for member in lost:
            member.start() if how == "kill" else member.resume()
        cluster.until_healthy()
        began = time.monotonic()
        if how == "kill":
            found["joined"].append(third.line("^UP 3") - began)
        else:
            found["world"] = [node.line("^UP 2", since=mark) - began for node, mark in zip(nodes, marks, strict=True)]
    return found


def lost_node_s(cluster: Cluster) -> float:
    """Return the time from the SIGKILL of a node until the other runs without it."""
    with agents(cluster, 2, "--nnodes=1:2") as (stays, goes):
        mark, began = stays.mark(), time.monotonic()
        goes.process.kill()
        return stays.line("^UP 1", since=mark) - began


def no_space(program: str) -> tuple[float, float]:
    """Return when a join says that there is no space, and how long it takes once there is."""
    with (
        Cluster(program, options=["--quota-backend-bytes=16777216"]) as cluster,
        agents(cluster, 2, "--nnodes=2:3") as nodes,
        contextlib.ExitStack() as stack,
    ):
        admin, workers = Admin(cluster), [pid for node in nodes for pid in node.workers()]
        admin.fill()
        began = time.monotonic()
        third = Agent(cluster.endpoint, 4, "--nnodes=2:3")
        stack.callback(third.end)
        said = third.line("NOSPACE|space exceeded") - began
        if [pid for node in nodes for pid in node.workers()] != workers:
            raise SystemExit("error: workers were restarted without space")
        admin.make_room()
        began = time.monotonic()
        return said, third.line("^UP 3") - began


def told_s(endpoint: str, pattern: str, conf: str = "", **env: str) -> float:
    """Return the time from the start of a node until it tells what is wrong."""
    began = time.monotonic()
    agent = Agent(endpoint, 2, "--nnodes=1", conf=conf, env=env)
    try:
        return agent.line(pattern) - began
    finally:
        agent.end()


def wrong(program: str, repetitions: int) -> Iterator[tuple[str, list[float]]]:
    """Yield for each mistake how long it takes until it is told."""
    data = ROOT / "tests" / "data" / "etcd"
    secure = f",protocol=https,cacert={data / 'ca.pem'}"
    with Cluster(program, size=1, tls=Tls(data / "ca.pem", data / "server.pem", data / "server.key")) as cluster:
        admin = Admin(cluster)
        admin.add_user("trainer", "right")
        admin.enable_auth("root's")
        free = f"127.0.0.1:{cluster.ports.another()}"
        for name, endpoint, pattern, conf, password in (
            ("nobody listens", free, "refused", "", ""),
            ("no TLS to a TLS port", cluster.endpoint, "protocol=https", "", ""),
            ("wrong password", cluster.endpoint, "rejects the password", f"{secure},username=trainer", "wrong"),
            ("no rights", cluster.endpoint, "permission denied", f"{secure},username=trainer", "right"),
        ):
            env = {"ELASTIC_RS_ETCD_PASSWORD": password} if password else {}
            yield name, [told_s(endpoint, pattern, conf, **env) for _ in range(repetitions)]


def measure(add: Add, program: str, *, quick: bool) -> None:
    """Measure everything, and hand each figure to ``add``: name, values, unit, target."""
    few, outage_s = (2, 18.0) if quick else (5, 30.0)
    if not quick:
        with Cluster(program) as cluster:
            took = [lost_node_s(cluster) for _ in range(2)]
            add("a node's SIGKILL until the other runs alone", took, "s", LEASE_S + 2)
    for which, how, target in (
        ("follower", "kill", 1),
        ("connected", "kill", 3),
        ("leader", "kill", 3),
        ("connected", "pause", 4),
        ("leader", "pause", 4),
    ):
        took = [renewal_s(program, which, how) for _ in range(few)]
        add(f"{how} of the {which}: until the next renewal", took, "s", target)
    add("two of three killed: a join after they are back", outage(program, "kill", outage_s)["joined"], "s", 3)
    found = outage(program, "pause", outage_s)
    add("two of three stopped: until workers have ended", found["ended"], "s", LEASE_S + 0.5)
    add("  one world after they go on", found["world"], "s", 5)
    said, recovered = no_space(program)
    add("NOSPACE: until a join says so", [said], "s", 15)
    add("  a join after the alarm is taken back", [recovered], "s", 2)
    for name, took in wrong(program, few):
        add(f"{name}: until a node says so", took, "s", 2)
