"""``examples/slurm`` under a real Slurm: what it does when a node is lost, and when the time is over."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.machines import Lan
from helpers.procs import Job
from helpers.slurm import Slurm, Submitted

from .conftest import EXAMPLES, SCRIPTS, WORKER

RECIPE = EXAMPLES / "slurm" / "train.sbatch"
ARRAY = EXAMPLES / "slurm" / "array.sbatch"
# A silent node is lost after three of these intervals.
CONF = "last_call_timeout=1,keep_alive_interval=1"
SETTINGS = {"NPROC": "1", "RDZV_CONF": CONF}


@pytest.fixture
def slurm(job: Job, lan: Lan) -> Iterator[Slurm]:
    """Start Slurm with three nodes, as tools/find_tool.py has found it."""
    if not (installed := os.environ.get("SLURM")):
        pytest.skip("no Slurm: the variable SLURM is set by `make`, see tools/find_tool.py")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    slurm = Slurm(job, lan, Path(installed), ["n1", "n2", "n3"])
    slurm.start()
    yield slurm
    job.kill_leftovers()  # the daemons


def worlds(submitted: Submitted, size: int, *, since: int = 0) -> None:
    """Wait until all workers of a world of that size have met."""
    for rank in range(size):
        submitted.output.line(rf"SUM rank={rank} world={size}", since=since)


def test_a_node_is_lost_and_the_others_train_on(slurm: Slurm, tmp_path: Path) -> None:
    done = tmp_path / "done"
    submitted = slurm.sbatch("--nodes=3", RECIPE, WORKER, "--until", done, env=SETTINGS)
    worlds(submitted, 3)
    mark = submitted.output.mark()
    slurm.lose("n3")
    worlds(submitted, 2, since=mark)
    slurm.until_down("n3")
    assert submitted.field("JobState") == "RUNNING", "--no-kill"
    done.touch()
    submitted.until("COMPLETED")
    assert submitted.field("Restarts") == "0"


@pytest.mark.long
def test_the_agent_that_leads_is_killed_and_the_others_train_on(slurm: Slurm, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    submitted = slurm.sbatch("--nodes=3", RECIPE, WORKER, "--until", done, env=SETTINGS)
    worlds(submitted, 3)
    mark = submitted.output.mark()
    first = {"elastic-run", "SLURM_NODEID=0"}
    (agent,) = (pid for pid, env in job._marked() if first == {comm(pid), f"SLURM_NODEID={env.get('SLURM_NODEID')}"})
    os.kill(agent, signal.SIGKILL)
    worlds(submitted, 2, since=mark)
    done.touch()
    submitted.until("COMPLETED")
    assert (submitted.field("ExitCode"), submitted.field("Restarts")) == ("0:0", "0")


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has ended


@pytest.mark.long
def test_the_first_node_is_lost_and_the_job_starts_again_on_others(slurm: Slurm, tmp_path: Path) -> None:
    done = tmp_path / "done"
    env = SETTINGS | {"RDZV_CONF": f"{CONF},coordinator_timeout=5"}
    submitted = slurm.sbatch("--nodes=2", RECIPE, WORKER, "--until", done, env=env)
    worlds(submitted, 2)
    assert submitted.field("BatchHost") == "n1"
    mark = submitted.output.mark()
    slurm.lose("n1")
    worlds(submitted, 2, since=mark)
    assert submitted.field("BatchHost") == "n2"
    assert submitted.field("Restarts") == "1"
    done.touch()
    submitted.until("COMPLETED")


@pytest.mark.long
def test_too_few_nodes_are_left_and_the_job_goes_back_into_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    done = tmp_path / "done"
    env = SETTINGS | {"MIN_NODES": "2", "RDZV_CONF": f"{CONF},join_timeout=8"}
    submitted = slurm.sbatch("--nodes=2", RECIPE, WORKER, "--until", done, env=env)
    worlds(submitted, 2)
    mark = submitted.output.mark()
    slurm.lose("n2")
    submitted.output.line(r"exit code 90: back into the queue, restart 1", since=mark)
    worlds(submitted, 2, since=mark)
    done.touch()
    submitted.until("COMPLETED")


@pytest.mark.long
def test_the_time_is_nearly_over_and_workers_save_and_go_on_after_a_requeue(slurm: Slurm, tmp_path: Path) -> None:
    done, saved = tmp_path / "done", tmp_path / "saved"
    script = SCRIPTS / "preempted.py"
    submitted = slurm.sbatch("--nodes=2", RECIPE, script, saved, "--until", done, env=SETTINGS)
    submitted.output.line(r"BEGIN rank=0 world=2 step=0")
    submitted.output.line(r"BEGIN rank=1 world=2 step=0")
    # What `--signal=B:USR1@120` does 120 s before the time limit, of which the shortest is a minute.
    slurm.ask("scancel", "--batch", "--signal=USR1", submitted.number)
    step = submitted.output.line(r"SAVED step=(\d+)")[1]
    submitted.output.line(r"exit code 91: back into the queue, restart 1")
    submitted.output.line(rf"BEGIN rank=\d world=2 step={step}\b")
    done.touch()
    submitted.until("COMPLETED")


@pytest.mark.long
def test_the_time_is_nearly_over_and_no_step_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    submitted = slurm.sbatch("--nodes=2", RECIPE, SCRIPTS / "checkpoints.py", tmp_path, env=SETTINGS)
    submitted.output.line(r"STEP")
    slurm.ask("scancel", "--batch", "--signal=USR1", submitted.number)
    step = submitted.output.line(r"SAVED rank 0 at (\d+)")[1]
    submitted.output.line(rf"SAVED rank 1 at {step}\b")
    submitted.output.line(r"exit code 91: back into the queue, restart 1")
    submitted.output.line(rf"BEGINS rank 0 of 2 at {step}\b")
    (tmp_path / "done").touch()
    submitted.until("COMPLETED")


@pytest.mark.long
def test_a_job_that_failed_is_not_requeued(slurm: Slurm) -> None:
    submitted = slurm.sbatch("--nodes=2", RECIPE, WORKER, "--fail", "1:7", env=SETTINGS | {"MAX_RESTARTS": "0"})
    submitted.until("FAILED")
    assert submitted.field("ExitCode") == "92:0"
    assert submitted.field("Restarts") == "0"
    submitted.output.line(r"exitcode\s*: 7")


# The worker fails once there is the file.
BY_ITS_EXIT_CODE = r"""#!/bin/sh
#SBATCH --open-mode=append
exec elastic-run --standalone --exit-code=class --no-python \
  sh -c 'echo "run $SLURM_RESTART_COUNT"; until [ -e $0 ]; do sleep 0.1; done; exit 3' "$1"
