"""Nodes in separate network namespaces, one of which is cut off."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.holders import hold
from helpers.procs import Job
from helpers.workers import place

from .conftest import FAMILY, Start

pytestmark = [pytest.mark.torchrun]
SHORT_LEASE = "last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=3"


class Network:
    """Two network namespaces, 10.99.0.1 and 10.99.0.2, and a cable between them."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        first = self._hold("unshare", "--map-root-user", "--net")
        second = self._hold(*self.inside(0), "unshare", "--net")
        self._run(0, f"ip link add cable0 type veth peer name cable1 netns {second.pid}")
        for number in range(2):
            self._run(number, f"ip addr add 10.99.0.{number + 1}/24 dev cable{number}")
            self._run(number, "ip link set lo up")
            self._run(number, f"ip link set cable{number} up")
        assert first.poll() is None

    def inside(self, number: int) -> list[str]:
        """Return the prefix that runs a command in that namespace."""
        return ["nsenter", f"--target={self._holders[number].pid}", "--user", "--net", "--preserve-credentials"]

    def cut(self) -> None:
        """Pull the cable."""
        self._run(0, "ip link set cable0 down")

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()

    def _hold(self, *command: str) -> subprocess.Popen[str]:
        return hold(self._holders, *command)

    def _run(self, number: int, command: str) -> None:
        subprocess.run([*self.inside(number), *command.split()], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    try:
        network.build()
    except (OSError, subprocess.CalledProcessError) as error:
        network.close()
        pytest.skip(f"this machine allows no network namespaces: {error}")
    yield network
    network.close()


@pytest.mark.parametrize(
    "agent", ["rust", *(pytest.param(agent, marks=pytest.mark.long) for agent in ("run", "torch"))], indirect=True
)
def test_a_node_that_is_cut_off_stops_before_the_others_go_on(
    network: Network, start: Start, job: Job, tmp_path: Path
) -> None:
    # pytorch #67616, with `on_partition=stop`.
    done = tmp_path / "done"
    host, other = (
        start(
            number + 2,
            "--until",
            done,
            nnodes="1:2",
            conf=f"{SHORT_LEASE},coordinator_timeout=10,is_host={1 - number}",
            script=FAMILY,
            endpoint="10.99.0.1",
            local_addr=False,
            under=network.inside(number),
        )
        for number in range(2)
    )
    place(host, 2)
    pid = int(place(other, 2)["pid"])
    mark = host.mark()
    network.cut()
    place(host, 1, since=mark)
    assert pid not in job.pids(), "the worker of the cut-off node was still running"
    assert host.running
    done.touch()
    assert host.wait() == 0
    assert other.wait() == 1, "it is out of reach for coordinator_timeout"
