"""A Ray cluster of several nodes on one machine, which does what is written into a file.

ray_cluster.py ORDERS    lines: `add` a node, `remove N`, `end`

It prints `CLUSTER address`, and `NODE N id` for each node with room for an agent. The head has no CPUs.
"""

import sys
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

orders = Path(sys.argv[1])
orders.touch()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes: list[Any] = []


def add() -> None:
    nodes.append(cluster.add_node(num_cpus=1))
    cluster.wait_for_nodes()
    print(f"NODE {len(nodes) - 1} {nodes[-1].node_id}", flush=True)


print(f"CLUSTER {cluster.address}", flush=True)
add()
add()
seen = 0
while True:
    words = [line.split() for line in orders.read_text().splitlines()][seen:]
    seen += len(words)
    for what, *number in words:
        if what == "add":
            add()
        elif what == "remove":
            cluster.remove_node(nodes[int(number[0])], allow_graceful=False)
        else:
            cluster.shutdown()
            sys.exit(0)
    time.sleep(0.1)
