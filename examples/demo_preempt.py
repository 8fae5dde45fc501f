"""Show what a notice does: ``make demo DEMO_ARGS=--preempt``.

Three nodes with two workers each train examples/digits_elastic.py. Then two of the machines are to be taken away, one
two seconds after the other, with 12 seconds left: their agents find the file that says so. The workers of all nodes
stop once, at the same step, and those of node A go on in the same processes. The agents of the two nodes end before
their time is over.

The exit code is 0 only if all of this happened, and no step was made twice. A "node" is an agent on this machine with a
separate loopback address.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from demo_nodes import Line, ShortDemo, present

SCRIPT = Path(__file__).resolve().with_name("digits_elastic.py")
NODES = {"A": "127.0.0.2", "B": "127.0.0.3", "C": "127.0.0.4"}
WORKERS_PER_NODE = 2
RANKS = WORKERS_PER_NODE * len(NODES)
LEFT_S = 12
PREEMPTED = 143

WORLD = re.compile(r"training from (epoch \d+, image \d+)  world (\d+)  pid (\d+)")
EPOCH = re.compile(r"(epoch (\d+)/\d+  world (\d+)  .*)")
TOLD = re.compile(r"(its machine is taken away .*): this node leaves within")


class Demo(ShortDemo):
    ENDS: ClassVar = {0, PREEMPTED}

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__(args, folder)
        self.epoch = 0
        self.worlds: list[tuple[int, int]] = []
        """Size of each world, and the process of its rank 0."""

    def run(self) -> None:
        for name in NODES:
            self.start_node(name)
            # So that node A has rank 0, which prints.
            self.follow(until=lambda: bool(self.worlds))
        self.follow(until=lambda: self.worlds[-1][0] == RANKS and self.epoch >= 5)
        before = self.worlds[-1]
        left: dict[str, float] = {}
        for name in ("B", "C"):
            self.say(f"node {name}'s machine is to be taken away: {LEFT_S} s are left")
            self.notice_of(name).write_text(f"{LEFT_S} seconds\n")
            left[name] = time.monotonic() + LEFT_S
            until = time.monotonic() + 2
            self.follow(until=lambda until=until: time.monotonic() >= until)  # type: ignore[misc]
        in_time = {}
        for name in ("B", "C"):
            self.follow(until=lambda name=name: self.have_ended(name))  # type: ignore[misc]
            in_time[name] = time.monotonic() < left[name] + 0.5
        self.follow(until=lambda: self.worlds[-1][0] == WORKERS_PER_NODE)
        after = self.epoch
        self.follow(until=lambda: self.epoch > after)
        self.show("why", shows="taken away")
        events = self.events()
        self.follow(until=lambda: self.have_ended("A"))
        told = [event["data"] for event in events if event["data"].get("step_before") is not None]
        steps = [(data["step_before"], data["step"]) for data in told]
        last = steps[-1] if steps else None
        kinds = [event["type"] for event in events]
        since = kinds[kinds.index("node.leaves") :]
        codes = [self.nodes[name].process.returncode for name in NODES]
        self.verify([
            ((since.count("node.leaves"), since.count("round.changes")) == (2, 1), "two notices are one change"),
            (self.worlds[-1] == (WORKERS_PER_NODE, before[1]), "rank 0 has trained on in the same process"),
            (last is not None and last[1] == last[0] + 1, f"no step was lost or made twice: {last}"),
            (all(in_time.values()), f"both agents ended within {LEFT_S} s of their notices"),
            (codes == [0, PREEMPTED, PREEMPTED], f"with exit code {PREEMPTED}, and that of node A with 0"),
        ])  # fmt: skip

    def notice_of(self, name: str) -> Path:
        return self.folder / f"taken-away-{name}"

    def start_node(self, name: str) -> None:
        flags = [
            f"--nnodes=1:{len(NODES)}", f"--nproc-per-node={WORKERS_PER_NODE}", "--rdzv-conf=last_call_timeout=1",
            f"--preempt-notice=file:{self.notice_of(name)}",
        ]  # fmt: skip
        of_script = [
            f"--epochs={self.args.epochs}",
            f"--checkpoint={self.folder / 'digits.pt'}",
            "--min-epoch-time=0.25",
        ]
        self.start(name, NODES[name], flags, SCRIPT, *of_script)

    def on_line(self, line: Line) -> None:
        super().on_line(line)
        if line.text is None:
            return
        if match := WORLD.search(line.text):
            self.worlds.append((int(match[2]), int(match[3])))
            self.account.say(line.node, f"a world of {match[2]} trains from {match[1]}", "good", line.at)
        elif match := TOLD.search(line.text):
            self.account.say(line.node, match[1], "bad", line.at)
        elif match := EPOCH.search(line.text):
            self.epoch = int(match[2])
            if self.epoch % 10 == 0:
                self.account.say(line.node, match[1], "dim", line.at)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ask("events", "--json", shows="node.leaves").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Two machines are taken away, and the training goes on.")
    parser.add_argument("--epochs", type=int, default=120, help="to train (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=200, metavar="SECONDS", help="(default: %(default)s)")
    return present(Demo, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
