"""``examples/frameworks``: workers that live through a change of the world, as docs/frameworks.md says."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers.procs import Job, Process
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .conftest import Start

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "frameworks"
# Beside the environment that runs the test (requirements/clients.txt, and frameworks.txt for long tests).
CLIENTS, FRAMEWORKS = (Path(sys.prefix).parent / name for name in ("clients", "frameworks"))
ENV = {"PYTHONPATH": f"{CLIENTS}:{FRAMEWORKS}", "HF_HUB_OFFLINE": "1"}
STEPS = 16
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(900)]  # two jobs one after the other
LONG = pytest.mark.long
run_alone = pytest.mark.parametrize("agent", ["run"], indirect=True)

World = dict[int, tuple[int, int]]


def world_of(node: Process, ranks: list[int], *, size: int, since: int = 0) -> World:
    """Wait until these ranks are in a world of that size. Return pid and first step by rank.

    Workers share a pipe, so a line may hold what two of them have printed.
    """
    found = {}
    for rank in ranks:
        match = node.line(rf"world {size}  rank {rank}  pid (\d+)  from step (\d+)", since=since)
        found[rank] = int(match[1]), int(match[2])
    return found


def losses(*nodes: Process) -> dict[int, float]:
    """Return the last loss that was printed for each step."""
    found = re.findall(r"step (\d+)  loss (\d+\.\d{9})", "\n".join(line for node in nodes for line in node.lines))
    return {int(step): float(loss) for step, loss in found}


def plain_losses(models: Path | None = None) -> dict[int, float]:
    """Return the losses of one process without a framework. The model after each step is written to `models`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = {}
    for step in range(STEPS):
        batch = torch.rand(24, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        found[step + 1] = loss.item()
        if models:
            torch.save(model.state_dict(), models / f"step-{step + 1}.pt")
    return found


def run(
    start: Start,
    script: Path,
    folder: Path,
    *worker: str,
    number: int = 2,
    nnodes: str = "1",
    nproc: int = 2,
    conf: str = "last_call_timeout=1,settle_timeout=0.2",
) -> Process:
    if (
        re.search("import deepspeed|import transformers|from transformers", script.read_text())
        and not FRAMEWORKS.exists()
    ):
        pytest.skip("they are not installed: `python tools/environment.py --frameworks`")
    given = [f"--steps={STEPS}", "--folder", folder, *worker]
    return start(number, *given, script=script, env=ENV, nnodes=nnodes, nproc=nproc, conf=conf)


def ended_well(*nodes: Process) -> None:
    assert [node.wait() for node in nodes] == [0] * len(nodes), "\n".join(node.tail() for node in nodes)
    assert not [line for node in nodes for line in node.lines if "restarting all workers" in line]


WITH_THEIR_OWN_LOSSES = ("deepspeed_zero.py", "fabric_loop.py", "lightning_trainer.py", "transformers_trainer.py")


@run_alone
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=LONG)])
@pytest.mark.parametrize(
    "script",
    [
        "accelerate_loop.py",
        "fsdp2.py",
        *(pytest.param(name, marks=LONG) for name in WITH_THEIR_OWN_LOSSES),
    ],
)
def test_the_other_worker_lives_on_and_the_training_ends_as_if_undisturbed(
    start: Start, tmp_path: Path, script: str, victim: int
) -> None:
    node = run(start, EXAMPLES / script, tmp_path / "disturbed", "--pause=0.3")
    before = world_of(node, [0, 1], size=2)
    assert {step for _, step in before.values()} == {0}
    node.line("step 6  loss")  # after the checkpoint of step 5
    mark = node.mark()
    os.kill(before[victim][0], signal.SIGKILL)
    after = world_of(node, [0, 1], size=2, since=mark)
    assert after[1 - victim][0] == before[1 - victim][0], "the survivor keeps its process"
    assert after[victim][0] != before[victim][0]
    assert len({step for _, step in after.values()}) == 1
    assert after[0][1] in (5, 10, 15)
    ended_well(node)
    assert losses(node) == pytest.approx(undisturbed_losses(start, script, tmp_path), rel=1e-4)


def undisturbed_losses(start: Start, script: str, folder: Path) -> dict[int, float]:
    """Return the losses of an undisturbed run."""
    if script in WITH_THEIR_OWN_LOSSES:
        undisturbed = run(start, EXAMPLES / script, folder / "undisturbed", number=3)
        ended_well(undisturbed)
        expected = losses(undisturbed)
    else:
        expected = plain_losses()
    assert set(expected) == set(range(1, STEPS + 1))
    assert expected[STEPS] < 0.8 * expected[1]
    return expected


CHECKPOINTED = ["fsdp2.py", *WITH_THEIR_OWN_LOSSES]


