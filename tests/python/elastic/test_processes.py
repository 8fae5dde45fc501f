"""Real processes of two or three ranks over gloo: under PyTorch's torchrun, and with an agent that follows a plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import _elastic_rs

if TYPE_CHECKING:
    from helpers.procs import Job, Process

WORKER = Path(__file__).parents[1] / "scripts" / "elastic_worker.py"
LENGTH = 24

# Every rank has other values, and rank 1 sends its own. Where values are stored does not matter, nor how they travel.
COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
import elastic_rs.elastic as hvd
from elastic_rs.elastic import _wire

rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (rank, 2, True)


def values():
    return {
        "large": torch.randn(300, 40),
        "strided": torch.randn(40, 300).t() if rank else torch.randn(300, 40),
        "channels last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "small": torch.randn(3),
        "bf16": torch.randn(7).bfloat16(),
        "boolean": torch.tensor([rank == 0, rank == 1, True]),
        "complex": torch.randn(2, dtype=torch.complex128),
        "whole": torch.tensor(rank),
        "empty": torch.empty(0),
        "parameter": torch.nn.Parameter(torch.randn(5, 2)),
    }


def numbers(values):
    return {name: value.detach().to(torch.complex128).flatten().tolist() for name, value in values.items()}


torch.manual_seed(rank)
for bucket, part in ((_wire.BUCKET_BYTES, _wire.PART_BYTES), (1000, 7777), (1, 100_000)):
    _wire.BUCKET_BYTES, _wire.PART_BYTES = bucket, part
    mine = values()
    before = numbers(mine)
    hvd.broadcast_parameters(mine, root_rank=1)
    assert numbers(mine) == hvd.broadcast_object(before, 1)
    assert (numbers(mine) == before) is (rank == 1)

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
if rank == 1:  # rank 0 has not taken a step
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
hvd.broadcast_optimizer_state(optimizer, root_rank=1)
assert optimizer.param_groups[0]["lr"] == 1.1
assert optimizer.param_groups[0]["params"][0] is model.weight
weights = hvd.broadcast_object(model.weight.tolist(), 0)
assert weights == model.weight.tolist()
state = optimizer.state_dict()["state"]
assert hvd.broadcast_object(str(state), 0) == str(state) != "{}"

one = torch.tensor([1.0, 5.0]) + rank
for op, expected in (
    (None, [1.5, 5.5]), (hvd.Average, [1.5, 5.5]), (hvd.Sum, [3, 11]), (hvd.Min, [1, 5]), (hvd.Max, [2, 6]),
    (hvd.Product, [2, 30]),
):
    assert hvd.allreduce(one, op=op).tolist() == expected
assert one.tolist() == [1.0 + rank, 5.0 + rank]
assert hvd.allreduce(one, average=False).tolist() == [3, 11]
assert hvd.allreduce(torch.tensor([3 + rank])).tolist() == [3]
assert hvd.allreduce_(one) is one and one.tolist() == [1.5, 5.5]
try:
    hvd.allreduce(one, average=True, op=hvd.Sum)
except ValueError:
    print("done", flush=True)
hvd.shutdown()
"""

World = Callable[..., dict[str, dict[str, Any]]]


def said(process: Process, what: str) -> list[dict[str, Any]]:
    """Return what the workers of the process have said by that word."""
    return [json.loads(line.partition(" ")[2]) for line in process.lines if line.startswith(f"{what} ")]


def one(process: Process, what: str) -> dict[str, Any]:
    (only,) = said(process, what)
    return only


@pytest.fixture
def world() -> Iterator[World]:
    """Return a function that plans a world: ``world("A", "B", sync=True)`` has A as rank 0, by process name.

    Each world has a store of its own, as the agents give it one.
    """
    stores = []

    def plan(*names: str, sync: bool = True, source: int = 0, ends: Any = None) -> dict[str, dict[str, Any]]:
        stores.append(_elastic_rs.StoreServer.listen("127.0.0.1", 0))
        planned = {}
        for rank, name in enumerate(names):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(names),
                "LOCAL_WORLD_SIZE": len(names),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": stores[-1].port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_GENERATION": len(stores),
            }
            planned[name] = {
                "variables": {key: str(value) for key, value in variables.items()},
                "source": source,
                "sync": sync,
                "ends": ends,
            }
        return planned

    yield plan
    for store in stores:
        store.stop()


@pytest.fixture
def start(job: Job, tmp_path: Path) -> Callable[..., Process]:
    """Return a function that starts a process which takes part in these worlds."""

    def start(name: str, worlds: list[dict[str, dict[str, Any]]], *options: str) -> Process:
        plan = tmp_path / f"plan-{name}.json"
        plan.write_text(json.dumps({name: [one[name] for one in worlds if name in one]}))
        command = [sys.executable, str(WORKER), "--plan", str(plan), "--name", name, *options]
        return job.start(command, name=name, env={"ELASTIC_RS_LOG": "info"})

    return start


def end(*processes: Process) -> list[dict[str, Any]]:
    """Wait for processes that succeed, and return what they say at the end: all have the same state."""
    for process in processes:
        assert process.wait() == 0, process.tail()
    ends = [one(process, "END") for process in processes]
    assert {last["state"] for last in ends} == {ends[0]["state"]}
    return ends


def committed_indices(steps: list[dict[str, Any]], epoch: int) -> list[int]:
    return sorted(index for step in steps if step["epoch"] == epoch for index in step["indices"])


def test_collectives_by_their_names(job: Job) -> None:
    store = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
    try:
        ranks = [job.start([sys.executable, "-c", COLLECTIVES, str(rank), str(store.port)]) for rank in range(2)]
        for process in ranks:
            assert process.wait() == 0, process.tail()
            assert process.lines == ["done"]
    finally:
        store.stop()


