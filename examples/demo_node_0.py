"""Show that node 0 may die: ``make demo DEMO_ARGS=--node-0-dies``.

Three nodes with one worker each train examples/digits_elastic.py, and each is one of the three endpoints. The agent of
the node that leads is killed with SIGKILL: another one leads, the world changes in place, and the workers of the others
go on in the same processes. The dead node is started again and joins. Then the agent that leads now is killed, too.

The exit code is 0 only if all of this happened. A "node" is an agent on this machine with a separate loopback address.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

from demo_nodes import Line, ShortDemo, free_endpoint, present

SCRIPT = Path(__file__).resolve().with_name("digits_elastic.py")
NODES = {"A": "127.0.0.2", "B": "127.0.0.3", "C": "127.0.0.4"}

EPOCH = re.compile(r"(epoch (\d+)/\d+  world (\d+)  .*)")
LISTENS = re.compile(r"this process may lead the job: (it listens at \S+)")
LEADS = re.compile(r"this process leads the run")
SHOWN = re.compile(r"(this process (?:no longer )?leads the run|round \d+ is (?:interrupted|complete) [^(]*)")


class Demo(ShortDemo):
    ENDS: ClassVar = {0, -signal.SIGKILL}
    VARIABLES: ClassVar = {"ELASTIC_RS_LOG": "info"}  # it is said there who leads

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(args, folder)
        self.endpoint = ",".join(free_endpoint() for _ in NODES)
        self.listens: set[str] = set()
        self.leaders: list[str] = []
        self.world = 0
        self.epoch = 0

    def run(self) -> None:
        for name in NODES:
            self.start_node(name)
            self.follow(until=lambda name=name: name in self.listens)  # type: ignore[misc]
        self.follow(until=lambda: self.world == len(NODES) and self.epoch >= 3)
        first = self.leaders[-1]
        took = [self.kill(first)]
        self.say(f"node {first} is started again")
        self.listens.discard(first)
        self.start_node(first)
        self.follow(until=lambda: self.world == len(NODES))
        second = self.leaders[-1]
        took.append(self.kill(second))
        left = [name for name in NODES if name != second]
        self.show("why", shows="round")
        self.follow(until=lambda: self.have_ended(*left))
        codes = [self.nodes[name].process.returncode for name in left]
        self.verify([
            (first == "A", "the first node of the list led"),
            (self.led_in_turn(), f"one node after another has led: {', '.join(self.leaders)}"),
            (max(took) < 10, f"the others trained on after {took[0]:.1f} s and {took[1]:.1f} s"),
            (codes == [0, 0], "the two that are left ended with 0"),
        ])  # fmt: skip

    def led_in_turn(self) -> bool:
        """Whether another node led after each death. The one that was started again may lead, too."""
        return len(self.leaders) == 3 and all(one != other for one, other in itertools.pairwise(self.leaders))

    def kill(self, name: str) -> float:
        """Kill the agent of a node. Return after how long the others have trained on."""
        self.say(f"the agent of node {name}, which leads, is killed with SIGKILL")
        killed_at, epoch = time.monotonic(), self.epoch
        self.nodes[name].process.kill()
        self.follow(until=lambda: self.world == len(NODES) - 1 and self.epoch > epoch)
        return time.monotonic() - killed_at

    def start_node(self, name: str) -> None:
        flags = [f"--nnodes=1:{len(NODES)}", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=1,settle_timeout=1"]
        checkpoint = self.folder / "digits.pt"
        args = [f"--epochs={self.args.epochs}", f"--checkpoint={checkpoint}", "--min-epoch-time=0.25"]
        self.start(name, NODES[name], flags, SCRIPT, *args)

    def on_line(self, line: Line) -> None:
        text = line.text or ""
        if found := LISTENS.search(text):
            self.listens.add(line.node)
            self.account.say(line.node, found[1])
        if LEADS.search(text):
            self.leaders.append(line.node)
        if found := EPOCH.search(text):
            grown = int(found[3]) != self.world
            self.epoch, self.world = int(found[2]), int(found[3])
            if grown or self.epoch % 10 == 0:
                self.account.say(line.node, found[1], "plain" if grown else "dim", line.at)
        elif found := SHOWN.search(text):
            self.account.say(line.node, found[1], "good", line.at)
        super().on_line(line)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train while the nodes that lead are killed, one after another.")
    parser.add_argument("--epochs", type=int, default=120, help="of the training (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="(%(default)s)")
    return present(Demo, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