@LONG
@run_alone
@pytest.mark.parametrize("script", CHECKPOINTED)
def test_all_workers_are_restarted_from_the_checkpoint(start: Start, tmp_path: Path, script: str) -> None:
    conf = "last_call_timeout=1,settle_timeout=0.2,in_place=off"
    node = run(start, EXAMPLES / script, tmp_path / "disturbed", "--pause=0.3", conf=conf)
    before = world_of(node, [0, 1], size=2)
    node.line("step 6  loss")
    mark = node.mark()
    os.kill(before[1][0], signal.SIGKILL)
    after = world_of(node, [0, 1], size=2, since=mark)
    assert not {pid for pid, _ in before.values()} & {pid for pid, _ in after.values()}
    assert after[0][1] in (5, 10, 15)
    assert node.wait() == 0, node.tail()
    assert losses(node) == pytest.approx(undisturbed_losses(start, script, tmp_path), rel=1e-4)


@LONG
@run_alone
@pytest.mark.parametrize("script", ["fsdp2.py", *WITH_THEIR_OWN_LOSSES[1:]])
def test_a_node_joins_at_a_checkpoint_and_no_step_is_lost(start: Start, tmp_path: Path, script: str) -> None:
    first = run(start, EXAMPLES / script, tmp_path / "folder", "--pause=0.3", nnodes="1:2", nproc=1)
    before = world_of(first, [0], size=1)
    first.line("step 1  loss")
    os.kill(before[0][0], signal.SIGSTOP)  # until the other node is there
    second = run(start, EXAMPLES / script, tmp_path / "folder", nnodes="1:2", nproc=1, number=3)
    first.line("changes in place: 1 node waits to join")
    os.kill(before[0][0], signal.SIGCONT)
    after = world_of(first, [0], size=2)
    assert after[0][0] == before[0][0]
    assert after[0][1] == world_of(second, [1], size=2)[1][1]
    ended_well(first, second)
    steps = re.findall(r"step (\d+)  loss", "\n".join(first.lines))
    assert steps == [str(step) for step in range(1, STEPS + 1)], "each step was made once"


