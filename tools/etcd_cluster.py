"""An etcd cluster on this machine, for tests, benchmarks and the demo.

    with Cluster(program) as cluster:
        job(f"--rdzv-endpoint={cluster.endpoint}")
        cluster.leader().kill()

Members are real processes on loopback. Their data is in memory where there is room, in a temporary folder otherwise.
All members start at once; the constructor returns when each says that it is healthy. At the end, and if this process
dies, they are killed, and their data is removed.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
LIMIT_S = 60.0  # for a start or an election, which take 2 s
LOOK_AGAIN_S = 0.05
# etcd reserves 128 MB for each member's log.
ROOM_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
# The kernel kills the member when the thread that started it ends. 1: PR_SET_PDEATHSIG.
GUARDED = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class Tls:
    """How clients reach the members by TLS. Members talk to one another without."""

    ca: Path
    cert: Path
    key: Path
    client_certificates: bool = False
    """Clients must show a certificate of the CA."""

    def flags(self) -> list[str]:
        flags = [f"--cert-file={self.cert}", f"--key-file={self.key}"]
        # With the CA, etcd asks clients for a certificate.
        return [*flags, f"--trusted-ca-file={self.ca}", "--client-cert-auth"] if self.client_certificates else flags


class Ports:
    """Free ports of the loopback address, held by bound sockets, so that no other process is given them."""

    def __init__(self) -> None:
        self._holders: list[socket.socket] = []

    def another(self) -> int:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server can bind it as well
        holder.bind((HOST, 0))
        self._holders.append(holder)
        return int(holder.getsockname()[1])

    def close(self) -> None:
        for holder in self._holders:
            holder.close()


class Member:
    """One etcd process, which may be ended and started again with its data."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.client, self.peer, self.metrics_port = (cluster.ports.another() for _ in range(3))
        # What others are told, for a relay before the port.
        self.client_seen, self.peer_seen = cluster.relay(self.client), cluster.relay(self.peer)
        self.log = cluster.folder / f"{name}.log"
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def peer_url(self) -> str:
        return f"http://{HOST}:{self.peer_seen}"

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.client_seen}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives and is not paused."""
        return self._process is not None and self._process.poll() is None and not self._paused

    def start(self, *, initial: Sequence[Member] = (), state: str = "existing") -> None:
        """Start the process. ``initial``: the members of the cluster that it is to begin or to join."""
        scheme = "https" if self._cluster.tls else "http"
        flags = [
            f"--name={self.name}",
            f"--data-dir={self._cluster.folder / self.name}",
            f"--listen-client-urls={scheme}://{HOST}:{self.client}",
            f"--advertise-client-urls={scheme}://{HOST}:{self.client_seen}",
            f"--listen-peer-urls=http://{HOST}:{self.peer}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--listen-metrics-urls=http://{HOST}:{self.metrics_port}",
            f"--initial-cluster={','.join(f'{member.name}={member.peer_url}' for member in (initial or [self]))}",
            f"--initial-cluster-token={self._cluster.token}",
            f"--initial-cluster-state={state}",
            "--logger=zap",
            "--log-level=warn",
            *(self._cluster.tls.flags() if self._cluster.tls else []),
            *self._cluster.options,
        ]
        python = [sys.executable, "-I", "-S", "-c", GUARDED, str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*python, self._cluster.program, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for whoever has the cluster
            )

    def healthy(self) -> bool:
        """Whether it answers, and knows a leader."""
        try:
            return '"true"' in self.get("/health")
        except (OSError, http.client.HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        """Return its counters, with their labels as part of the name."""
        lines = self.get("/metrics").splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def get(self, path: str) -> str:
        """Ask the port for metrics, which is never encrypted."""
        connection = http.client.HTTPConnection(HOST, self.metrics_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def pause(self) -> None:
        """Stop the process with SIGSTOP. The kernel still accepts connections for it."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        """Kill the process, and return when it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._paused = False

    def output(self) -> str:
        """Return the end of its log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"    {self.name}| {line}" for line in lines[-15:])


class Cluster:
    """Members of one cluster.

    Args:
        program: the etcd binary.
        size: the number of members.
        options: further flags of every member.
        tls: how clients reach the members.
        relay: is given each port that a member listens on for clients and peers, and returns the port that others are
            told instead.
    """

    def __init__(
        self,
        program: str,
        *,
        size: int = 3,
        options: Sequence[str] = (),
        tls: Tls | None = None,
        relay: Callable[[int], int] = lambda port: port,
    ) -> None:
        self.program, self.options, self.tls, self.relay = program, list(options), tls, relay
        self.token = uuid.uuid4().hex
        self.ports = Ports()
        self.folder = Path(tempfile.mkdtemp(prefix="elastic_rs_etcd_", dir=_memory()))
        self.members = [Member(self, f"m{number}") for number in range(size)]
        self._all = list(self.members)
        try:
            for member in self.members:
                member.start(initial=self.members, state="new")
            self.until_healthy()
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """What ``--rdzv-endpoint`` is given."""
        return ",".join(member.endpoint for member in self.members)

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.running]

    def until_healthy(self) -> None:
        """Wait until every running member knows a leader."""
        self.until(lambda: all(member.healthy() for member in self.running), "healthy")

    def until(self, done: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> float:
        """Look until a condition holds, and return how many seconds that took."""
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > limit_s:
                output = "\n".join(member.output() for member in self.members)
                raise TimeoutError(f"the cluster is not {what} after {limit_s:.0f} s\n{output}")
            time.sleep(LOOK_AGAIN_S)
        return time.monotonic() - began

    def leader(self) -> Member:
        """Return the running member that leads, once there is one."""
        found: list[Member] = []

        def look() -> bool:
            found[:] = [member for member in self.running if _leads(member)]
            return len(found) == 1

        self.until(look, "led by one member")
        return found[0]

    def followers(self) -> list[Member]:
        """Return the running members that do not lead."""
        leader = self.leader()
        return [member for member in self.running if member is not leader]

    def serving(self, pid: int) -> Member:
        """Return the member that a process has its connection with, once that is one."""
        ports = {member.client_seen: member for member in self.members}
        found: set[Member] = set()

        def look() -> bool:
            found.clear()
            found.update(ports[port] for port in _remote_ports(pid) if port in ports)
            return len(found) == 1

        self.until(look, f"connected to by process {pid} with one member")
        return found.pop()

    def until_renewed(self) -> float:
        """Wait for the next renewal of any lease, and return how many seconds that took."""

        def renewals() -> float:
            return self.count("etcd_debugging_lease_renewed_total")  # the leader counts them

        before = renewals()
        return self.until(lambda: renewals() > before, "renewing leases")

    def newcomer(self) -> Member:
        """Return a new member that is not started. The cluster must have been told of its ``peer_url`` before."""
        member = Member(self, f"m{len(self._all)}")
        self._all.append(member)
        self.members.append(member)
        return member

    def count(self, counter: str, **labels: str) -> float:
        """Return the sum of a counter over all running members and over the labels that are not given."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        total = 0.0
        for member in self.running:
            for name, value in member.metrics().items():
                if name.partition("{")[0] == counter and all(text in name for text in wanted):
                    total += value
        return total

    def close(self) -> None:
        """Kill the members, and remove their data."""
        for member in self._all:
            member.kill()
        self.ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            for member in self._all:
                error.add_note(member.output())
        self.close()


def _memory() -> str | None:
    """Return the folder of a file system in memory, if it has room. None: the folder for temporary files."""
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES:
            return str(SHARED_MEMORY)
    return None


def _leads(member: Member) -> bool:
    try:
        return member.metrics().get("etcd_server_is_leader") == 1.0
    except (OSError, http.client.HTTPException):
        return False


def _remote_ports(pid: int) -> Iterator[int]:
    """Yield the remote ports of a process's established connections over IPv4."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01" and fields[9] in inodes:
            yield int(fields[2].rpartition(":")[2], 16)
