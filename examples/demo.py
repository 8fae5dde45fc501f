"""Show an elastic job: ``make demo``.

Two nodes with two workers each train examples/digits_ddp.py under torchrun. While they train, a third node joins. Then
a worker is killed with SIGKILL. Each time the job forms a new world and continues from its last checkpoint. A "node" is
a torchrun process on this machine with a separate loopback address.

With ``make demo DEMO_ARGS="--backend rust-etcd"`` the nodes meet over an etcd cluster of three members on this machine.
While they train, a member is killed with SIGKILL, and at last the node that holds rank 0 is.

With ``make demo DEMO_ARGS=--in-place`` they train examples/digits_elastic.py: the workers that are healthy keep their
processes, and go on with the state in their memory.

The exit code is 0 only if all of this happened, and the network recognises at least 95 % of the test images.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from demo_nodes import MARKER, Account, DemoError, Line, Node, parent_of, processes_of, stop

if TYPE_CHECKING:
    from etcd_cluster import Cluster

EXAMPLES = Path(__file__).resolve().parent
NODES = {"A": "127.0.0.2", "B": "127.0.0.3", "C": "127.0.0.4"}
TOOLS = EXAMPLES.parent / "tools"
WORKERS_PER_NODE = 2
REQUIRED_ACCURACY = 0.95

EPOCH = re.compile(r"epoch (\d+)/(\d+)  world (\d+)  loss ([\d.]+)  test accuracy ([\d.]+)")
ORIGIN = re.compile(r"((?:resumed after epoch|starting with|training from epoch).*)  world (\d+)")
PLACED = re.compile(r"round \d+: rank \d+ of (\d+)")
# [elastic_rs] 12:34:56.789 INFO rendezvous: message
OURS = re.compile(r"\[elastic_rs\]\s*(?:[\d:.]+\s+)?(?:(?P<level>[A-Z]{4,})\s+)?(?:[\w.]+:\s+)?(?P<message>\S.*)")


@dataclass
class Change:
    """An event after which a new world must form, to measure how long that takes."""

    what: str
    at: float
    world: int = 3 * WORKERS_PER_NODE  # the number of workers afterwards
    placed_at: float | None = None  # when the last node had its new rank

    def account(self, trains_at: float) -> str:
        text = f"{trains_at - self.at:.1f} s after {self.what}"
        if self.placed_at is not None:
            placed_s = self.placed_at - self.at
            text += f" (every node had its rank after {placed_s:.2f} s; the rest is Python importing torch)"
        return text


@dataclass
class Demo:
    args: argparse.Namespace
    folder: Path
    account: Account
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    nodes: dict[str, Node] = field(default_factory=dict)
    lines: queue.Queue[Line] = field(default_factory=queue.Queue)

    world: int = 0
    epoch: int = 0
    accuracy: float = 0.0
    epochs_in_world: int = 0
    worlds: list[int] = field(default_factory=list)
    change: Change | None = None
    killed_at_epoch: int | None = None
    resumed_after_kill: bool = False
    cluster: Cluster | None = None
    member_was_killed: bool = False
    lost: str | None = None  # the node that was killed
    killed_rank: int | None = None
    explained: bool = False  # `elastic-rs why` has named the killed worker
    reported: dict[str, set[str]] = field(default_factory=dict)
    kept: dict[str, bool] = field(default_factory=dict)
    """Whether the workers that should keep their processes did, by event."""

    def run(self) -> None:
        self.endpoint = self.start_rendezvous()
        self.start_node("A")
        self.start_node("B")
        self.follow(until=lambda: self.world == 2 * WORKERS_PER_NODE and self.epochs_in_world >= 3)

        if self.cluster is not None:
            self.kill_member(self.cluster)

        before = self.pids()
        self.account.say("demo", "node C is started while the others train", "event")
        self.start_node("C")
        self.change = Change("C was started", time.monotonic())
        self.follow(until=lambda: self.world == 3 * WORKERS_PER_NODE and self.epochs_in_world >= 6)
        self.kept["a node joined"] = before < self.pids()

        killed = self.kill_worker()
        if self.args.in_place:
            before = self.pids() - {killed}
            self.follow(until=lambda: self.change is None and self.epochs_in_world >= 3)
            self.kept["a worker was killed"] = before < self.pids()
        if self.cluster is None:
            self.follow(until=lambda: self.change is None)
            self.explain()
        if self.cluster is not None:
            self.follow(until=lambda: self.change is None and self.epochs_in_world >= 6)
            self.kill_node_of_rank_0()
        self.follow(until=lambda: not self.alive())
        self.verify()

    def start_rendezvous(self) -> str:
        """Return the endpoint. With etcd, start a cluster there."""
        if self.args.backend != "rust-etcd":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return f"127.0.0.1:{probe.getsockname()[1]}"
        find = [sys.executable, str(TOOLS / "find_tool.py"), "etcd"]
        program = os.environ.get("ETCD") or subprocess.run(find, stdout=subprocess.PIPE, text=True, check=True).stdout
        if not program.strip():
            raise DemoError("no etcd was found; ETCD=/path/to/etcd names one")
        sys.path.insert(0, str(TOOLS))
        from etcd_cluster import Cluster

        self.cluster = Cluster(program.strip())
        self.account.say("demo", f"an etcd cluster of three members serves at {self.cluster.endpoint}")
        return self.cluster.endpoint

    def kill_member(self, cluster: Cluster) -> None:
        """Kill the leader of etcd's members. Training must not notice."""
        member, world, epochs = cluster.leader(), self.world, self.epochs_in_world
        self.account.say("demo", f"etcd's leader {member.endpoint} (pid {member.pid}) is killed with SIGKILL", "event")
        member.kill()
        self.follow(until=lambda: self.epochs_in_world >= epochs + 20 or self.world != world)
        self.member_was_killed = self.epochs_in_world >= epochs + 20
        self.account.say("demo", "20 epochs later the same workers train on", "good")

    def kill_node_of_rank_0(self) -> None:
        _, name = self.workers()[0]
        pid = self.nodes[name].process.pid
        self.killed_at_epoch, self.resumed_after_kill, self.lost = self.epoch, False, name
        self.change = Change("the kill", time.monotonic(), 2 * WORKERS_PER_NODE)
        self.account.say("demo", f"node {name} (pid {pid}), which holds rank 0, is killed with SIGKILL", "event")
        os.kill(pid, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        # Over etcd, a node that is killed is lost when its lease ends. By default that is 15 s.
        lease = "" if self.cluster is None else ",keep_alive_interval=1"
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes=2:3", f"--nproc-per-node={WORKERS_PER_NODE}", "--max-restarts=3",
            f"--rdzv-backend={self.args.backend}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=digits",
            f"--rdzv-conf=last_call_timeout=1{lease}", f"--local-addr={NODES[name]}",
            str(EXAMPLES / ("digits_elastic.py" if self.args.in_place else "digits_ddp.py")),
            f"--epochs={self.args.epochs}", f"--checkpoint={self.folder / 'digits.pt'}", "--min-epoch-time=0.25",
        ]  # fmt: skip
        env = os.environ | {
            MARKER: self.marker,
            "ELASTIC_RS_LOG": "info",
            "GLOO_SOCKET_IFNAME": "lo",  # the host name of this machine may not resolve
            "OMP_NUM_THREADS": "1",  # what torchrun sets too, with a banner
        }
        if not self.nodes:
            self.account.say("demo", f"torchrun {shlex.join(command[3:10])} …", "dim")
        log = self.folder / f"node-{name}.log"
        self.nodes[name] = Node.start(name, command, env, log, self.lines)
        self.account.say(name, f"torchrun started at {NODES[name]} (pid {self.nodes[name].process.pid})")

    def alive(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.process.poll() is None]

    def follow(self, until: Callable[[], bool]) -> None:
        """Process the nodes' output until the condition holds. Fails if a node fails, or at the time limit."""
        while not until():
            left_s = self.account.started + self.args.time_limit - time.monotonic()
            if left_s <= 0:
                raise DemoError(f"not finished within {self.args.time_limit:.0f} s (--time-limit)")
            with contextlib.suppress(queue.Empty):  # check the condition and the time again
                self.on_line(self.lines.get(timeout=min(left_s, 1.0)))
            for name, node in self.nodes.items():
                if node.process.poll() and name != self.lost:
                    self.drain()
                    raise DemoError(f"torchrun of node {name} ended with exit code {node.process.returncode}")
            if not self.alive() and not until():
                self.drain()
                raise DemoError("the job ended too early; try more epochs (--epochs)")
        if not self.alive():
            self.drain()

    def drain(self) -> None:
        """Read the remaining output of ended nodes, until it ends or is silent for 0.5 s."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.on_line(self.lines.get(timeout=0.5))

    # Meaning of the lines.

    def on_line(self, line: Line) -> None:
        if line.text is None:
            code = self.nodes[line.node].process.wait()
            self.account.say(line.node, f"torchrun ended with exit code {code}", "bad" if code else "plain", line.at)
        elif match := OURS.search(line.text):
            self.on_event(line, match["level"] or "INFO", match["message"])
        elif match := EPOCH.search(line.text):
            self.on_epoch(line, match)
        elif match := ORIGIN.search(line.text):  # a new generation of workers
            self.epochs_in_world = 0
            if self.killed_at_epoch is not None and match[1].startswith(("resumed", "training from")):
                self.resumed_after_kill = True
            origin = match[1].removesuffix(f" from {self.folder / 'digits.pt'}")
            self.account.say(line.node, f"{match[2]} workers connected: {origin}", at=line.at)

    def on_event(self, line: Line, level: str, message: str) -> None:
        """Show an event of the rendezvous, and only once if several nodes report it."""
        if self.change and self.change.what == "C was started" and f"{NODES['C']} " in message and "joined" in message:
            self.change = Change("C joined", line.at)
        if self.change and PLACED.search(message):
            self.change.placed_at = line.at
        # Nodes report the same event with their address in front: `127.0.0.3: the world must re-form: ...`.
        nodes = self.reported.setdefault(re.sub(r"^[\d.]+: ", "", message), set())
        if line.node in nodes:
            nodes.clear()  # it has happened again
        nodes.add(line.node)
        if len(nodes) == 1:
            self.account.say(line.node, message, "bad" if level in {"WARN", "WARNING", "ERROR"} else "plain", line.at)

    def on_epoch(self, line: Line, match: re.Match[str]) -> None:
        epoch, last, world = int(match[1]), int(match[2]), int(match[3])
        first = self.epochs_in_world == 0
        self.world, self.epoch, self.accuracy = world, epoch, float(match[5])
        self.epochs_in_world += 1
        if first:
            self.worlds.append(world)
            if self.change:
                self.account.say("demo", f"a world of {world} trains, {self.change.account(line.at)}", "good", line.at)
                if world == self.change.world:
                    self.change = None
        if first or epoch == last or epoch % max(1, self.args.every) == 0:
            text = f"epoch {epoch:>3}/{last}   world {world}   loss {match[4]}   test accuracy {self.accuracy:.3f}"
            self.account.say(line.node, text, "dim", line.at)

    def workers(self) -> dict[int, tuple[int, str]]:
        """Return the process id and the node of each worker, by rank."""
        agents = {node.process.pid: name for name, node in self.nodes.items()}
        workers: dict[int, tuple[int, str]] = {}
        for pid, env in processes_of(self.marker):
            with contextlib.suppress(OSError):
                # The worker's guard is between the agent and the worker.
                if "RANK" in env and (name := agents.get(parent_of(parent_of(pid)))):
                    workers[int(env["RANK"])] = (pid, name)
        return workers

    def pids(self) -> set[int]:
        return {pid for pid, _ in self.workers().values()}

    def kill_worker(self) -> int:
        """Kill a worker, and return its process id."""
        workers = self.workers()
        candidates = [rank for rank, (_, name) in workers.items() if rank != 0 and name != "A"]
        rank = max(candidates, default=None) if self.args.kill_rank is None else self.args.kill_rank
        if rank not in workers:
            raise DemoError(f"no worker to kill: rank {rank} is not among {sorted(workers)}")
        pid, name = workers[rank]
        self.killed_at_epoch, self.killed_rank = self.epoch, rank
        self.change = Change("the kill", time.monotonic())
        self.account.say("demo", f"rank {rank} on node {name} (pid {pid}) is killed with SIGKILL", "event")
        os.kill(pid, signal.SIGKILL)
        return pid

    def explain(self) -> None:
        """Ask the coordinator why the workers were restarted."""
        self.account.say("demo", f"elastic-rs why {self.endpoint}", "event")
        command = [sys.executable, "-m", "elastic_rs", "why", self.endpoint]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        for line in said.splitlines():
            self.account.say("", line)
        self.explained = re.search(rf" rank {self.killed_rank} SIGKILL .* root cause", said) is not None

    def verify(self) -> None:
        codes = {name: node.process.returncode for name, node in self.nodes.items()}
        ended_well = {name for name, code in codes.items() if code == 0} | {self.lost}
        expectations = [
            (3 * WORKERS_PER_NODE in self.worlds, "the third node was admitted to the running job"),
            (
                self.killed_at_epoch is not None and self.resumed_after_kill,
                f"training went on from a {'commit' if self.args.in_place else 'checkpoint'} after the kill",
            ),
            (self.change is None, "the full world trained again after the kill"),
            (self.epoch == self.args.epochs, f"all {self.args.epochs} epochs were trained"),
            (ended_well >= set(NODES), "every torchrun that was not killed ended with exit code 0"),
            (self.accuracy >= REQUIRED_ACCURACY, f"test accuracy {self.accuracy:.3f}, at least {REQUIRED_ACCURACY}"),
        ]
        if self.cluster is not None:
            expectations += [
                (self.member_was_killed, "no worker was restarted when a member of etcd was killed"),
                (self.lost is not None, "the other nodes trained on without the node that held rank 0"),
            ]
        else:
            expectations.append((self.explained, "`elastic-rs why` names the worker that was killed, and what it cost"))
        if self.args.in_place:
            expectations += [
                (kept, f"the other workers kept their processes when {what}") for what, kept in self.kept.items()
            ]
        print()
        for held, text in expectations:
            print(self.account.paint(f"  {'ok    ' if held else 'FAILED'}  {text}", "good" if held else "bad"))
        if not all(held for held, _ in expectations):
            raise DemoError("not everything happened as it should")


def last_lines(log: Path, count: int = 30) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-count:] if log.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description="An elastic job: a third node joins, a worker is killed, training goes on."
    )
    parser.add_argument("--epochs", type=int, default=None, help="epochs to train (default: 80; with etcd 120)")
    parser.add_argument("--every", type=int, default=10, help="show each N-th epoch (default: %(default)s)")
    parser.add_argument(
        "--kill-rank", type=int, metavar="RANK", help="kill this rank (default: the last one not on node A)"
    )
    parser.add_argument("--time-limit", type=float, default=300, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="write the nodes' full output here and keep it")
    parser.add_argument(
        "--backend",
        default="rust-c10d",
        help="how nodes meet: over a coordinator in node A, or over an etcd cluster (default: %(default)s)",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="healthy workers keep their processes and the state in their memory"
    )
    args = parser.parse_args()
    args.epochs = args.epochs or (120 if args.backend == "rust-etcd" else 80)

    for number in (signal.SIGTERM, signal.SIGHUP):  # end in the same orderly way as for Ctrl-C
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))

    if args.keep_logs:
        args.keep_logs.mkdir(parents=True, exist_ok=True)
    folder = (args.keep_logs or Path(tempfile.mkdtemp(prefix="elastic_rs-demo-"))).resolve()
    (folder / "digits.pt").unlink(missing_ok=True)  # of an earlier demo in the same folder
    account = Account()
    demo = Demo(args, folder, account)
    code, reason = 1, "FAILED: an error in the demo itself; see below"
    try:
        demo.run()
        code = 0
    except DemoError as error:
        reason = f"FAILED: {error}"
        account.say("demo", reason, "bad")
    except KeyboardInterrupt:
        account.say("demo", "interrupted", "bad")
        code = 130
    finally:
        # A second Ctrl-C must not leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Read these lines before the nodes are stopped, because messages about the stop are not the cause.
        tails = {node.log: last_lines(node.log) for node in demo.nodes.values()}
        stop(list(demo.nodes.values()), demo.marker)
        if demo.cluster is not None:
            demo.cluster.close()
        if code == 1:
            for log, lines in tails.items():
                print(f"\n--- {log}: the last lines ---", *lines, sep="\n")
            print(f"\n{account.paint(reason, 'bad')}\nfull logs: {folder}")
        elif not args.keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
    if code == 0:
        print(f"\ndone in {time.monotonic() - account.started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
