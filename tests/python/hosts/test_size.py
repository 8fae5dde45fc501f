"""How many workers a driver's job has, and which hosts are kept out of it, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.workers import place

from .conftest import agent_of

if TYPE_CHECKING:
    from helpers.procs import Job
    from ssh_server import SshServer

    from .conftest import Drive, Listing

# The first world has all hosts, however slowly they start. Later ones do not wait for a last call.
FIXED = ("--rdzv-conf=last_call_timeout=100", "--shutdown-timeout=5", "--min-np=1")
FLAKY = """
import os, pathlib, sys, time
bad, done, ran = map(pathlib.Path, sys.argv[1:])
address = os.environ.get("SSH_CONNECTION", "? ? ? ?").split()[2]
words = {name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")}
os.write(1, f"WORKER rank={words['rank']} world={words['world_size']} at={address}\\n".encode())
with ran.open("a") as file:
    file.write(f"{address}\\n")
while not done.exists():
    if bad.exists() and address == bad.read_text():
        sys.exit(3)
    time.sleep(0.05)
"""


def test_the_host_that_would_pass_max_np_starts_fewer_workers(server: SshServer, drive: Drive, tmp_path: Path) -> None:
    done = tmp_path / "done"
    driver = drive("-H", "node0:2,node1:2", "--max-np=3", f"--ssh={server.command()}", worker=("--until", done))
    for rank in range(3):
        driver.line(rf"^\[node\d\] WORKER rank={rank} world=3 ")
    done.touch()
    assert driver.wait() == 0
    workers = [line.split()[:3] for line in driver.lines if "] WORKER " in line]
    assert sorted(rank for _, _, rank in workers) == ["rank=0", "rank=1", "rank=2"]
    # The host whose agent joined last starts one worker.
    assert sorted([host for host, _, _ in workers].count(f"[{host}]") for host in ("node0", "node1")) == [1, 2]


def test_a_spare_host_steps_in_for_one_that_vanishes(drive_fast: Drive, listing: Listing, tmp_path: Path) -> None:
    done = tmp_path / "done"
    listing.write("node0:1", "node1:1")
    driver = drive_fast(listing.flag, "--min-np=1", "--max-np=2", worker=("--until", done))
    place(driver, 2, host="node1")
    listing.write("node0:1", "node1:1", "node2:1")
    driver.line(r"an agent runs on node2:1")
    mark = driver.mark()
    listing.write("node0:1", "node2:1")
    place(driver, 2, host="node2", since=mark)
    done.touch()
    assert driver.wait() == 0


# horovod test/integration: min-np not reached in time.
def test_too_few_slots_end_the_job_after_the_elastic_timeout(server: SshServer, drive: Drive, listing: Listing) -> None:
    listing.write("node0:1")
    driver = drive(
        *(listing.flag, "--min-np=2", "--elastic-timeout=5", "--discovery-interval=0.2"),
        *("--shutdown-timeout=2", f"--ssh={server.command()}"),
    )
    assert driver.wait() == 1
    driver.line(r"^elastic-run: error: slots with an agent for \d+ s \(--elastic-timeout\): 1, must be at least 2 ")
    assert not any("WORKER" in line for line in driver.lines)


# horovod test/single/test_elastic_driver.py: the driver waits for min-np slots.
def test_a_job_begins_when_a_host_appears_with_which_there_are_enough(
    drive_fast: Drive, listing: Listing, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    listing.write("node0:1")
    driver = drive_fast(listing.flag, "--min-np=3", worker=("--until", done))
    driver.line(r"an agent runs on node0:1")
    mark = driver.mark()
    listing.write("node0:1", "node1:2")
    assert place(driver, 3, host="node0", since=mark)["rank"] == "0"
    place(driver, 3, host="node1", since=mark)
    assert not any("WORKER" in line for line in driver.lines[:mark])
    done.touch()
    assert driver.wait() == 0


# horovod test/integration: rank 0 raises, and host B goes on.
def test_the_others_go_on_without_the_host_on_which_rank_0_fails(
    server: SshServer, drive: Drive, tmp_path: Path
) -> None:
    script, bad, done, ran = (tmp_path / name for name in ("flaky.py", "bad", "done", "ran"))
    script.write_text(FLAKY)
    driver = drive(
        *("-H", "node0:1,node1:1", *FIXED, "--max-restarts=1", "--host-failures=1", f"--ssh={server.command()}"),
        worker=(bad, done, ran),
        script=script,
    )
    driver.line(r"^\[node0\] WORKER rank=0 world=2")
    driver.line(r"^\[node1\] WORKER rank=1 world=2")
    mark = driver.mark()
    bad.write_text(server.names["node0"])
    driver.line(r"host `node0` is out for the job: ", since=mark)
    driver.line(r"^\[node1\] WORKER rank=0 world=1", since=mark)
    done.touch()
    assert driver.wait() == 0


# horovod test/integration: all ranks fail.
def test_a_job_whose_workers_all_fail_ends_when_no_restart_is_left(
    server: SshServer, drive: Drive, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\nos.write(1, f'TRY {os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}\\n'.encode())\nraise ValueError\n"
    )
    driver = drive("-H", "node0:1,node1:1", *FIXED, "--max-restarts=2", f"--ssh={server.command()}", script=script)
    assert driver.wait() == 1
    driver.line(r"elastic-run: the job has failed on host node\d, whose agent has printed the report$")
    tries = {line.split()[-1] for line in driver.lines if "] TRY " in line}
    assert tries <= {"0", "1", "2"}
    assert "2" in tries


def test_the_driver_ends_with_the_exit_code_of_its_agents(server: SshServer, drive: Drive) -> None:
    flags = (*FIXED, "--exit-code=worker", f"--ssh={server.command()}", "--no-python")
    driver = drive("-H", "node0:1,node1:1", *flags, script="sh", worker=("-c", "exit 7"))
    assert driver.wait() == 7


# horovod test/integration: all hosts fail.
def test_a_job_whose_hosts_all_fail_ends(server: SshServer, drive: Drive, job: Job, tmp_path: Path) -> None:
    driver = drive(
        *("-H", "node0:1,node1:1", *FIXED, "--host-failures=1", f"--ssh={server.command()}"),
        worker=("--until", tmp_path / "never"),
    )
    workers = [int(place(driver, 2, host=host)["pid"]) for host in ("node0", "node1")]
    for agent in map(agent_of, workers):
        os.kill(agent, signal.SIGKILL)
    assert driver.wait() == 1
    driver.line(
        r"^elastic-run: error: slots left: 0, must be at least 1 \(--min-np\): host `node\d`: .*; host `node\d`: "
    )
    job.until_gone(*workers)


# horovod test/integration: rank 0 is killed, and host B goes on.
def test_the_others_go_on_without_the_host_of_rank_0(server: SshServer, drive: Drive, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    driver = drive(
        *("-H", "node0:1,node1:1", *FIXED, "--host-failures=1", f"--ssh={server.command()}"),
        worker=("--until", done),
    )
    first = place(driver, 2, host="node0")
    assert first["rank"] == "0"
    rank_0 = int(first["pid"])
    place(driver, 2, host="node1")
    mark = driver.mark()
    os.kill(agent_of(rank_0), signal.SIGKILL)
    assert place(driver, 1, host="node1", since=mark)["rank"] == "0"
    # Whichever is known first: its port says that the agent has ended, or its connection.
    driver.line(
        r"host `node0`(?:: the connection was lost, or a signal ended the agent| is out for the job)", since=mark
    )
    job.until_gone(rank_0)
    done.touch()
    assert driver.wait() == 0


# horovod test/integration: a failed worker takes its host out, which comes back after its cool-down (resurrect).
def test_a_host_whose_worker_fails_is_out_and_comes_back(server: SshServer, drive: Drive, tmp_path: Path) -> None:
    script, bad, done, ran = (tmp_path / name for name in ("flaky.py", "bad", "done", "ran"))
    script.write_text(FLAKY)
    address = server.names["node1"]
    driver = drive(
        *("-H", "node0:1,node1:1", *FIXED, "--max-restarts=9", f"--ssh={server.command()}"),
        *("--blacklist-cooldown-range", "3", "60"),
        worker=(bad, done, ran),
        script=script,
    )
    driver.line(r"^\[node1\] WORKER rank=1 world=2")
    mark = driver.mark()
    bad.write_text(address)
    driver.line(r"host `node1` is out for [1-3](\.\d)? s: ", since=mark)
    driver.line(r"^\[node0\] WORKER rank=0 world=1", since=mark)
    bad.unlink()
    driver.line(r"^\[node1\] WORKER rank=1 world=2", since=mark)
    done.touch()
    assert driver.wait() == 0


def test_without_a_cool_down_a_host_is_out_for_the_job(server: SshServer, drive: Drive, tmp_path: Path) -> None:
    script, bad, done, ran = (tmp_path / name for name in ("flaky.py", "bad", "done", "ran"))
    script.write_text(FLAKY)
    bad.write_text(server.names["node1"])
    driver = drive(
        *("-H", "node0:1,node1:1", *FIXED, "--max-restarts=9", f"--ssh={server.command()}"),
        "--host-failures=2",
        worker=(bad, done, ran),
        script=script,
    )
    driver.line(r"host `node1` is out for the job: ")
    mark = driver.mark()
    driver.line(r"^\[node0\] WORKER rank=0 world=1", since=mark)
    done.touch()
    assert driver.wait() == 0
    # Not by the lines: what node1's last worker has printed may come after the driver's own line.
    assert ran.read_text().split().count(server.names["node1"]) == 2


# horovod test/integration: reset limit 1 fails, 2 passes.
@pytest.mark.parametrize(("limit", "code"), [(1, 1), (2, 0)])
def test_resets_are_limited(drive_fast: Drive, listing: Listing, limit: int, code: int) -> None:
    done = listing.script.with_name("done")
    listing.write("node0:1")
    driver = drive_fast(listing.flag, "--min-np=1", f"--reset-limit={limit}", worker=("--until", done))
    place(driver, 1, host="node0")
    mark = driver.mark()
    listing.write("node0:1", "node1:1")
    place(driver, 2, host="node0", since=mark)
    mark = driver.mark()
    listing.write("node0:1")
    if code == 0:
        place(driver, 1, host="node0", since=mark)
        done.touch()
    assert driver.wait() == code
    if code:
        driver.line(r"no resets left: the world may change 1 times \(reset_limit\)")
