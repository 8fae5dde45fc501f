"""A driver with real hosts: an SSH server on loopback, ``ssh``, agents and workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.certificates import certificates
from helpers.procs import LIMIT_S
from helpers.stores import until
from helpers.workers import place

from .conftest import FAMILY, FAST, SCRIPTS, agent_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.procs import Job, Process
    from ssh_server import SshServer

    from .conftest import Drive, Listing


def ssh_of(job: Job, driver: Process, host: str) -> int:
    """Return the pid of the driver's connection with a host."""
    for pid in job.pids():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if words[0] == b"ssh" and host.encode() in words and int(stat[1]) == driver.pid:
            return pid
    raise AssertionError(f"no connection with {host}")


@pytest.mark.parametrize("flag", ["-H", "--hostfile"])
def test_hosts_of_a_list_run_one_job_in_their_order(server: SshServer, drive: Drive, tmp_path: Path, flag: str) -> None:
    file, done = tmp_path / "hosts", tmp_path / "done"
    file.write_text("# as of mpirun\nnode1 slots=1\n\nnode0:2  # two GPUs\n")
    hosts = {"-H": "node1:1,node0:2", "--hostfile": str(file)}[flag]
    driver = drive(flag, hosts, f"--ssh={server.command()}", worker=("--until", done))
    # Horovod's assignment: by host, in the order of the list, consecutive ranks.
    assert place(driver, 3, host="node1")["rank"] == "0"
    ranks = {place(driver, 3, host="node0")["rank"]}
    mark = next(at for at, line in enumerate(driver.lines) if line.startswith("[node0] WORKER"))
    ranks.add(place(driver, 3, host="node0", since=mark + 1)["rank"])
    assert ranks == {"1", "2"}
    done.touch()
    assert driver.wait() == 0


def test_variables_reach_workers_and_no_command_line(server: SshServer, drive: Drive, job: Job, tmp_path: Path) -> None:
    script, done = tmp_path / "show.py", tmp_path / "done"
    script.write_text(
        "import os, pathlib, time\n"
        "print('secret is', os.environ['SECRET'], 'in', os.getcwd(), os.environ.get('PET_HOSTS'), flush=True)\n"
        f"while not pathlib.Path({str(done)!r}).exists(): time.sleep(0.05)\n"
    )
    driver = drive(f"--ssh={server.command()}", script=script, SECRET="hunter two\n✓", PET_HOSTS="node0")
    driver.line(r"^\[node0\] secret is hunter two$")
    driver.line(rf"^\[node0\] ✓ in {re.escape(os.getcwd())} None$")  # noqa: PTH109
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.pids()]
    assert any(line.startswith(b"ssh\0") for line in lines)
    assert not any(b"hunter" in line for line in lines)
    done.touch()
    assert driver.wait() == 0


def shown_secrets(job: Job) -> list[bytes]:
    """Return all command lines of a job, those of ``ssh`` too, that have what could be a token."""
    lines = []
    for pid in job.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    assert any(line.startswith(b"ssh\0") for line in lines)
    assert any(b"elastic_rs._hosted" in line for line in lines)
    return [line for line in lines if re.search(rb"[0-9a-f]{64}", line)]


