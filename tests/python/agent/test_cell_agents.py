"""Our agents over a cell in a file, as real processes. The cell does for them what a coordinator does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_rs import _cli
from helpers.procs import Process

AGENT = Path(__file__).parents[1] / "scripts" / "cell_agent.py"
# A worker without torch. It prints its place and waits for the file `go-<restart>`.
WORKER = """
import os, pathlib, sys, time
here, env = pathlib.Path(sys.argv[1]), os.environ
restart = env["TORCHELASTIC_RESTART_COUNT"]
place = f"{env['RANK']} of {env['WORLD_SIZE']} role {env['ROLE_RANK']} local {env['LOCAL_RANK']} restart {restart}"
(here / f"pid-{env['RANK']}-{restart}").write_text(str(os.getpid()))
os.write(1, f"worker {place}\\n".encode())
while not any((here / name).exists() for name in (f"go-{restart}", f"go-{restart}-{env['RANK']}")):
    time.sleep(0.05)
"""

# Trains with gloo: each step adds the mean of the ranks' gradients, which is 1. Rank 0 saves every step. In the first
# attempt all wait at step 3, where the test kills one.
TRAINER = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
here, restart = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
saved = here / "saved.pt"
state = torch.load(saved) if saved.exists() else {"step": 0, "weight": torch.zeros(1)}
began = state["step"]
while state["step"] < 6:
    gradient = torch.tensor([2.0 * rank])
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weight": state["weight"] + gradient / world}
    if rank == 0:
        torch.save(state, here / "new.pt")
        (here / "new.pt").replace(saved)
    if state["step"] == 3 and restart == "0":
        (here / f"pid-{rank}-0").write_text(str(os.getpid()))
        os.write(1, f"worker {rank} of {world} waits\\n".encode())
        while True:
            time.sleep(0.05)
os.write(1, f"worker {rank} of {world} from step {began}: weight {state['weight'].item():g}\\n".encode())
dist.destroy_process_group()
"""

Agents = Callable[..., Process]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Return a function that starts agents. All have ended when the test ends."""
    started: list[tuple[Process, subprocess.Popen[bytes]]] = []

    def start(name: str, *, workers: int = 2, nodes: int = 2, restarts: int = 1, script: str = WORKER) -> Process:
        worker = tmp_path / "worker.py"
        worker.write_text(script)
        command = [sys.executable, str(AGENT), str(tmp_path / "cell"), "127.0.0.1", str(nodes), str(nodes)]
        command += [str(workers), str(restarts), "--", sys.executable, str(worker), str(tmp_path)]
        output, write = os.pipe()
        env = {**os.environ, "LOG_DIR": str(tmp_path / "logs" / name)}
        process = subprocess.Popen(command, stdout=write, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        os.close(write)
        agent = Process(name, process, output, tmp_path / f"{name}.log")
        started.append((agent, process))
        return agent

    yield start
    for _, process in started:
        process.kill()  # its guards end its workers
        process.wait()


def pids(folder: Path, restart: int, world_size: int) -> dict[int, int]:
    return {rank: int((folder / f"pid-{rank}-{restart}").read_text()) for rank in range(world_size)}


def test_a_job_over_a_file_restarts_after_a_worker_was_killed(
    agents: Agents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker ranks come with the place, the restart counts for the job, and every node names the failed worker.

    Afterwards the files of events tell it: those of both nodes, of which some decisions are in each, and those of one.
    """
    nodes = [agents("a"), agents("b")]
    for node in nodes:
        for local_rank in range(2):
            node.line(rf"worker \d of 4 role \d local {local_rank} restart 0")
    os.kill(pids(tmp_path, 0, 4)[3], signal.SIGKILL)
    for node in nodes:
        node.line("ended with SIGKILL")
        node.line("restarting all workers: .*restart 1 of 1")
        node.line(r"worker \d of 4 role \d local \d restart 1")
    (tmp_path / "go-1").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    ranks = sorted(
        line.split()[1]
        for node in nodes
        for line in node.lines
        if line.startswith("worker ") and line.endswith("restart 1")
    )
    assert ranks == ["0", "1", "2", "3"]
    files = [next((tmp_path / "logs" / name).glob("*/events.jsonl")) for name in ("a", "b")]
    kinds = [[json.loads(line)["type"] for line in file.read_text().splitlines()] for file in files]
    assert sum(own.count("round.completed") for own in kinds) == 2, kinds
    assert sum(own.count("round.broken") for own in kinds) == 1, kinds
    assert all(own.count("received.completed") == 2 and own.count("worker.started") == 4 for own in kinds), kinds
    for chosen in (files, files[::-1], files[:1], files[1:]):
        assert _cli.main(["why", "--events", *map(str, chosen)]) == 0
        title, root, broken, *rest = capsys.readouterr().out.splitlines()
        assert title.startswith("recovery 1 of 1, round 1 to 2: "), chosen
        assert " x 4 workers, at 2" in title, chosen
        assert " rank 3 SIGKILL" in root, chosen
        assert broken.startswith(" +- round 1 broken, all nodes notified"), chosen
        assert any("round 2 complete with 2 nodes" in line for line in rest), chosen
        assert any("stop " in line for line in rest), chosen


@pytest.mark.long
def test_training_over_a_file_continues_from_its_checkpoint_after_a_kill(agents: Agents, tmp_path: Path) -> None:
    nodes = [agents(name, workers=1, script=TRAINER) for name in ("a", "b")]
    for node in nodes:
        node.line(r"worker \d of 2 waits")
    os.kill(pids(tmp_path, 0, 2)[1], signal.SIGKILL)
    for node in nodes:
        node.line(r"worker \d of 2 from step 3: weight 6$")
    assert [node.wait() for node in nodes] == [0, 0]


def test_a_failure_without_restarts_left_ends_every_node(agents: Agents, tmp_path: Path) -> None:
    """The budget is the job's. If each node counted its own, the other node would wait for ever."""
    nodes = [agents("a", workers=1, restarts=0), agents("b", workers=1, restarts=0)]
    for node in nodes:
        node.line(r"worker \d of 2 role \d local 0 restart 0")
    os.kill(pids(tmp_path, 0, 2)[1], signal.SIGKILL)
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert any("rank 1" in line and "SIGKILL" in line for line in node.lines), node.lines


def test_a_node_that_has_finished_waits_for_the_others(agents: Agents, tmp_path: Path) -> None:
    """The exit barrier is in the cell, and not in a store of the agents."""
    nodes = [agents("a", workers=1), agents("b", workers=1)]
    ranks = [int(node.line(r"worker (\d) of 2 role \d local 0 restart 0").group(1)) for node in nodes]
    first, last = sorted(nodes, key=lambda node: ranks[nodes.index(node)])
    (tmp_path / "go-0-0").touch()
    first.line(r"all workers of this node succeeded; waiting for those of the other nodes")
    assert "ended 0" not in first.lines
    (tmp_path / "go-0-1").touch()
    assert [node.wait() for node in (last, first)] == [0, 0]
