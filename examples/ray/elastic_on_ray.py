"""Run elastic-run on the nodes of a Ray cluster: one actor per node, each of which runs one agent.

    ray job submit --working-dir . -- python elastic_on_ray.py --nodes 2:4 --gpus 8 --workers gpu train.py --lr 0.1

The process that runs this script hosts the coordinator. On a cluster that is the head node, whose loss ends a Ray
cluster anyway. Nodes that Ray adds later get an agent, up to the maximum, and join the job while it trains. When Ray
loses a node, the other agents go on without it. An agent ends with its actor, and all end with this script.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

# Ray reads it when it is imported: every line of every worker is shown, also one that looks like another.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LOOK_EVERY_S = 1.0
USAGE = 2
"""The agent's exit code if its script is not on that node."""
LEFT = {128 + signal.SIGTERM, 91}
"""Its exit codes if SIGTERM has ended it: 91 with --exit-code=class."""
TRIES = 3
"""How often an agent is started on a node that cannot run it."""


def main() -> int:
    args = parse_args()
    ray.init(address=args.address)
    with Coordinator() as coordinator:
        command = [
            "elastic-run",
            f"--nnodes={args.nodes}",
            f"--nproc-per-node={args.workers}",
            f"--max-restarts={args.max_restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={coordinator.endpoint}",
            f"--rdzv-id={ray.get_runtime_context().get_job_id()}",
            # No agent hosts the coordinator, and none outlives it for long.
            f"--rdzv-conf=is_host=0,coordinator_timeout=10{',' + args.rdzv_conf if args.rdzv_conf else ''}",
            f"--log-dir={args.log_dir}",
            *args.script,
        ]
        resources = {"num_cpus": args.cpus, "num_gpus": args.gpus}
        return follow(command, resources, most=int(args.nodes.rpartition(":")[2]))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run elastic-run on the nodes of a Ray cluster.")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: %(default)s)")
    parser.add_argument("--nodes", default="1", metavar="N|MIN:MAX", help="as --nnodes of elastic-run")
    parser.add_argument("--workers", default="auto", help="per node, as --nproc-per-node (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1, help="of each node, as Ray counts (default: %(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="of each node, as Ray counts (default: %(default)s)")
    parser.add_argument("--max-restarts", type=int, default=3, help="as --max-restarts (default: %(default)s)")
    parser.add_argument("--rdzv-conf", default="", metavar="KEY=VALUE,...", help="as --rdzv-conf")
    parser.add_argument(
        "--log-dir",
        default="/tmp/elastic-logs",
        help="on each node; elastic-rs why --events reads it (default: %(default)s)",
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the training script and its arguments")
    return parser.parse_args()


class Coordinator:
    """The store and the coordinator, beside this script, at any free port of this node."""

    def __enter__(self) -> Coordinator:
        # Without `setpriv` the process would outlive a script that is killed.
        command = ["setpriv", "--pdeathsig=TERM", "elastic-rs", "store", "serve", "--port=0", "--drain-timeout=5"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # listening on [::]:29400
        found = re.search(r":(\d+)$", line)
        if found is None:
            raise RuntimeError(f"elastic-rs store serve: it has said `{line}` and ended with {self._process.wait()}")
        self.endpoint = f"{get_node_ip_address()}:{found[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


@ray.remote(max_restarts=0)
class Agent:
    """One agent. Ray ends the actor, or loses its node: the agent ends too, and its workers with it."""

    def run(self, command: list[str]) -> int:
        """Run elastic-run until it ends, and return its exit code."""
        self._process = subprocess.Popen(["setpriv", "--pdeathsig=TERM", *command])
        return self._process.wait()


def follow(command: list[str], resources: dict[str, float], most: int) -> int:
    """Give every node an agent, up to ``most``, until the job is over. Returns its exit code.

    A node on which no agent can run is tried ``TRIES`` times. With no other node the job has failed.
    """
    actor_class: Any = Agent
    running: dict[str, tuple[Any, Any]] = {}  # by node: its actor, and what it will return
    failures: dict[str, int] = {}  # by node: how often it could not run an agent
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"] and fits(node, resources)]
        if nodes and not running and all(failures.get(node["NodeID"], 0) >= TRIES for node in nodes):
            print("no node can run an agent", file=sys.stderr, flush=True)
            return 1
        for node in nodes:
            name = node["NodeID"]
            if name not in running and len(running) < most and failures.get(name, 0) < TRIES:
                # Not on another node: `soft`. An actor that finds no room waits for it.
                place = NodeAffinitySchedulingStrategy(name, soft=False)
                actor = actor_class.options(scheduling_strategy=place, **resources).remote()
                running[name] = (actor, actor.run.remote(command))
                print(f"an agent starts on {node['NodeManagerAddress']} ({len(running)} of {most})", flush=True)
        pending = [result for _, result in running.values()]
        if not pending:
            time.sleep(LOOK_EVERY_S)
            continue
        ended, _ = ray.wait(pending, num_returns=1, timeout=LOOK_EVERY_S)
        for name, (_, result) in [*running.items()]:
            if result not in ended:
                continue
            try:
                code = ray.get(result)
            except RayActorError as error:  # its node is gone; if it comes back, it gets a new agent
                print(f"an agent is lost: {error}", file=sys.stderr, flush=True)
                del running[name]
                continue
            except RayTaskError as error:  # elastic-run or setpriv is not there
                print(f"an agent cannot be started: {error.cause}", file=sys.stderr, flush=True)
                code = USAGE
            # An agent that ends by itself ends as the job does: 0, or another code with the first failure on stderr.
            if code >= 0 and code not in {USAGE, *LEFT}:
                return wait_for_all(running, code)
            failures[name] = failures.get(name, 0) + (code == USAGE)
            del running[name]


def fits(node: dict[str, Any], resources: dict[str, float]) -> bool:
    """Whether the node has what an agent takes, if nobody else is there."""
    has = node["Resources"]
    return has.get("CPU", 0) >= resources["num_cpus"] and has.get("GPU", 0) >= resources["num_gpus"]


def wait_for_all(running: dict[str, tuple[Any, Any]], code: int) -> int:
    """Let the other agents end too: they have heard of the end already."""
    for _, result in running.values():
        try:
            code = max(code, ray.get(result, timeout=60))
        except (RayActorError, RayTaskError, TimeoutError) as error:
            print(f"an agent has not ended: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
