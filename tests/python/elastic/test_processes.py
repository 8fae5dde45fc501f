"""Real processes of up to three ranks over gloo: under PyTorch's torchrun, and with the test as their agent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from elastic_rs import _elastic_rs
from helpers.elastic_node import WORKER, Node, said

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Job

LENGTH = 24

# Every rank has other values, and rank 1 sends its own. Where values are stored does not matter, nor how they travel.
COLLECTIVES = """
import sys
import torch
import torch._dynamo  # an optimizer would: it keeps the groups that exist, whose threads then run on at the exit
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
assert hvd.allreduce(torch.ones(2), None, "name", None, hvd.Sum).tolist() == [2, 2]
assert hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=10).tolist() == [10, 10]
whole = torch.tensor([7, -7, 2**40 + 1])
assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist() == [6, -6, 2**40]
assert hvd.allreduce(whole.int(), op=hvd.Max, postscale_factor=0.3).tolist() == [2, -2, 0]
for tensor in (torch.ones(2 + rank), torch.ones(2, dtype=torch.float64 if rank else torch.float32)):
    try:
        hvd.allreduce(tensor)
    except RuntimeError as error:
        assert "must have the same shape and type on all ranks: rank 0 has (2,) of torch.float32, rank 1" in str(error)
    else:
        raise AssertionError
try:
    hvd.allreduce(one, average=True, op=hvd.Sum)
except ValueError:
    print("done", flush=True)
hvd.shutdown()
"""

# Rank 1 has the newest state, since rank 0's worker has been replaced. Handlers and states broadcast as under Horovod.
SYNCS = """
import sys
from types import SimpleNamespace
import torch
import torch._dynamo  # an optimizer would: it keeps the groups that exist, whose threads then run on at the exit
import torch.distributed as dist
import elastic_rs.elastic as hvd
from elastic_rs.elastic._membership import MEMBERSHIP

rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
MEMBERSHIP._world = SimpleNamespace(source=1, sync=True)
assert hvd.source_rank() == 1


class Counter:
    def __init__(self, count):
        self.count = count


class CounterHandler(hvd.StateHandler):
    def save(self):
        self.saved = self.value.count

    def restore(self):
        self.value.count = self.saved

    def sync(self):
        self.value.count = hvd.broadcast_object(self.value.count)


hvd.set_handler_registry([(Counter, CounterHandler), *hvd.get_handler_registry()])
state = hvd.TorchState(counter=Counter(rank), epoch=rank)
state.sync()
assert (state.counter.count, state.epoch) == (1, 1)


class Mine(hvd.State):
    def __init__(self):
        super().__init__(bcast_object=hvd.broadcast_object)
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0 + rank)
        self.numbers = None

    def save(self):
        pass

    def sync(self):
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.numbers = [hvd.broadcast_object(rank), hvd.broadcast_object(rank, 0), hvd.broadcast_object(rank, 1)]


mine = Mine()
mine._elastic_synced()
assert mine.model.weight.item() == 1
assert mine.optimizer.param_groups[0]["lr"] == 2
assert mine.numbers == [1, 1, 1]
# The script of rank 0 has not unfrozen a part of its model, as the running job has.
groups = [torch.nn.Linear(1, 1) for _ in range(rank + 1)]
optimizer = torch.optim.SGD([{"params": group.parameters()} for group in groups], lr=1.0)
unfrozen = hvd.TorchState(optimizer=optimizer)
try:
    unfrozen.sync()
except ValueError as error:
    text = "cannot take the state that rank 1 has of `optimizer`, a SGD: loaded state dict has a different number of"
    assert rank == 0 and text in str(error), error
else:
    assert rank == 1