@LONG
@run_alone
@pytest.mark.parametrize(("script", "nproc"), [("fsdp2.py", 1), ("tp_fsdp2.py", 2)])
def test_sharded_workers_live_on_with_other_ranks(start: Start, tmp_path: Path, script: str, nproc: int) -> None:
    """The survivors get the ranks of those that were lost, in a world of the same size: its mesh looks the same."""
    conf = "last_call_timeout=1,settle_timeout=0.2,keep_alive_interval=0.5,keep_alive_max_attempt=4,node_rank="
    folder, file, size = tmp_path / "disturbed", EXAMPLES / script, 2 * nproc
    low, high = list(range(nproc)), list(range(nproc, size))
    kept = run(start, file, folder, "--pause=0.5", nnodes="2", nproc=nproc, conf=f"{conf}1")
    kept.line("hosts the coordinator")
    lost = run(start, file, folder, "--pause=0.5", number=3, nnodes="2", nproc=nproc, conf=f"{conf}0")
    before = world_of(kept, high, size=size)
    world_of(lost, low, size=size)
    spare = run(start, file, folder, "--pause=0.5", number=4, nnodes="2", nproc=nproc, conf=f"{conf}1")
    spare.line("the workers of this node are started before it joins")
    lost.line("step 6  loss")
    mark = kept.mark()
    lost.signal(signal.SIGKILL)
    lost.wait()
    after = world_of(kept, low, size=size, since=mark)
    assert [pid for pid, _ in after.values()] == [pid for pid, _ in before.values()]
    world_of(spare, high, size=size)
    ended_well(kept, spare)
    # What both worlds have written is what one process computes without any of this.
    assert losses(lost, kept) == pytest.approx(plain_losses(tmp_path), rel=1e-4)
    assert after[0][1] < 15
    for step in (5, 10, 15):
        torch.testing.assert_close(
            saved(folder / f"step-{step}"), torch.load(tmp_path / f"step-{step}.pt"), rtol=1e-3, atol=1e-5
        )


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the model of a checkpoint of DCP, whole."""
    file = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, file)
    model: dict[str, torch.Tensor] = torch.load(file)["model"]
    return model


@LONG
@run_alone
def test_without_its_line_the_survivor_of_deepspeed_fails_and_is_replaced(start: Start, tmp_path: Path) -> None:
    """DeepSpeed keeps the groups of the last world."""
    text = (EXAMPLES / "deepspeed_zero.py").read_text()
    assert text.count("    groups._WORLD_GROUP = None") == 1
    (script := tmp_path / "without.py").write_text(text.replace("    groups._WORLD_GROUP = None", "    pass"))
    node = run(start, script, tmp_path / "folder", "--pause=0.3")
    before = world_of(node, [0, 1], size=2)
    node.line("step 6  loss")
    os.kill(before[1][0], signal.SIGKILL)
    node.line(rf"pid {before[0][0]}\) on this node ended with exit code 1: .*")
    assert any(
        "is not registered, please create group with torch.distributed.new_group API" in line for line in node.lines
    )
    ended_well(node)
    assert max(int(n) for line in node.lines for n in re.findall(r"restart (\d) of 3", line)) == 2
    assert losses(node) == pytest.approx(undisturbed_losses(start, "deepspeed_zero.py", tmp_path), rel=1e-4)


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def accelerate(job: Job, folder: Path, *flags: str, name: str = "accelerate") -> Process:
    script = [str(EXAMPLES / "accelerate_loop.py"), "--folder", str(folder), f"--steps={STEPS}", "--pause=0.3"]
    command = [*ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no", *flags, *script]
    return job.start(command, name=name, env={**ENV, "ELASTIC_RS_LOG": "info"})


@LONG
def test_accelerate_launch_on_two_machines(job: Job, tmp_path: Path, port: int) -> None:
    """What docs/frameworks.md says of ``accelerate launch``: the flag is enough."""
    flags = ["--multi_gpu", "--num_machines=2", "--num_processes=4", "--main_process_ip=127.0.0.1"]
    flags += [f"--main_process_port={port}", "--rdzv_backend=rust-c10d", "--max_restarts=3"]
    nodes = [accelerate(job, tmp_path / "f", *flags, "--machine_rank=0", name="node0")]
    nodes[0].line("hosts the coordinator")
    nodes.append(accelerate(job, tmp_path / "f", *flags, "--machine_rank=1", name="node1"))
    before = world_of(nodes[0], [0, 1], size=4) | world_of(nodes[1], [2, 3], size=4)
    nodes[0].line("step 6  loss")
    mark = nodes[1].mark()
    os.kill(before[3][0], signal.SIGKILL)
    after = world_of(nodes[1], [2, 3], size=4, since=mark)
    assert after[2][0] == before[2][0]
    ended_well(*nodes)
    assert losses(*nodes) == pytest.approx(plain_losses(), rel=1e-4)


@LONG
@pytest.mark.parametrize(
    ("kind", "flag", "size"), [("MULTI_GPU", "--multi_gpu", 2), ("MULTI_CPU", "--rdzv_backend=rust-c10d", 1)]
)
def test_accelerate_launch_that_does_not_use_the_backend(
    job: Job, tmp_path: Path, kind: str, flag: str, size: int
) -> None:
    """It ignores ``rdzv_backend`` of its YAML, and with MULTI_CPU it never comes to torchrun."""
    (config := tmp_path / "config.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_machines: 1\nnum_processes: 2\n"
        f"rdzv_backend: rust-c10d\nmain_process_port: 0\nuse_cpu: {str(kind == 'MULTI_CPU').lower()}\n"
    )
    node = accelerate(job, tmp_path / "f", f"--config_file={config}", flag)
    world_of(node, list(range(size)), size=size)
    assert node.wait() == 0
    assert not any("rendezvous:" in line or "coordinator" in line for line in node.lines), node.tail()


@pytest.mark.parametrize("standalone", [True, False])
def test_torchruns_standalone_takes_another_backend(job: Job, standalone: bool) -> None:
    flags = ["--standalone"] if standalone else []
    env = {"ELASTIC_RS_LOG": "info"}
    node = job.torchrun(*flags, "--rdzv-backend=rust-c10d", "--no-python", "true", env=env)
    assert node.wait() == 0
    assert any("rendezvous: this process hosts the coordinator" in line for line in node.lines) == (not standalone)


@LONG
@pytest.mark.skipif(not FRAMEWORKS.exists(), reason="not installed: `python tools/environment.py --frameworks`")
def test_replica_groups_of_torchft_are_jobs(job: Job, port: int) -> None:
    """A group whose worker is killed is started again by its agent, and goes on with the others' step."""
    command = [str(FRAMEWORKS / "bin" / "torchft_lighthouse"), "--min_replicas=1", "--quorum_tick_ms=100"]
    lighthouse = job.start([*command, "--join_timeout_ms=3000", f"--bind=127.0.0.1:{port}"], name="lighthouse", env=ENV)
    script = [str(EXAMPLES / "torchft_group.py"), "--steps=100000", "--pause=0.2"]
    run = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3", *script]
    env = {**ENV, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    groups = [job.start(run, name=f"group{n}", env={**env, "REPLICA_GROUP_ID": str(n)}) for n in range(2)]
    for group in groups:
        group.line("step .*  groups 2  loss")
    pid = int(groups[1].line(r"group 1  pid (\d+)")[1])
    alone, restarted = groups[0].mark(), groups[1].mark()
    os.kill(pid, signal.SIGKILL)
    groups[0].line("step .*  groups 1  loss", since=alone)
    reached = int(groups[0].line(r"step (\d+)  groups 1  loss", since=groups[0].mark())[1])
    assert int(groups[1].line(r"group 1  pid (\d+)", since=restarted)[1]) != pid
    assert int(groups[1].line(r"step (\d+)  groups 2  loss", since=restarted)[1]) > reached
    for process in (*groups, lighthouse):
        process.signal(signal.SIGTERM)
        process.wait()
