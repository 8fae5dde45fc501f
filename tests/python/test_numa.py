"""``--numa-binding``: PyTorch's rules, on machines that ``/sys`` describes, and what workers get on this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_rs import _elastic_rs

MODES = ["node", "socket", "exclusive", "core-complex"]
SHOW = "import os; os.write(1, f'{os.environ[\"RANK\"]} {sorted(os.sched_getaffinity(0))}\\n'.encode())"


def describe(root: Path, *, sockets: int, nodes: int, cores: int, per_cache: int, gpus: list[int]) -> list[str]:
    """Describe a machine as ``/sys`` does: nodes of a socket, cores of a node with two threads each, cores of a cache.

    Returns:
        The PCI addresses of its GPUs, which are near these nodes.
    """
    count = sockets * nodes * cores

    def write(path: str, text: object) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")

    write("devices/system/node/online", f"0-{sockets * nodes - 1}")
    write("devices/system/node/possible", f"0-{sockets * nodes - 1}")
    for node in range(sockets * nodes):
        low = node * cores
        write(
            f"devices/system/node/node{node}/cpulist",
            f"{low}-{low + cores - 1},{count + low}-{count + low + cores - 1}",
        )
    for cpu in range(2 * count):
        core, folder = cpu % count, f"devices/system/cpu/cpu{cpu}"
        write(f"{folder}/topology/physical_package_id", core // (nodes * cores))
        write(f"{folder}/topology/thread_siblings_list", f"{core},{core + count}")
        low = core // per_cache * per_cache
        shared = f"{low}-{low + per_cache - 1},{low + count}-{low + count + per_cache - 1}"
        for index, (kind, level, who) in enumerate(
            [("Data", 1, f"{core}"), ("Instruction", 9, ""), ("Unified", 3, shared)]
        ):
            for name, value in (("type", kind), ("level", level), ("shared_cpu_list", who)):
                write(f"{folder}/cache/index{index}/{name}", value)
    addresses = [f"0000:{16 + number:02x}:00.0" for number in range(len(gpus))]
    for address, node in zip(addresses, gpus, strict=True):
        write(f"bus/pci/devices/{address}/numa_node", node)
    return addresses


MACHINES: list[dict[str, Any]] = [
    {"sockets": 1, "nodes": 1, "cores": 8, "per_cache": 4, "gpus": [-1, -1]},
    {"sockets": 2, "nodes": 1, "cores": 8, "per_cache": 8, "gpus": [0, 0, 1, 1]},
    {"sockets": 2, "nodes": 4, "cores": 6, "per_cache": 3, "gpus": [3, 3, 1, 1, 7, 7, 5, 5]},
    {"sockets": 2, "nodes": 2, "cores": 7, "per_cache": 1, "gpus": [2, 0, 2]},
]


@pytest.mark.parametrize("machine", MACHINES, ids=["one node", "two sockets", "four nodes a socket", "odd"])
@pytest.mark.parametrize("mode", MODES)
def test_workers_get_the_cpus_that_pytorch_gives_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: dict[str, Any], mode: str
) -> None:
    binding = pytest.importorskip("torch.numa.binding")
    if mode not in {member.value for member in binding.AffinityMode}:
        pytest.skip("this torch has no such binding")
    gpus = describe(tmp_path, **machine)
    threads = 2 * machine["sockets"] * machine["nodes"] * machine["cores"]
    allowed = set(range(threads)) - {1, threads - 1}  # as in a cpuset

    def moved(path: str) -> str:
        return str(path).replace("/sys", str(tmp_path), 1)

    listed = os.listdir
    monkeypatch.setattr(binding, "open", lambda path: io.StringIO(Path(moved(path)).read_text()), raising=False)
    fake = SimpleNamespace(path=os.path, listdir=lambda path: listed(moved(path)), sched_getaffinity=lambda _: allowed)
    monkeypatch.setattr(binding, "os", fake)
    nodes = [max(node, 0) for node in machine["gpus"]]
    # Newer versions say "device" where older ones say "gpu".
    for name in ("device", "gpu"):
        by_index = f"_get_numa_node_index_for_{name}_index"
        monkeypatch.setattr(binding, by_index, lambda **given: nodes[next(iter(given.values()))], raising=False)
        monkeypatch.setattr(binding, f"_get_{name}_count", lambda: len(nodes), raising=False)
    which = binding._get_logical_cpus_to_bind_to
    index = "device_index" if "device_index" in which.__code__.co_varnames else "gpu_index"
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    expected = [sorted(which(**{index: number}, numa_options=options)) for number in range(len(nodes))]
    cpus, notes, _ = _elastic_rs.cpus_of_workers(mode, len(gpus), gpus, allowed=sorted(allowed), root=tmp_path)
    assert (cpus, notes) == (expected, [])


def test_workers_without_gpus_are_spread_over_the_nodes(tmp_path: Path) -> None:
    describe(tmp_path, sockets=2, nodes=1, cores=4, per_cache=4, gpus=[])
    cpus, _, words = _elastic_rs.cpus_of_workers("node", 3, [], allowed=list(range(16)), root=tmp_path)
    assert words == "0: 0-3,8-11; 1: 0-3,8-11; 2: 4-7,12-15"
    assert cpus[2] == [4, 5, 6, 7, 12, 13, 14, 15]


def test_an_unknown_binding_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="must be node, socket, exclusive or core-complex"):
        _elastic_rs.cpus_of_workers("core", 1, [])


@pytest.mark.parametrize("warm", [False, True])
def test_workers_on_a_machine_without_a_gpu_are_bound_to_what_there_is(tmp_path: Path, *, warm: bool) -> None:
    """Without torch in the agent, without ``numactl``, also where workers are forked from a template."""
    script = tmp_path / "train.py"
    script.write_text(SHOW)
    flags = [
        "--standalone",
        "--nproc-per-node=2",
        "--numa-binding=exclusive",
        *(["--warm-modules=json"] if warm else []),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "elastic_rs.run", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    expected, _, words = _elastic_rs.cpus_of_workers("exclusive", 2, [])
    assert sorted(done.stdout.splitlines()) == [f"{rank} {cpus}" for rank, cpus in enumerate(expected)]
    assert f"workers are spread over the NUMA nodes in order: {words}" in done.stderr
    assert "warm" not in done.stderr or warm
