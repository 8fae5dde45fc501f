"""``elastic-run --warm-start``: training, restarts, and nodes that join and leave."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.procs import Job
from helpers.warm import script, template_of

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]


@pytest.mark.long
def test_workers_train_over_a_restart_and_start_processes(job: Job) -> None:
    # Workers use DDP over Gloo, a DataLoader with workers, pools of spawn and forkserver, and `os.fork`.
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--warm-start"]
    node = job.start([sys.executable, "-m", "elastic_rs.run", *flags, str(SCRIPTS / "warm_torch.py"), "1"])
    assert node.wait() == 0, node.tail()
    work = "spawned: [0, 2, 4, 6], served: [0, 2, 4, 6], forked: 7"
    assert sorted(line for line in node.lines if line.startswith("rank ")) == sorted(
        f"rank {rank}, attempt {attempt}: {text}"
        for rank in range(2)
        for attempt in range(2)
        for text in ("warm", "trained: True", *([work] if attempt == 1 else []))
    )


@pytest.mark.long
@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_nodes_come_and_go(start: Start, job: Job, tmp_path: Path) -> None:
    done, warm = tmp_path / "done", ["--warm-modules=torch"]
    first = start(2, "--torch", "--until", done, nnodes="1:2", nproc=2, options=warm)
    first.line("SUM rank=. world=2")
    first.line("a fork server has loaded `torch`")
    # First a node with another template, then a node of torchrun, which has none.
    for number, options, by in ((3, warm, "run"), (4, [], "rust")):
        mark = first.mark()
        other = start(number, "--torch", "--until", done, nnodes="1:2", nproc=2, options=options, by=by)
        other.line("SUM rank=. world=4")
        first.line("SUM rank=. world=4", since=mark)
        mark = first.mark()
        # A worker fails, and then its node is lost.
        os.kill(max(job.workers(other).values()), signal.SIGKILL)
        first.line("SUM rank=. world=4", since=mark)
        mark = first.mark()
        other.signal(signal.SIGKILL)
        first.line("SUM rank=. world=2", since=mark)
        other.wait()
    done.touch()
    assert first.wait() == 0
    assert not any("started cold" in line for line in first.lines)


@pytest.mark.parametrize("agent", ["run"], indirect=True)
def test_a_job_that_fails_while_a_fork_server_loads_starts_no_worker_there(
    start: Start, job: Job, tmp_path: Path
) -> None:
    # The import waits for a writer of the pipe.
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "slow.py").write_text(f"open({str(gate)!r}).read()\n")
    text = """
        import os, signal, sys
        print(f"RAN {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        signal.pause() if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else sys.exit(3)
    """
    train = script(tmp_path, text)
    options, env = ["--warm-modules=slow"], {"PYTHONPATH": str(tmp_path)}
    second = start(3, nnodes="2", restarts=1, script=train)
    first = start(2, nnodes="2", restarts=1, script=train, options=options, env=env)
    second.line("1 of 2 nodes have joined")  # the other one waits for its template
    gate.write_text("")
    first.line("RAN 0")
    second.line("RAN 0")
    os.kill(template_of(job), signal.SIGKILL)
    first.line("the fork server that has loaded `slow` has ended and is started again")
    os.kill(next(iter(job.workers(second).values())), signal.SIGKILL)
    assert (first.wait(), second.wait()) == (1, 1)
    assert "RAN 1" in second.lines
    assert "RAN 1" not in first.lines, first.tail()
    assert any("exit code 3" in line or "exitcode  : 3" in line for line in first.lines), first.tail()
