"""``examples/ray`` on a local Ray cluster of several nodes, one of which is lost, and one added."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.machines import Lan
from helpers.procs import Job

from .conftest import EXAMPLES, SCRIPTS, WORKER

RECIPE = EXAMPLES / "ray" / "elastic_on_ray.py"
# Beside the environment that runs the test (`python tools/environment.py --ray`).
RAY = Path(sys.prefix).parent / "ray"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RAY.exists(), reason="Ray is not installed: `python tools/environment.py --ray`"),
]


@pytest.fixture
def short() -> Iterator[str]:
    """Return a folder whose name is short enough for Ray's Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield folder


def test_a_node_is_lost_and_another_one_added(job: Job, lan: Lan, tmp_path: Path, short: str) -> None:
    done = tmp_path / "done"
    env = {
        "PYTHONPATH": str(RAY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TMPDIR": short,
    }
    machine = lan.machine("head")
    # Nodes of Ray's own test cluster: a raylet each, on one machine.
    script = [str(SCRIPTS / "ray_cluster.py"), str(tmp_path / "orders")]
    cluster = job.start([*machine.inside(), sys.executable, *script], name="cluster", env=env)
    address = cluster.line(r"CLUSTER (\S+)")[1]

    def order(what: str) -> None:
        with (tmp_path / "orders").open("a") as orders:
            orders.write(f"{what}\n")

    nodes = [cluster.line(rf"NODE {number} (\S+)")[1] for number in range(2)]
    assert len({*nodes}) == 2
    recipe = job.start(
        [
            *machine.inside(),
            sys.executable,
            str(RECIPE),
            f"--address={address}",
            "--nodes=1:3",
            "--workers=1",
            "--rdzv-conf=last_call_timeout=2",
            str(WORKER),
            "--until",
            str(done),
        ],
        name="recipe",
        env=env,
    )
    for rank in range(2):
        recipe.line(rf"SUM rank={rank} world=2\b")
    mark = recipe.mark()
    order("add")
    for rank in range(3):
        recipe.line(rf"SUM rank={rank} world=3\b", since=mark)
    mark = recipe.mark()
    order("remove 0")
    recipe.line(r"an agent is lost", since=mark)
    for rank in range(2):
        recipe.line(rf"SUM rank={rank} world=2\b", since=mark)
    done.touch()
    assert recipe.wait() == 0
    order("end")
    assert cluster.wait() == 0
    job.kill_leftovers()  # of Ray's own processes
