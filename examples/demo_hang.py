"""Show how a hang is named: ``make demo DEMO_ARGS=--hang``.

Two nodes with two workers each train examples/reads_shards.py. After some steps the file system of one rank's data
dies. The rank sleeps in a read, and the others wait for it in a collective. No process has failed, so nothing would
happen for 30 minutes. The demo shows what `elastic-rs status` and `elastic-rs stacks` say, and the lines on the
terminal of rank 0. Then the file system answers again, and the training goes on.

The exit code is 0 only if all of this happened, and the right rank was named. A "node" is an agent on this machine with
a separate loopback address. The dead file system is a named pipe into which nobody writes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from demo_nodes import Line, ShortDemo, present

SCRIPT = Path(__file__).resolve().with_name("reads_shards.py")
NODES = {"A": "127.0.0.2", "B": "127.0.0.3"}
WORKERS_PER_NODE = 2
RANKS = WORKERS_PER_NODE * len(NODES)
BATCH = bytes(64)
HANG_TIMEOUT_S = 5

FOUND = re.compile(r"(training stands still for .*)")
OVER = re.compile(r"(training goes on, after .*)")
STEP = re.compile(r"step (\d+)$")


class Demo(ShortDemo):
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(args, folder)
        self.step = 0
        self.found: list[str] = []
        """The lines of the hang on rank 0's terminal."""
        self.over: str | None = None
        self.shard = folder / f"rank-{args.rank}-shard-1"

    def run(self) -> None:
        for rank in range(RANKS):
            for number in range(2):
                (self.folder / f"rank-{rank}-shard-{number}").write_bytes(BATCH)
        self.shard.unlink()
        os.mkfifo(self.shard)
        dead = os.open(self.shard, os.O_RDWR)  # with a writer that writes nothing, a read does not end
        try:
            for name in NODES:
                self.start_node(name)
            self.follow(until=lambda: self.step >= 100)
            self.say(
                f"now the file system of {self.shard.name} dies: rank {self.args.rank} will not return from a read"
            )
            status = self.show("status", shows=r"(waits|HANGS) ")
            stacks = self.show("stacks", shows=self.shard.name)
            self.follow(until=lambda: any("--hang=" in line for line in self.found))
            self.say("the file system answers again")
            os.write(dead, BATCH)
        finally:
            os.close(dead)
        self.follow(until=lambda: self.over is not None)
        self.follow(until=lambda: self.have_ended(*NODES))
        self.check_all(status, stacks)

    def start_node(self, name: str) -> None:
        flags = [f"--nnodes={len(NODES)}", f"--nproc-per-node={WORKERS_PER_NODE}", f"--hang-timeout={HANG_TIMEOUT_S}"]
        self.start(name, NODES[name], flags, SCRIPT, str(self.folder))

    def on_line(self, line: Line) -> None:
        super().on_line(line)
        if line.text is None:
            return
        if (match := FOUND.search(line.text)) and not self.found:
            self.say(f"the terminal of rank 0, after {HANG_TIMEOUT_S} s (--hang-timeout={HANG_TIMEOUT_S}):")
            self.found = [match[1]]
            self.account.say(line.node, match[1], "bad", line.at)
        elif self.found and line.text.startswith("  ") and not self.over:
            self.found.append(line.text)
            self.account.say(line.node, line.text, "bad", line.at)
        elif match := OVER.search(line.text):
            self.over = match[1]
            self.account.say(line.node, match[1], "good", line.at)
        elif match := STEP.search(line.text):
            self.step = int(match[1])
            if self.step % 20 == 0:
                self.account.say(line.node, f"step {self.step}", "dim", line.at)

    def check_all(self, status: str, stacks: str) -> None:
        rank, shard = self.args.rank, re.escape(self.shard.name)
        place = r"reads_shards\.py:\d+"
        self.verify([
            (re.search(rf"for rank {rank} at {place}", status), f"`elastic-rs status` names rank {rank} and its line"),
            (re.search(rf"1 rank +{rank} .*{shard}", stacks), "`elastic-rs stacks` shows the file that it reads"),
            (
                re.search(rf"for rank {rank} .*\n  rank {rank} has not entered .*{shard}.*\n  at load_batch {place}",
                          "\n".join(self.found)),
                "the terminal of rank 0 says which rank, which collective, which file and which line",
            ),
            (self.over, "the training went on by itself"),
            (all(node.process.returncode == 0 for node in self.nodes.values()), "both agents ended with exit code 0"),
        ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="A training that hangs, and goes on.")
    parser.add_argument("--rank", type=int, choices=range(RANKS), default=3, help="that hangs (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=200, metavar="SECONDS", help="(default: %(default)s)")
    args = parser.parse_args()
    return present(Demo, args)


if __name__ == "__main__":
    sys.exit(main())