def test_the_jobs_own_token_is_on_no_command_line(server: SshServer, drive: Drive, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    driver = drive("-H", "node1:1,node0:1", f"--ssh={server.command()}", worker=("--until", done))
    place(driver, 2, host="node0")
    place(driver, 2, host="node1")
    assert shown_secrets(job) == []
    done.touch()
    assert driver.wait() == 0


def test_driver_and_agents_show_the_certificates_that_the_drivers_variables_name(
    server: SshServer, drive: Drive, job: Job, tmp_path: Path
) -> None:
    done, own = tmp_path / "done", certificates(tmp_path / "own", "node")
    driver = drive("-H", "node1:1,node0:1", f"--ssh={server.command()}", worker=("--until", done), **own)
    place(driver, 2, host="node0")
    place(driver, 2, host="node1")
    assert shown_secrets(job) == []
    done.touch()
    assert driver.wait() == 0
    # Without a name for the driver's address, agents say so.
    own = certificates(tmp_path / "elsewhere", "elsewhere")
    driver = drive("-H", "node1:1", f"--ssh={server.command()}", worker=("--until", done), **own)
    driver.line(r"its certificate is not for `.*`, which this end has connected to, but for elsewhere\.example")
    driver.signal(signal.SIGTERM)
    assert driver.wait() != 0


# horovod test/integration: hosts A, A+B, B. The script's list changes while the job runs.
def test_hosts_are_added_and_removed_while_the_job_runs(drive_fast: Drive, listing: Listing, tmp_path: Path) -> None:
    done = tmp_path / "done"
    listing.write("node0:1")
    driver = drive_fast(listing.flag, "--min-np=1", worker=("--until", done))
    place(driver, 1, host="node0")
    mark = driver.mark()
    listing.write("node0:1", "node1:2")
    assert place(driver, 3, host="node0", since=mark)["rank"] == "0"
    place(driver, 3, host="node1", since=mark)
    mark = driver.mark()
    listing.write("node1:2")
    driver.line(r"the agent on node0:1 was asked to leave", since=mark)
    assert place(driver, 2, host="node1", since=mark)["restarts"] == "0", "a host that leaves costs no restart"
    driver.line(r"the agent on node0:1 has left", since=mark)
    done.touch()
    assert driver.wait() == 0


def test_workers_in_place_live_on_while_hosts_are_added_and_removed(
    drive_fast: Drive, listing: Listing, tmp_path: Path
) -> None:
    done = tmp_path / "done"

    def pid_in(world: int, host: str, since: int = 0) -> str:
        return driver.line(rf"^\[{host}\] WORLD rank=\d world={world} step=\d+ pid=(\d+) .* restarts=0", since=since)[1]

    listing.write("node0:1", "node1:1")
    driver = drive_fast(listing.flag, "--min-np=1", script=SCRIPTS / "steps.py", worker=("--until", done))
    first, second = pid_in(2, "node0"), pid_in(2, "node1")
    mark = driver.mark()
    listing.write("node0:1", "node1:1", "node2:1")
    assert [pid_in(3, host, mark) for host in ("node0", "node1")] == [first, second]
    third = pid_in(3, "node2", mark)
    mark = driver.mark()
    listing.write("node1:1", "node2:1")
    assert [pid_in(2, host, mark) for host in ("node1", "node2")] == [second, third]
    driver.line(r"the agent on node0:1 has left", since=mark)
    done.touch()
    assert driver.wait() == 0


def test_a_host_whose_workers_cannot_take_the_state_is_put_out_and_costs_the_others_nothing(
    drive: Drive, listing: Listing, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    listing.write("localhost:2")
    flags = (*FAST, listing.flag, "--min-np=2", "--host-failures=1")
    worker = ("--until", done, "--extra-name", "extra", "--extra-on", "127.0.0.1")
    driver = drive(*flags, script=SCRIPTS / "steps.py", worker=worker)
    ran = [driver.line(rf"WORLD rank={rank} world=2 step=\d+ pid=(\d+) ")[1] for rank in (0, 1)]
    listing.write("localhost:2", "127.0.0.1:1")
    driver.line(r"with a state of ones, step; this worker runs .* with a state of extra, ones, step: all ranks must")
    driver.line(r"host `127\.0\.0\.1`: its workers cannot take part in the job; .* it is out for the job")
    mark = driver.mark()
    again = [driver.line(rf"STEP \d+ ones=\d+ rank={rank} world=2 pid=(\d+)", since=mark)[1] for rank in (0, 1)]
    assert again == ran, "no worker was replaced"
    done.touch()
    assert driver.wait() == 0, driver.tail()
    assert not [line for line in driver.lines if re.search("restart 1 of|restarting all workers", line)]


def test_a_lost_connection_makes_the_node_leave_and_come_back(drive_fast: Drive, job: Job, tmp_path: Path) -> None:
    done = tmp_path / "done"
    driver = drive_fast("-H", "node0:1,node1:1", "--min-np=1", worker=("--until", done))
    place(driver, 2, host="node0")
    before = int(place(driver, 2, host="node1")["pid"])
    mark = driver.mark()
    os.kill(ssh_of(job, driver, "node1"), signal.SIGKILL)
    driver.line(r"host `node1`: ssh was ended by SIGKILL; next try in 1 s \(1 of 3\)", since=mark)
    job.until_gone(before)
    place(driver, 2, host="node1", since=mark)
    done.touch()
    assert driver.wait() == 0


def test_agents_end_with_their_driver(server: SshServer, drive: Drive, job: Job) -> None:
    driver = drive("-H", "node0:1,node1:1", "--shutdown-timeout=5", f"--ssh={server.command()}")
    for host in ("node0", "node1"):
        place(driver, 2, host=host)
    pids = [pid for pid in job.pids() if pid != driver.pid]
    assert len(pids) >= 8, "two connections, agents, guards and workers"
    driver.signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    job.until_gone(*pids)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_driver_ends_the_job(server: SshServer, drive: Drive, job: Job, name: str) -> None:
    driver = drive("-H", "node0:1,localhost:1", "--shutdown-timeout=5", f"--ssh={server.command()}")
    pids = [int(place(driver, 2, host=host)["pid"]) for host in ("node0", "localhost")]
    number = signal.Signals[name]
    driver.signal(number)
    assert driver.wait() == 128 + number
    job.until_gone(*pids)
    # The agent that gets it later may have stopped its workers before, since the other one has left.
    got = re.compile(
        rf"^\[(node0|localhost)\] .*(Received {int(number)} death signal|received {name}: leaving the job)"
    )
    assert sorted(match[1] for line in driver.lines if (match := got.search(line))) == ["localhost", "node0"]


def test_a_signal_to_all_processes_of_a_control_group_leaves_workers_their_grace(drive: Drive, tmp_path: Path) -> None:
    # As systemd sends it: the driver passes on to its agent what that has got itself.
    driver = drive("-H", "localhost:1", script=SCRIPTS / "saves.py", worker=(tmp_path,))
    worker = int(driver.line(r"READY hangup=\w+ pid=(\d+)")[1])
    os.kill(agent_of(worker), signal.SIGTERM)
    driver.signal(signal.SIGTERM)
    driver.line(r"received SIGTERM: all agents are notified; .*; it was sent by pid \d+ ")
    driver.line("STOPPING SIGTERM")
    (tmp_path / "go").touch()
    assert driver.wait() == 143
    assert any("SAVED" in line for line in driver.lines), driver.tail()


def test_under_nohup_driver_and_agent_live_on_when_the_terminal_goes(drive: Drive, job: Job, tmp_path: Path) -> None:
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        driver = drive("-H", "localhost:1", script=SCRIPTS / "saves.py", worker=(tmp_path,))
    finally:
        signal.signal(signal.SIGHUP, hangup)
    driver.line(r"READY hangup=ignored pid=(\d+)")
    for pid in job.pids():
        os.kill(pid, signal.SIGHUP)
    (tmp_path / "done").touch()
    assert driver.wait() == 0


def test_a_job_that_fails_ends_the_driver_with_1_and_its_report(drive_fast: Drive) -> None:
    driver = drive_fast("-H", "node0:1,node1:1", worker=("--raise", "1"))
    assert driver.wait() == 1
    driver.line(r"^\[node1\] .*ChildFailedError")
    last = "elastic-run: the job has failed on host node1, whose agent has printed the report"
    assert driver.lines[-1] == last, driver.tail()


def test_an_ssh_that_lives_on_after_its_agent_is_named_and_ended(drive: Drive, tmp_path: Path) -> None:
    """Something that a worker has left on the host holds the output. The driver waited for it without a word."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nsh -c "$last"\nexec sleep 1000\n')
    ssh.chmod(0o755)
    script = tmp_path / "ends.py"
    script.write_text("")
    began = time.monotonic()
    driver = drive("-H", "node1:1", f"--ssh={ssh}", script=script)
    driver.line(r"WARNING.* the agent on node1 has ended, and ssh to it \(pid \d+\) still runs; .*It is killed in 10s")
    assert driver.wait() == 0
    assert time.monotonic() - began < 100


def test_no_ssh_is_needed_on_this_machine(drive: Drive, tmp_path: Path) -> None:
    done = tmp_path / "done"
    driver = drive("-H", "localhost:2", "--ssh=/nonexistent", worker=("--until", done))
    place(driver, 2, host="localhost")
    done.touch()
    assert driver.wait() == 0


@pytest.mark.parametrize("name", ["127.0.0.1", "[::1]", os.uname().nodename])
def test_this_machines_own_addresses_and_name_do_not_go_by_ssh(drive: Drive, tmp_path: Path, name: str) -> None:
    done = tmp_path / "done"
    driver = drive("-H", f"{name}:2", "--ssh=/nonexistent", worker=("--until", done))
    place(driver, 2, host=name.strip("[]"))
    done.touch()
    assert driver.wait() == 0


def test_a_command_line_that_no_agent_accepts_ends_the_job(drive: Drive, tmp_path: Path) -> None:
    driver = drive("-H", "localhost:1,127.0.0.1:1", "--tee=3", script=tmp_path / "none.py")
    assert driver.wait() == 2
    driver.line(r"elastic-run: error: the script `.*none.py` does not exist")
    driver.line(
        r"error: host `.*`: the agent cannot run there \(exit code 2\); its error is in its output; every other agent"
    )
    assert not [line for line in driver.lines if "it is out" in line]


def test_bad_hosts_are_named_and_the_others_undisturbed(drive_fast: Drive, listing: Listing, tmp_path: Path) -> None:
    done = tmp_path / "done"
    listing.write("node0:1")
    driver = drive_fast(listing.flag, "--host-failures=1", "--discovery-timeout=1", worker=("--until", done))
    place(driver, 1, host="node0")
    mark = driver.mark()
    listing.write("node0:1", "no-such-host.invalid:1")
    driver.line(
        r"host `no-such-host.invalid`: ssh cannot connect: .*Could not resolve.*; it is out for the job", since=mark
    )

    def works_again() -> None:
        since = driver.mark()
        listing.write("node0:1")
        driver.line(r"host discovery works again", since=since)

    listing.write("node0:1", "two words")
    stays = "the hosts of its last answer stay in use"
    driver.line(rf"host discovery failed, and {stays}: .*line 2 is `two words`, must be HOST", since=mark)
    works_again()
    listing.write("node0:1", "node1:0")
    driver.line(r"line 2 is `node1:0`, its slots must be a number from 1 to 65535", since=mark)
    works_again()
    listing.write()
    driver.line(rf"{stays}: it names no host", since=mark)
    works_again()
    script = listing.script.read_text()
    listing.write_script("#!/bin/sh\nexec sleep 1000\n")
    driver.line(rf"{stays}: `.*hosts.sh` has not ended within 1 s, and was killed", since=mark)
    listing.write_script(script)
    works_again()
    listing.script.unlink()
    driver.line(r"hosts.sh` cannot be run: No such file", since=mark)
    assert not any("WORKER" in line for line in driver.lines[mark:])
    done.touch()
    assert driver.wait() == 0


def test_hosts_with_a_wrong_key_are_named_and_the_others_undisturbed(
    server: SshServer, drive: Drive, listing: Listing, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    server.known_hosts("changed", "stranger")
    settings = {"node1": "User nobody-here", "node2": f"UserKnownHostsFile {server.folder / 'changed'}"}
    listing.write("node0:1")
    flags = [*FAST, f"--ssh={server.command(settings=settings)}", listing.flag, "--host-failures=1"]
    driver = drive(*flags, worker=("--until", done))
    place(driver, 1, host="node0")
    mark = driver.mark()
    listing.write("node0:1", "node1:1", "node2:1")
    driver.line(r"host `node1`: ssh cannot connect: .*Permission denied.*; it is out for the job", since=mark)
    driver.line(r"host `node2`: ssh cannot connect: .*has changed.*; it is out for the job", since=mark)
    # One that lets the driver in joins as ever.
    listing.write("node0:1", "node1:1", "node2:1", "node3:1")
    place(driver, 2, host="node3")
    done.touch()
    assert driver.wait() == 0


MIXED = """#!/bin/sh
for word; do
  case $word in
    hangs) echo about to hang >&2; exec sleep 1000 ;;
    bare) exec {python} -I -S -c "from elastic_rs._hosted import main" ;;
    early) PYTHONPATH={early} exec {python} -S -c "from elastic_rs._hosted import main" ;;
    other) read -r own; token=${{own#*'"token":"'}}
      echo "elastic_rs-agent ${{token%%'"'*}} {{\\"up\\": {{\\"version\\": \\"0.0.1\\"}}}}"; exec sleep 1000 ;;
  esac
done
exec {ssh} "$@"
"""


def test_hosts_without_an_agent_of_this_version_are_named_and_the_others_undisturbed(
    server: SshServer, drive: Drive, listing: Listing, tmp_path: Path
) -> None:
    done, ssh, early = (tmp_path / name for name in ("done", "mixed", "early"))
    (early / "elastic_rs").mkdir(parents=True)
    (early / "elastic_rs" / "__init__.py").touch()
    ssh.write_text(MIXED.format(python=sys.executable, early=early, ssh=server.command()))
    ssh.chmod(0o755)
    listing.write("node0:1")
    flags = [*FAST, f"--ssh={ssh}", listing.flag, "--host-failures=1", "--start-timeout=15"]
    driver = drive(*flags, worker=("--until", done))
    place(driver, 1, host="node0")
    mark = driver.mark()
    listing.write("node0:1", "hangs:1", "bare:1", "early:1", "other:1")
    for host, why in [
        ("bare", r"elastic_rs is not installed for `.*` there \(exit code 1\)"),
        (
            "early",
            r"the elastic_rs of `.*` there is of another version, or incomplete \(exit code 1\): .*elastic_rs\._hosted",
        ),
        ("other", r"it has elastic_rs 0\.0\.1, and the driver \d+\.\d+\.\d+"),
        ("hangs", r"no agent has started there after 15 s \(--start-timeout\): about to hang"),
    ]:
        driver.line(rf"host `{host}`: {why}.*; it is out for the job", since=mark)
    assert not any("WORKER" in line for line in driver.lines[mark:])
    done.touch()
    assert driver.wait() == 0


# horovod test/single/test_elastic_discovery.py: the first failure ends the job.
def test_a_script_that_fails_at_its_first_call_ends_the_job(drive: Drive, listing: Listing) -> None:
    listing.script.write_text("#!/bin/sh\necho no cluster >&2\nexit 3\n")
    driver = drive(listing.flag)
    assert driver.wait() == 1
    driver.line(r"host discovery failed at its first call: `.*hosts.sh` has ended with exit code 3: no cluster$")


@pytest.mark.parametrize(
    ("ssh", "expected"),
    [
        ({"key": "stranger"}, r"ssh cannot connect: .*Permission denied.*; the driver cannot answer questions"),
        (
            {"known": "nothing"},
            r"ssh cannot connect: .*verification failed.*; known_hosts does not have the host's key",
        ),
        ({"known": "changed"}, r"ssh cannot connect: .*has changed.*; the host's key is not the one in known_hosts"),
    ],
    ids=["refused key", "unknown host key", "changed host key"],
)
def test_a_host_that_ssh_does_not_enter_ends_a_fixed_job_with_the_reason(
    server: SshServer, drive: Drive, ssh: dict[str, Any], expected: str
) -> None:
    (server.folder / "nothing").touch()
    server.known_hosts("changed", "stranger")
    driver = drive("-H", "node0:1", "--host-failures=1", f"--ssh={server.command(**ssh)}")
    assert driver.wait() == 1
    driver.line(rf"^elastic-run: error: slots left: 0, must be at least 1 \(--min-np\): host `node0`: {expected}")


# horovod test/single/test_elastic_driver.py: a host fails before the rendezvous, and the other one's workers remain.
def test_a_host_that_fails_before_the_rendezvous_leaves_the_others(
    server: SshServer, drive: Drive, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    ssh = server.command(ports={"node1": 1})
    driver = drive(
        *("-H", "node0:2,node1:2", "--min-np=2", "--host-failures=1", *FAST, f"--ssh={ssh}"), worker=("--until", done)
    )
    driver.line(r"host `node1`: ssh cannot connect: .*Connection refused; it is out for the job")
    place(driver, 2, host="node0")
    done.touch()
    assert driver.wait() == 0


# The same in which the job cannot do without.
def test_a_job_whose_hosts_are_all_lost_ends_with_the_reason(drive_fast: Drive, job: Job) -> None:
    driver = drive_fast("-H", "node0:1,node1:1", "--host-failures=1")
    pids = [int(place(driver, 2, host=host)["pid"]) for host in ("node0", "node1")]
    os.kill(ssh_of(job, driver, "node0"), signal.SIGKILL)
    assert driver.wait() == 1
    driver.line(
        r"^elastic-run: error: slots left: 1, must be at least 2 \(--min-np\): host `node0`: ssh was ended by SIGKILL"
    )
    job.until_gone(*pids)


MINE = """
from elastic_rs import run
from elastic_rs.discovery import HostDiscovery

class Mine(HostDiscovery):
    def find_available_hosts_and_slots(self):
        return {"localhost": 2}

if __name__ == "__main__":
    raise SystemExit(run.main(["--min-np=2", "SCRIPT", "--until", "done"], discovery=Mine()))
"""


@pytest.mark.parametrize("way", ["flag", "function"])
def test_a_class_of_the_users_finds_hosts(job: Job, drive: Drive, tmp_path: Path, way: str) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace("SCRIPT", str(FAMILY)))
    if way == "flag":
        driver = drive("--host-discovery=mine:Mine", "--min-np=2", worker=("--until", "done"), cwd=tmp_path)
    else:
        driver = job.start(["env", f"--chdir={tmp_path}", sys.executable, "mine.py"], name="driver")
    place(driver, 2, host="localhost")
    (tmp_path / "done").touch()
    assert driver.wait() == 0


def test_an_agent_that_cannot_be_is_named(server: SshServer, drive: Drive, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    other = tmp_path / "other"
    other.write_text(
        f"#!{sys.executable}\nimport json\ntoken = json.loads(input())['token']\n"
        "print('elastic_rs-agent', token, json.dumps({'up': {'version': '0.0.1'}}), flush=True)\ninput()\ninput()\n"
    )
    other.chmod(0o755)
    for python, expected in [
        ("/no/python", r"there is no `/no/python` \(--remote-python names another\)"),
        (str(bare), r"elastic_rs is not installed for `.*bare` there"),
        (str(other), r"it has elastic_rs 0.0.1, and the driver \d+\.\d+\.\d+: install the same version"),
    ]:
        driver = drive("-H", "node0:1", "--host-failures=1", f"--remote-python={python}", f"--ssh={server.command()}")
        assert driver.wait() == 1
        driver.line(rf"^elastic-run: error: .*host `node0`: {expected}")


def test_an_ssh_that_hangs_is_given_up_at_its_limit(drive: Drive, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho about to hang >&2\nexec sleep 1000\n")
    ssh.chmod(0o755)
    driver = drive("-H", "node0:1", "--host-failures=1", "--start-timeout=0.5", f"--ssh={ssh}")
    assert driver.wait(limit_s=30) == 1
    driver.line(r"host `node0`: no agent has started there after 0.5 s \(--start-timeout\): about to hang")


def test_a_script_that_does_not_exist_there_is_told(server: SshServer, drive: Drive, tmp_path: Path) -> None:
    driver = drive("-H", "node0:1", "--host-failures=1", f"--ssh={server.command()}", script=tmp_path / "none.py")
    assert driver.wait() == 2
    driver.line(r"^\[node0\] elastic-run: error: the script `.*none.py` does not exist")
    driver.line(r"host `node0`: the agent cannot run there \(exit code 2\)")


LATE = """#!{python} -S
import os, subprocess, sys, time
agent = [{python!r}, *sys.argv[1:]]
if {address!r} not in os.environ["SSH_CONNECTION"].split():
    os.execv(agent[0], agent)
own, job = sys.stdin.buffer.readline(), sys.stdin.buffer.readline()
process = subprocess.Popen(agent, stdin=subprocess.PIPE)
process.stdin.write(own)
process.stdin.flush()
while not os.path.exists({release!r}):
    time.sleep(0.05)
process.stdin.write(job)
process.stdin.flush()
sys.exit(process.wait())
"""


def test_an_agent_that_comes_after_the_success_ends_well(
    server: SshServer, drive_fast: Drive, job: Job, tmp_path: Path
) -> None:
    python, done, release = (tmp_path / name for name in ("python", "done", "release"))
    # The agent on node1 reports that it runs, and gets the job's line only when the job is over.
    address = server.names["node1"]
    python.write_text(LATE.format(python=sys.executable, address=address, release=str(release)))
    python.chmod(0o755)
    driver = drive_fast("-H", "node0:1,node1:1", "--min-np=1", f"--remote-python={python}", worker=("--until", done))
    agent = agent_of(int(place(driver, 1, host="node0")["pid"]))
    driver.line("an agent runs on node1:1")
    done.touch()
    job.until_gone(agent)
    release.touch()
    assert driver.wait() == 0
    driver.line(r"^\[node1\] .*the job had succeeded before this node could join it")
    assert not any("RendezvousClosedError" in line for line in driver.lines)


def test_a_dry_run_starts_nothing(drive: Drive) -> None:
    driver = drive("-H", "node0:2,localhost", "--dry-run", "--max-restarts=3", worker=("--until", "x"))
    assert driver.wait() == 0
    driver.line(r"^coordinator  here, at any free port$")
    driver.line(
        r"^host         node0, 2 slots: ssh -T -o BatchMode=yes .* node0 'exec .* -c .*elastic_rs._hosted import main"
    )
    driver.line(
        r"^  there      elastic-run --max-restarts=3 .*--nproc-per-node=2 --rdzv-endpoint=DRIVER:PORT "
        r".*,node_rank=0,is_host=0 .*family.py --until x$"
    )
    driver.line(r"^host         localhost, 1 slots: .* -c '.*elastic_rs._hosted import main")
    assert not any("] WORKER " in line for line in driver.lines)


def test_a_dry_run_says_which_detached_agent_hosts_the_rendezvous(drive: Drive) -> None:
    driver = drive("-H", "me@node1:2", "--dry-run", "--detach")
    assert driver.wait() == 0
    driver.line(r"^coordinator  on me@node1, at node1:29400$")
    driver.line(r"^  there      .*--rdzv-endpoint=node1:29400 .*,host_name=me@node1,node_rank=0,is_host=1 ")


def test_a_dry_run_says_where_detached_agents_meet(drive: Drive) -> None:
    driver = drive("-H", "me@node1:2,node0,[fd00::7]:1,node9", "--dry-run", "--detach")
    assert driver.wait() == 0
    listed = "node1:29400,node0:29400,[fd00::7]:29400"
    driver.line(rf"^coordinator  on one of these hosts, at {re.escape(listed)}$")


def test_a_detached_job_whose_first_host_cannot_be_reached_fails(server: SshServer, drive: Drive) -> None:
    ssh = server.command(ports={"node1": 1})
    driver = drive("-H", "node1:1,node0:1", "--min-np=1", "--detach", "--host-failures=1", f"--ssh={ssh}")
    assert driver.wait() == 1
    driver.line(r"elastic-run: error: the agent on `node1`, one of the list's hosts, would have hosted the rendezvous")


def test_more_hosts_than_descriptors_are_told_with_the_number_that_they_need(job: Job) -> None:
    hosts = ",".join(f"node{number}" for number in range(60))
    command = [sys.executable, "-m", "elastic_rs.run", "-H", hosts, "--ssh=false", "train.py"]
    driver = job.start(["sh", "-c", 'ulimit -n 300; exec "$@"', "sh", *command], name="driver")
    assert driver.wait() == 1
    driver.line(r"it names 60 hosts, for which the driver needs \d+ descriptors; its limit is 300 \(`ulimit -Hn`\)")


def test_detached_agents_outlive_the_driver_and_the_connections(
    server: SshServer, drive: Drive, job: Job, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    done = tmp_path / "done"
    driver = drive(
        *("-H", "node0:1,node1:1", "--detach", "--rdzv-id=far", f"--rdzv-endpoint=127.0.0.2:{free_port()}"),
        f"--ssh={server.command()}",
        worker=("--until", done),
        cwd=tmp_path,
    )
    assert driver.wait() == 0
    driver.line(r"agents with 2 slots run on without the driver$")
    logs = [tmp_path / f"elastic-run-far-{age}.log" for age in (0, 1)]
    left = [int(driver.line(rf"the agent is pid (\d+), and its output is in {log}$")[1]) for log in logs]
    for rank, log in enumerate(logs):
        deadline = time.monotonic() + 120
        while f"WORKER rank={rank} world=2" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0") for pid in job.pids())
    done.touch()
    job.until_gone(*left)


def test_a_detached_job_goes_on_when_the_agent_that_leads_is_killed(
    server: SshServer, drive: Drive, job: Job, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    done = tmp_path / "done"
    endpoints = ",".join(f"127.0.0.{number}:{free_port()}" for number in (2, 3, 4))
    driver = drive(
        *("-H", "node0:1,node1:1,node2:1", "--min-np=2", "--detach", "--rdzv-id=far", f"--rdzv-endpoint={endpoints}"),
        f"--ssh={server.command()}",
        worker=("--until", done),
        cwd=tmp_path,
    )
    assert driver.wait() == 0
    logs = [tmp_path / f"elastic-run-far-{age}.log" for age in range(3)]
    agents = [int(driver.line(rf"the agent is pid (\d+), and its output is in {log}$")[1]) for log in logs]

    until("a world of three", lambda: trains(logs, 3), LIMIT_S)
    first = next(age for age, log in enumerate(logs) if "this process leads the run" in log.read_text())
    os.kill(agents.pop(first), signal.SIGKILL)
    until("a world of two", lambda: trains(logs, 2), LIMIT_S)
    done.touch()
    job.until_gone(*agents)


def trains(logs: list[Path], size: int) -> bool:
    said = "".join(log.read_text() for log in logs)
    return all(f"WORKER rank={rank} world={size} " in said for rank in range(size))


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "success"])
def test_a_discovery_script_that_hangs_ends_with_its_driver(drive: Drive, job: Job, tmp_path: Path, end: str) -> None:
    """Its second call hangs, with a child."""
    called, pids, done = tmp_path / "called", tmp_path / "pids", tmp_path / "done"
    script = tmp_path / "hosts.sh"
    script.write_text(
        f"#!/bin/sh\n[ -e {called} ] || {{ touch {called}; echo localhost:1; exit; }}\n"
        f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait\n"
    )
    script.chmod(0o755)
    flags = (f"--host-discovery-script={script}", "--min-np=1", "--discovery-interval=1", "--discovery-timeout=600")
    driver = drive(*flags, worker=("--until", done))
    until("it is called again", pids.exists)
    if end == "success":
        done.touch()
    else:
        driver.signal(getattr(signal, end))
    assert (driver.wait() == 0) == (end == "success")
    for pid in map(int, pids.read_text().split()):
        job.until_gone(pid)


def test_a_wrong_flag_for_output_is_refused_before_any_agent_starts(drive: Drive) -> None:
    for flag, words in (("--ranks-filter=x", "--ranks-filter is `x`, must be ranks: 0,1,2"), ("--tee=9", "--tee ")):
        driver = drive("-H", "localhost:1", flag)
        assert driver.wait() == 2
        driver.line(rf"elastic-run: error: {re.escape(words)}")
        assert not any("agent" in line for line in driver.lines)
