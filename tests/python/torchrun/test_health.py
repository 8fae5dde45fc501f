"""`--health-check`: an ill machine is in no world."""

import os
import signal
from pathlib import Path

import pytest
from helpers.gpus import driver, environment

from .conftest import SCRIPTS, WORKER, Start
from .test_notices import both

__all__ = ["driver"]  # a fixture

pytestmark = [pytest.mark.torchrun]
BEGINS = r"BEGINS rank \d of {size} at (\d+), pid (\d+)"


@both
def test_a_spare_takes_the_place_of_a_machine_that_its_check_finds_ill(start: Start, tmp_path: Path) -> None:
    """It is well when it joins, and ill after the failure of its worker."""
    ill, script = tmp_path / "ill", SCRIPTS / "checkpoints.py"
    check = {"ELASTIC_RS_HEALTH_CHECK": f"test ! -e {ill} || {{ echo GPU 3 is hot; exit 1; }}"}
    host = start(2, tmp_path, nnodes="2", script=script)
    host.line("this process hosts the coordinator")
    bad = start(3, tmp_path, nnodes="2", script=script, env=check)
    begins = bad.line(BEGINS.format(size=2))
    spare = start(4, tmp_path, nnodes="2", script=script, env={"ELASTIC_RS_HEALTH_CHECK": "builtin"})
    spare.line("round 1 runs undisturbed")
    ill.touch()
    os.kill(int(begins[2]), signal.SIGKILL)
    bad.line(
        "this machine is ill, and its workers are in no world until it is well: `.*` ended with exit code 1: GPU 3"
    )
    spare.line(BEGINS.format(size=2))
    host.line(r"host 127\.0\.0\.3 is out for \d+ s: its health check has found this: .*GPU 3 is hot")
    (tmp_path / "done").touch()
    assert [node.wait() for node in (host, spare)] == [0, 0]
    assert bad.wait() == 0, "the job has not needed it"


@both
def test_a_gpu_that_has_a_fault_while_it_trains_puts_its_machine_out(
    start: Start, tmp_path: Path, driver: Path
) -> None:
    """Only the driver knows it, and only who listens since before learns of it."""
    faults, script = tmp_path / "faults", SCRIPTS / "checkpoints.py"
    faults.write_text("xid 0 31\nxid 1 79\n")  # before
    check = {"ELASTIC_RS_HEALTH_CHECK": "builtin"}
    gpus = check | environment(driver, "GPU-a,GPU-b", faults)
    host = start(2, tmp_path, nnodes="2", script=script)
    host.line("this process hosts the coordinator")
    bad = start(3, tmp_path, nnodes="2", script=script, env=gpus)
    pid = int(bad.line(BEGINS.format(size=2))[2])
    mark = bad.mark()
    with faults.open("a") as file:
        file.write("xid 1 31\n")  # of a program
    os.kill(pid, signal.SIGKILL)
    pid = int(bad.line(BEGINS.format(size=2), since=mark)[2])
    spare = start(4, tmp_path, nnodes="2", script=script, env=check)
    spare.line("round 2 runs undisturbed")
    with faults.open("a") as file:
        file.write("xid 1 43\nxid 1 95\n")
    os.kill(pid, signal.SIGKILL)
    bad.line("this machine is ill, and its workers are in no world until it is well: GPU 1 has had the fault Xid 95")
    spare.line(BEGINS.format(size=2))
    (tmp_path / "done").touch()
    assert [node.wait() for node in (host, spare, bad)] == [0, 0, 0]


@both
def test_a_job_without_enough_well_machines_says_so_and_ends(start: Start, tmp_path: Path) -> None:
    host = start(2, "--until", tmp_path, nnodes="2", script=WORKER, conf="join_timeout=3")
    ill = start(
        3,
        "--until",
        tmp_path,
        nnodes="2",
        script=WORKER,
        conf="join_timeout=3",
        env={"ELASTIC_RS_HEALTH_CHECK": "exit 1"},
    )
    assert host.wait() != 0
    assert any("hosts that are out: 127.0.0.3 for " in line for line in host.lines), host.tail()
    assert ill.wait() != 0, "it waits for nobody"


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("sleep 600 & echo started; wait", "has not ended within 30.0s and was killed: started"),
        ("/nowhere/check", "ended with exit code 127, which is neither 0 (well) nor 1 (ill)"),
        ("head -c 1000000000 /dev/zero; exit 3", "ended with exit code 3, which is neither 0 (well) nor 1 (ill)"),
    ],
)
def test_a_check_that_says_nothing_is_one_line(start: Start, tmp_path: Path, check: str, says: str) -> None:
    (tmp_path / "done").touch()
    node = start(2, tmp_path, nnodes="1", script=SCRIPTS / "checkpoints.py", options=[f"--health-check={check}"])
    assert node.wait() == 0
    told = [line for line in node.lines if "--health-check says nothing, so this machine counts as well: " in line]
    assert len(told) == 1, node.tail()
    assert says in told[0]