def test_all_ranks_get_the_state_of_the_source(world: World, start: Callable[..., Process]) -> None:
    """The source is not rank 0, and has other weights. Nothing is read twice."""
    first = world("A", "B", source=1)
    processes = [start("A", [first]), start("B", [first], "--own-group")]
    ends = end(*processes)
    begins = [one(process, "BEGIN") for process in processes]
    assert begins[0]["state"] == begins[1]["state"]
    assert ends[0]["table"] == ends[1]["table"] == {"pid": ends[1]["pid"]}
    steps = [step for process in processes for step in said(process, "STEP")]
    for epoch in (0, 1):
        assert committed_indices(steps, epoch) == list(range(LENGTH))
    # Two ranks, batches of two.
    assert {step["step"] for step in steps} == set(range(1, 2 * LENGTH // 4 + 1))


def test_survivors_go_on_from_the_last_commit(world: World, start: Callable[..., Process], tmp_path: Path) -> None:
    """C is killed in the middle of a step. A and B keep their processes, and do not repeat what it has done."""
    dying = tmp_path / "dying"
    first = world("A", "B", "C", ends=["failure", str(dying)])
    second = world("A", "B")
    survivors = [start(name, [first, second], "--commit-every", "2") for name in ("A", "B")]
    dead = start("C", [first], "--commit-every", "2", "--die", f"3:{dying}")
    end(*survivors)
    dead.wait()
    steps = [step for process in (*survivors, dead) for step in said(process, "STEP")]
    # Three ranks have taken steps 1 to 3, and have not committed the third.
    assert {step["size"] for step in steps if step["step"] < 3} == {3}
    for process in survivors:
        begins = said(process, "BEGIN")
        assert [(begin["size"], begin["step"]) for begin in begins] == [(3, 0), (2, 2)]
        assert one(process, "PARKED")["commit"] == 1
        assert one(process, "PARKED")["pid"] == one(process, "END")["pid"] == process.pid
    lost = [step for step in steps if step["size"] == 3 and step["step"] == 3]
    assert lost
    kept = [step for step in steps if step not in lost]
    for epoch in (0, 1):
        assert committed_indices(kept, epoch) == list(range(LENGTH))


def test_a_newcomer_gets_the_state_as_it_is(world: World, start: Callable[..., Process]) -> None:
    """A joins B and C at a check without a commit. Nothing is lost, and the newcomer need not know the optimizer."""
    first = world("B", "C", ends=["change", 3])
    second = world("A", "B", "C", source=1)
    survivors = [start(name, [first, second], "--commit-every", "100") for name in ("B", "C")]
    for process in survivors:
        process.line("PARKED")
    newcomer = start("A", [second], "--commit-every", "100", "--own-group")
    end(newcomer, *survivors)
    assert [begin["step"] for begin in said(newcomer, "BEGIN")] == [3]
    begins = {said(process, "BEGIN")[-1]["state"] for process in (newcomer, *survivors)}
    assert len(begins) == 1
    assert {one(process, "PARKED")["commit"] for process in survivors} == {1}
    steps = [step for process in (newcomer, *survivors) for step in said(process, "STEP")]
    for epoch in (0, 1):
        assert committed_indices(steps, epoch) == list(range(LENGTH))


def test_three_then_two_then_one_without_a_sync(world: World, start: Callable[..., Process]) -> None:
    """Workers leave at a check, and the states of those that stay are equal: nothing is broadcast."""
    worlds = [
        world("A", "B", "C", ends=["change", 2]),
        world("A", "B", sync=False, ends=["change", 2]),
        world("A", sync=False),
    ]
    a = start("A", worlds)
    b = start("B", [*worlds[:2], world("B")])
    c = start("C", [worlds[0], world("C")])
    end(a)
    for process in (b, c):
        assert process.wait() == 0
    assert [begin["step"] for begin in said(a, "BEGIN")] == [0, 2, 4]
    # B parked once with C, and once when it left: what happens to it alone afterwards does not matter.
    ends = [said(process, "PARKED") for process in (a, b, c)]
    assert [len(parked) for parked in ends] == [2, 2, 1]
    in_epoch = [step for process in (a, b, c) for step in said(process, "STEP") if step["epoch"] == 0]
    with_all = [step for step in in_epoch if step["size"] == 3]
    with_two = [step for step in in_epoch if step["size"] == 2]
    alone = [step for step in said(a, "STEP") if step["size"] == 1 and step["epoch"] == 0]
    assert committed_indices([*with_all, *with_two, *alone], 0) == list(range(LENGTH))


@pytest.mark.torchrun
def test_under_pytorchs_agent_a_failure_restarts_all_from_the_checkpoint(job: Job, tmp_path: Path) -> None:
    """Checks never raise there. The survivor's error is raised, and PyTorch's agent starts all workers again."""
    options = ["--fail-once", str(tmp_path / "failed"), "--checkpoint", str(tmp_path / "checkpoint")]
    torchrun = job.torchrun(
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--standalone",
        WORKER,
        *options,
        # Otherwise restarted workers may read the addresses that the ones before have left in PyTorch's shared store.
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert torchrun.wait() == 0
    assert len(said(torchrun, "BEGIN")) == 4
    assert [loaded["epoch"] for loaded in said(torchrun, "LOADED")] == [1, 1]
    ends = said(torchrun, "END")
    assert [last["size"] for last in ends] == [2, 2]
    assert ends[0]["state"] == ends[1]["state"]
    assert said(torchrun, "PARKED") == []
