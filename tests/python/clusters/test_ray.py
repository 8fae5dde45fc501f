"""``examples/ray`` on a local Ray cluster of several nodes, one of which is lost, and one added."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.machines import Lan
from helpers.procs import Job, Process

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


class Cluster:
    """A cluster of a head and two nodes with room for an agent each."""

    def __init__(self, job: Job, lan: Lan, folder: Path, short: str) -> None:
        self._job = job
        self._orders, self._logs = folder / "orders", folder / "logs"
        self._env = {
            "PYTHONPATH": str(RAY),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": short,
        }
        self._machine = lan.machine("head")
        self.process = self._start("cluster", SCRIPTS / "ray_cluster.py", self._orders)
        self._address = self.process.line(r"CLUSTER (\S+)")[1]
        assert len({self.process.line(rf"NODE {number} (\S+)")[1] for number in range(2)}) == 2

    def order(self, what: str) -> None:
        with self._orders.open("a") as orders:
            orders.write(f"{what}\n")

    def recipe(self, *worker: str | Path) -> Process:
        """Start the recipe, with these arguments of the worker."""
        conf = "--rdzv-conf=last_call_timeout=2"
        options = [f"--address={self._address}", "--nodes=1:3", "--workers=1", conf, f"--log-dir={self._logs}"]
        return self._start("recipe", RECIPE, *options, WORKER, *worker)

    def _start(self, name: str, *script: str | Path) -> Process:
        command = [*self._machine.inside(), sys.executable, *map(str, script)]
        return self._job.start(command, name=name, env=self._env)


@pytest.fixture
def cluster(job: Job, lan: Lan, tmp_path: Path, short: str) -> Iterator[Cluster]:
    cluster = Cluster(job, lan, tmp_path, short)
    yield cluster
    cluster.order("end")
    assert cluster.process.wait() == 0
    job.kill_leftovers()  # of Ray's own processes


def test_a_node_is_lost_and_another_one_added(cluster: Cluster, tmp_path: Path) -> None:
    done = tmp_path / "done"
    recipe = cluster.recipe("--until", done)
    for rank in range(2):
        recipe.line(rf"SUM rank={rank} world=2\b")
    mark = recipe.mark()
    cluster.order("add")
    for rank in range(3):
        recipe.line(rf"SUM rank={rank} world=3\b", since=mark)
    mark = recipe.mark()
    cluster.order("remove 0")
    recipe.line(r"an agent is lost", since=mark)
    for rank in range(2):
        recipe.line(rf"SUM rank={rank} world=2\b", since=mark)
    done.touch()
    assert recipe.wait() == 0


def test_agents_end_with_the_script(cluster: Cluster, job: Job, tmp_path: Path) -> None:
    recipe = cluster.recipe("--until", tmp_path / "never")
    workers = {int(recipe.line(rf"WORKER rank={rank} world=2 .*pid=(\d+)")[1]) for rank in range(2)}
    assert workers < {*job.pids()}
    recipe.signal(signal.SIGKILL)
    job.until_gone(*workers)


def test_a_job_that_fails_is_the_scripts_failure(cluster: Cluster) -> None:
    recipe = cluster.recipe("--fail", "1:7")
    assert recipe.wait() == 1
    recipe.line(r"exitcode\s*: 7")