# Outside a sync, 0 is rank 0.
assert [hvd.broadcast_object(rank), hvd.broadcast_object(rank, 1)] == [0, 1]
print("done", flush=True)
hvd.shutdown()
"""


def indices(steps: list[dict[str, Any]], epoch: int) -> list[int]:
    return sorted(index for step in steps if step["epoch"] == epoch for index in step["indices"])


def assert_all_read_once(steps: list[dict[str, Any]]) -> None:
    for epoch in (0, 1):
        assert indices(steps, epoch) == list(range(LENGTH))


@pytest.mark.parametrize("script", [COLLECTIVES, SYNCS], ids=["collectives", "syncs"])
def test_horovods_broadcasts_by_their_names(job: Job, script: str) -> None:
    store = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
    try:
        ranks = [job.start([sys.executable, "-c", script, str(rank), str(store.port)]) for rank in range(2)]
        for process in ranks:
            assert process.wait() == 0, process.tail()
            assert process.lines == ["done"]
    finally:
        store.stop()


@pytest.mark.long  # as when a node joins, in torchrun/test_in_place
def test_all_ranks_get_the_state_of_the_source(node: Node) -> None:
    """The source is not rank 0, and has other weights. Nothing is read twice."""
    world = node.plan("A", "B")
    node.start("A", world)
    node.start("B", world, "--own-group")
    node.enter(world, source=1)
    ends = node.end("A", "B")
    begins = node.said("BEGIN")
    assert begins[0]["state"] == begins[1]["state"]
    assert ends[0]["table"] == ends[1]["table"] == {"pid": ends[1]["pid"]}
    steps = node.said("STEP")
    assert_all_read_once(steps)
    # Two ranks, batches of two.
    assert {step["step"] for step in steps} == set(range(1, 2 * LENGTH // 4 + 1))


@pytest.mark.parametrize("how", [pytest.param("--die", marks=pytest.mark.long), "--stop"])
def test_survivors_go_on_from_the_last_commit(node: Node, how: str) -> None:
    """C is killed, or hangs, in the middle of a step. A and B keep their processes, and repeat what was not committed.

    If it hangs no connection is closed: A and B are in a collective that only the channel can end.
    """
    first = node.plan("A", "B", "C")
    for name in ("A", "B"):
        node.start(name, first, "--commit-every", "2")
    lost = node.start("C", first, "--commit-every", "2", how, "3")
    node.enter(first)
    if how == "--die":
        lost.wait()
    else:
        lost.line("STOPPED")
        for name in ("A", "B"):
            node.processes[name].line('STEP .*"step": 3')
    assert node.fail("A", "B") == [1, 1]  # the sync is 0
    if how == "--stop":
        node.kill("C")
    second = node.plan("A", "B")
    node.enter(second)
    ends = node.end("A", "B")
    assert [last["pid"] for last in ends] == [node.processes[name].pid for name in ("A", "B")]
    for name in ("A", "B"):
        assert [(begin["size"], begin["step"]) for begin in node.said("BEGIN", name)] == [(3, 0), (2, 2)]
    steps = node.said("STEP")
    uncommitted = [step for step in steps if step["size"] == 3 and step["step"] == 3]
    assert uncommitted
    assert_all_read_once([step for step in steps if step not in uncommitted])


@pytest.mark.long
def test_a_new_worker_gets_the_present_state(node: Node) -> None:
    """A joins B and C at a check without a commit. Nothing is lost, and the newcomer need not know the optimizer."""
    first = node.plan("B", "C")
    for name in first.names:
        node.start(name, first, "--commit-every", "100")
    node.enter(first)
    assert node.change("B", "C", check=3) == [1, 1]  # newer than the sync, which is 0
    second = node.plan("A", "B", "C")
    node.start("A", second, "--commit-every", "100", "--own-group")
    node.enter(second, source=1)
    node.end("A", "B", "C")
    assert [begin["step"] for begin in node.said("BEGIN", "A")] == [3]
    assert len({node.said("BEGIN", name)[-1]["state"] for name in second.names}) == 1
    assert_all_read_once(node.said("STEP"))


def test_three_then_two_then_one_without_a_sync(node: Node) -> None:
    """Workers leave at a check, and the states of those that stay are equal: nothing is broadcast."""
    worlds = [node.plan("A", "B", "C"), node.plan("A", "B"), node.plan("A")]
    for name in worlds[0].names:
        node.start(name, worlds[0])
    node.enter(worlds[0])
    assert node.change("A", "B", "C", check=2) == [2, 2, 2]  # a sync and two commits
    node.kill("C")
    node.enter(worlds[1], sync=False)
    assert node.change("A", "B", check=2) == [4, 4]
    node.kill("B")
    node.enter(worlds[2], sync=False)
    node.end("A")
    assert [(begin["size"], begin["step"]) for begin in node.said("BEGIN", "A")] == [(3, 0), (2, 2), (1, 4)]
    assert_all_read_once(node.said("STEP"))


@pytest.mark.long
def test_a_peer_that_dies_while_the_group_is_made(node: Node) -> None:
    """A waits in ``init_process_group`` for a newcomer that never comes, and is freed. Its commit is kept."""
    worlds = [node.plan("A", "B"), node.plan("A", "C"), node.plan("A")]
    a = node.start("A", worlds[0])
    b = node.start("B", worlds[0], "--die", "2")
    node.enter(worlds[0])
    b.wait()
    assert node.fail("A") == [2]
    node.enter(worlds[1], names=["A"])
    a.line("world of generation 2")
    assert node.fail("A") == [2]
    node.enter(worlds[2])
    node.end("A")
    assert [(begin["size"], begin["step"]) for begin in node.said("BEGIN", "A")] == [(2, 0), (1, 2)]
    steps = node.said("STEP")
    assert_all_read_once(steps)


@pytest.mark.torchrun
@pytest.mark.long
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