"""


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--requeue", "--no-requeue"])
def test_slurm_requeues_by_the_exit_code_where_its_configuration_says_so(
    slurm: Slurm, tmp_path: Path, flag: str
) -> None:
    script, fails = tmp_path / "job.sh", tmp_path / "fails"
    script.write_text(BY_ITS_EXIT_CODE)
    submitted = slurm.sbatch("--nodes=1", flag, script, fails)
    submitted.output.line(r"^run $")
    slurm.ask("scancel", "--batch", "--signal=TERM", submitted.number)
    submitted.output.line(r"^run 1$")
    assert submitted.field("Restarts") == "1", "91"
    fails.touch()
    submitted.until("FAILED")
    assert (submitted.field("ExitCode"), submitted.field("Restarts")) == ("92:0", "1")


@pytest.mark.long
def test_a_cancelled_job_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    submitted = slurm.sbatch("--nodes=2", RECIPE, WORKER, "--until", tmp_path / "never", env=SETTINGS)
    worlds(submitted, 2)
    slurm.ask("scancel", submitted.number)
    submitted.until("CANCELLED")
    assert submitted.field("Restarts") == "0"


@pytest.mark.long
def test_an_element_of_an_array_is_lost_and_comes_back(slurm: Slurm, tmp_path: Path) -> None:
    command = ["elastic-rs", "store", "serve", "--port=29400", "--drain-timeout=1"]
    coordinator = slurm.on_login(*command)
    coordinator.line("listening on")
    done = tmp_path / "done"
    env = SETTINGS | {"MIN_NODES": "2", "RDZV_ENDPOINT": "login:29400"}
    submitted = slurm.sbatch("--array=0-2", ARRAY, WORKER, "--until", done, env=env)
    worlds(submitted, 3)
    mark = submitted.output.mark()
    slurm.lose("n3")
    worlds(submitted, 2, since=mark)
    slurm.until_down("n3")
    mark = submitted.output.mark()
    slurm.boot("n3")
    worlds(submitted, 3, since=mark)
    done.touch()
    for element in range(3):
        submitted.until("COMPLETED", element)


@pytest.mark.long
def test_the_time_of_an_element_is_over_and_it_comes_back(slurm: Slurm, tmp_path: Path) -> None:
    slurm.on_login("elastic-rs", "store", "serve", "--port=29400", "--drain-timeout=1").line("listening on")
    done = tmp_path / "done"
    env = SETTINGS | {"RDZV_ENDPOINT": "login:29400"}
    script = SCRIPTS / "preempted.py"
    submitted = slurm.sbatch("--array=0-2", ARRAY, script, tmp_path / "saved", "--until", done, env=env)
    for rank in range(3):
        submitted.output.line(rf"BEGIN rank={rank} world=3")
    mark = submitted.output.mark()
    slurm.ask("scancel", "--batch", "--signal=USR1", f"{submitted.number}_1")
    submitted.output.line(r"the time is over: back into the queue", since=mark)
    submitted.output.line(r"BEGIN rank=0 world=2", since=mark)
    for rank in range(3):
        submitted.output.line(rf"BEGIN rank={rank} world=3", since=mark)
    assert submitted.field("Restarts", 1) == "1"
    done.touch()
    for element in range(3):
        submitted.until("COMPLETED", element)


@pytest.mark.long
def test_a_job_that_is_cancelled_leaves_no_workers(slurm: Slurm, job: Job, tmp_path: Path) -> None:
    submitted = slurm.sbatch("--nodes=2", RECIPE, WORKER, "--until", tmp_path / "never", env=SETTINGS)
    worlds(submitted, 2)
    workers = [pid for pid, env in job._marked() if "RANK" in env]
    assert len(workers) >= 2
    slurm.ask("scancel", submitted.number)
    job.until_gone(*workers)
    submitted.until("CANCELLED")
    assert submitted.field("Restarts") == "0"


@pytest.mark.parametrize(
    ("code", "answer", "cancels"),
    [
        (0, "", True),
        (1, '{"state": {"verdict": "a worker of node 0 failed"}}', True),
        (1, '{"state": {"verdict": null}}', False),
        (2, '{"state": {"verdict": null}}', False),
        (2, '{"state": null}', False),
        (143, "", False),
    ],
)
def test_an_element_that_ends_for_its_nodes_reasons_cancels_no_others(
    tmp_path: Path, code: int, answer: str, cancels: bool
) -> None:
    called = tmp_path / "called"
    for name, text in [
        ("elastic-run", f"exit {code}"),
        ("elastic-rs", f"[ \"$*\" = 'status login:1 --run-id 7 --json' ] && echo '{answer}'; exit 1"),
        ("scancel", f'echo "$*" >>{called}'),
    ]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_JOB_ID": "9", "RDZV_ENDPOINT": "login:1"}
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", str(ARRAY), "train.py"], env=env, check=False, timeout=60).returncode == code
    assert (called.read_text() if called.exists() else "") == ("--state=PENDING 7\n" if cancels else "")


@pytest.mark.parametrize(
    ("codes", "code", "requeues"),
    [
        ("0 0", 0, False),
        ("137 0", 0, False),  # the agent of the first node was killed
        ("0 90", 0, False),  # a machine that was cut off
        ("92 90", 92, False),
        ("90 93", 93, False),
        ("2 2", 2, False),
        ("90 1", 90, True),
        ("91 90", 91, True),
        ("137 137", 1, False),
    ],
)
def test_the_job_has_ended_as_the_agents_that_know_it_say(
    tmp_path: Path, codes: str, code: int, requeues: bool
) -> None:
    called = tmp_path / "called"
    for name, text in [
        ("elastic-run", 'exit "$(echo $CODES | cut -d " " -f $((SLURM_PROCID + 1)))"'),
        ("srun", 'until [ "$1" = bash ]; do shift; done; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done'),
        ("scontrol", f'case $1 in show) printf "n0\nn1\n" ;; requeue) echo "$*" >>{called}; exit 1 ;; esac'),
        ("timeout", "exit 0"),  # the first node is alive
    ]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NODEID": "0"}
    env = {**os.environ, **slurm, "CODES": codes, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", str(RECIPE), "train.py"], env=env, cwd=tmp_path, check=False, timeout=60)
    assert ended.returncode == code
    assert called.exists() == requeues
    assert not list((tmp_path / "elastic-logs").iterdir()), "nothing of its own is left"


@pytest.mark.parametrize("recipe", [RECIPE, ARRAY], ids=lambda path: path.name)
def test_the_options_of_a_recipe_are_those_that_the_page_explains(recipe: Path) -> None:
    text = recipe.read_text()
    subprocess.run(["bash", "-n", str(recipe)], check=True)
    page = (EXAMPLES.parent / "docs" / "clusters.md").read_text()
    options = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert {"--requeue", "--open-mode", "--signal"} <= set(options)
    for option in options:
        assert f"`{option}" in page, option
