"""Clusters and jobs of the tests with etcd."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from etcd_admin import Admin
from etcd_cluster import Cluster, Member, Tls

from .procs import Job, Process
from .relays import Relays
from .workers import place

DATA = Path(__file__).parents[2] / "data" / "etcd"
SCRIPTS = Path(__file__).parents[1] / "scripts"
FAMILY = SCRIPTS / "family.py"
PREFIX = "/torch/elastic/rendezvous"
TLS = Tls(DATA / "ca.pem", DATA / "server.pem", DATA / "server.key")
MUTUAL_TLS = Tls(DATA / "ca.pem", DATA / "server.pem", DATA / "server.key", client_certificates=True)

# Frequent keep-alives show soon whether a node is served. The lease is longer than an election and a change of members
# together: 2 s of patience with a silent member, and up to 2 s until there is another leader.
LEASE_S = 6
CONF = "last_call_timeout=0.5,keep_alive_interval=0.5,keep_alive_max_attempt=12"
# For tests that wait for the end of a lease, with members that are never lost.
SHORT_LEASE_S = 3
SHORT_CONF = "last_call_timeout=0.5,keep_alive_interval=0.5,keep_alive_max_attempt=6"
# The first releases in which a member that was paused answers no linearizable read from before the pause.
FRESH_READS = ((3, 4, 42), (3, 5, 28), (3, 6, 9))


def version_of(program: str) -> tuple[int, ...]:
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in result.split()[2].partition("-")[0].split("."))


def skip_where_reads_may_be_stale(program: str) -> None:
    """Skip a test that resumes paused members, where an etcd's bug could decide how it ends."""
    version = version_of(program)
    for first in FRESH_READS:
        if version[:2] == first[:2] and version < first:
            shown = ".".join(map(str, version))
            pytest.skip(
                f"etcd {shown} may answer with stale reads after a pause; mended in {'.'.join(map(str, first))}"
            )


class Relayed:
    """A cluster with a relay before each port, for faults of the network."""

    def __init__(self, program: str, *, size: int = 3, options: Sequence[str] = ()) -> None:
        self.relays = Relays()
        try:
            self.cluster = Cluster(
                program, size=size, options=options, relay=lambda port: self.relays.before(port).port
            )
        except BaseException:
            self.relays.close()
            raise
        self.admin = Admin(self.cluster)
        self.clients = [self.relays.at(member.client_seen) for member in self.cluster.members]
        """The relays before the ports for clients."""

    def isolate(self, member: Member) -> None:
        """Cut a member off from the others, and from no client."""
        ids = self.admin.members()
        self.relays.at(member.peer_seen).silence()
        for other in self.cluster.members:
            if other is not member:
                self.relays.at(other.peer_seen).shun(ids[member.peer_url])

    def heal(self) -> None:
        for member in self.cluster.members:
            for port in (member.client_seen, member.peer_seen):
                self.relays.at(port).heal()

    def close(self) -> None:
        self.cluster.close()
        self.relays.close()


class Nodes:
    """Starts the nodes of a test's jobs."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(
        self,
        number: int,
        endpoint: str,
        *worker: str | Path,
        nnodes: str = "2",
        conf: str = CONF,
        more: str = "",
        run_id: str = "job",
        nproc: int = 1,
        restarts: int = 3,
        script: Path = FAMILY,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        by: str = "run",
        name: str | None = None,
    ) -> Process:
        """Start one node at 127.0.0.``number``. ``by``: elastic-run (``run``), or torchrun with that agent."""
        agent = [] if by == "run" else [f"agent={by}"]
        return self.job.start(
            [
                sys.executable,
                *("-m", "elastic_rs.run" if by == "run" else "torch.distributed.run"),
                f"--nnodes={nnodes}",
                f"--nproc-per-node={nproc}",
                f"--max-restarts={restarts}",
                "--rdzv-backend=rust-etcd",
                f"--rdzv-endpoint={endpoint}",
                f"--rdzv-id={run_id}",
                f"--rdzv-conf={','.join([conf, *([more] if more else []), *agent])}",
                f"--local-addr=127.0.0.{number}",
                *options,
                str(script),
                *map(str, worker),
            ],
            name=name or f"{run_id.replace('/', '_')}-{number}",
            env={"ELASTIC_RS_LOG": "info", **(env or {})},
        )

    def world(self, numbers: Iterable[int], endpoint: str, *worker: str | Path, **how: str) -> list[Process]:
        """Start nodes, and wait until all are in one world."""
        numbers = list(numbers)
        how.setdefault("nnodes", str(len(numbers)))
        nodes = [self.start(number, endpoint, *worker, **how) for number in numbers]  # type: ignore[arg-type]
        for node in nodes:
            place(node, len(numbers))
        return nodes


@contextlib.contextmanager
def undisturbed(job: Job, *nodes: Process) -> Iterator[None]:
    """Assert that the nodes' workers are the same processes at the end of the block, and that none was started."""
    before = [job.workers(node) for node in nodes]
    marks = [node.mark() for node in nodes]
    assert all(before)
    yield
    for node, workers, mark in zip(nodes, before, marks, strict=True):
        assert node.running, f"{node.name} has ended\n{node.tail()}"
        assert job.workers(node) == workers, f"the workers of {node.name} are other ones\n{node.tail()}"
        assert not [line for line in node.lines[mark:] if line.startswith("WORKER ")], node.tail()


def held_for_a_lease(
    cluster: Cluster, nodes: int, lease_s: float = LEASE_S, *, run_id: str = "job", election_s: float = 0
) -> None:
    """Let so much time pass that the lease of each node would have ended by now, and assert that none has.

    A leader looks for ended leases every half second. A new one grants all leases anew, and ``election_s`` is the time
    until there is one.
    """
    time.sleep(lease_s + 1 + election_s)
    assert len(node_keys(Admin(cluster), run_id)) == nodes


def node_keys(admin: Admin, run_id: str = "job", prefix: str = PREFIX) -> list[str]:
    """Return the keys of the run's nodes."""
    return [key.key for key in admin.keys(f"{prefix}/{run_id}/nodes/")]
