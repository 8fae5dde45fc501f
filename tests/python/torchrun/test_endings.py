"""Our agent under stock torchrun: signals in every state, exit codes, log lines and final messages."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from elastic_rs._elastic_rs import SAME_SIGNAL_S
from helpers.observe import ask
from helpers.procs import Job, Process
from helpers.workers import place

from .conftest import FAMILY, Start, shutdown_timeout

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.parametrize("agent", ["rust", "run"], indirect=True),
]
JOINED = r"127\.0\.0\.{} .* joined"


def test_sigterm_while_waiting_in_the_rendezvous_leaves_it(start: Start) -> None:
    # pytorch #154849: PyTorch handles signals only once workers run.
    host = start(2, nnodes="3")
    host.line(JOINED.format(2))
    leaver = start(3, nnodes="3")
    host.line(JOINED.format(3))
    began = time.monotonic()
    leaver.signal(signal.SIGTERM)
    assert leaver.wait() == 143
    assert time.monotonic() - began < 60, "1 to 2 s on an idle machine"
    host.line(r"127\.0\.0\.3 .* left")
    host.signal(signal.SIGTERM)
    assert host.wait() == 143


def test_sigterm_ends_the_first_process_of_a_container(start: Start) -> None:
    # pytorch #154849: the kernel drops signals that process 1 does not handle.
    under = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if os.system(" ".join([*under, "true", "2>/dev/null"])) != 0:
        pytest.skip("this machine allows no process namespace")
    node = start(2, nnodes="2", under=under)
    node.line(JOINED.format(2))
    (child,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert node.wait() == 143


def test_a_second_interrupt_kills_at_once(start: Start, agent: str) -> None:
    # PyTorch starts another wait.
    node = start(2, "--stubborn", nnodes="1", script=FAMILY, options=shutdown_timeout(200, agent))
    place(node, 1)
    node.signal(signal.SIGINT)
    node.line(r"shutting down workers \(SIGINT\)")
    time.sleep(2 * SAME_SIGNAL_S)  # one that comes at once is no second one
    began = time.monotonic()
    node.signal(signal.SIGINT)
    assert node.wait() == 130
    assert time.monotonic() - began < 25
    assert any("received SIGINT: killing what is left" in line for line in node.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_logged_once_in_pytorch_s_wording(start: Start, number: signal.Signals) -> None:
    node = start(2, nnodes="1", script=FAMILY, env={"ELASTIC_RS_LOG": ""})
    place(node, 1)
    node.signal(number)
    assert node.wait() == 128 + number
    result = [line for line in node.lines if re.search(r"\bsignal\b", line)]
    assert len(result) == 1, result
    assert f"Received {number.value} death signal, shutting down workers ({number.name})" in result[0]


def failure_of(nodes: list[Process]) -> list[str]:
    """Wait for the nodes to fail, and return the output of each from its first ``ChildFailedError`` on."""
    assert [node.wait() for node in nodes] == [1, 1]
    texts = ["\n".join(node.lines) for node in nodes]
    return [text[text.index("ChildFailedError") :] for text in texts]


def test_an_exception_is_named_on_every_node(start: Start) -> None:
    # pytorch #113546: PyTorch says <N/A> unless the script uses @record, and nothing on other nodes.
    host = start(2, "--raise=1", nnodes="2", restarts=0, script=FAMILY)
    host.line(JOINED.format(2))
    for text in failure_of([host, start(3, "--raise=1", nnodes="2", restarts=0, script=FAMILY)]):
        assert "ValueError: the sky fell" in text
        assert "127.0.0.3" in text
        assert "rank      : 1" in text


def test_another_node_s_failure_on_a_terminal_has_a_hint(start: Start) -> None:
    # The worker's traceback is only on the terminal.
    on_terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    options = {"nnodes": "2", "restarts": 0, "script": FAMILY}
    there = start(2, "--raise", "0", conf="node_rank=0", under=[sys.executable, "-c", on_terminal], **options)
    here = start(3, "--raise", "0", conf="node_rank=1", **options)
    text = failure_of([there, here])[1]
    assert "exit code 1 on 127.0.0.2" in text
    assert "the sky fell" not in text
    assert "https://pytorch.org/docs/stable/elastic/errors.html" in text


def test_a_sigbus_is_reported_with_the_size_of_shared_memory_that_is_full(start: Start, tmp_path: Path) -> None:
    mounts = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    under = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounts, "sh"]
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no mount namespace")
    script = tmp_path / "fills.py"
    script.write_text(
        "import mmap\n"
        "file = open('/dev/shm/tensor', 'w+b')\n"
        "file.truncate(4 << 20)\n"
        "mapped = mmap.mmap(file.fileno(), 4 << 20)\n"
        "mapped[:] = bytes(4 << 20)\n"
    )
    node = start(2, nnodes="1", restarts=0, script=script, under=under)
    assert node.wait() == 1
    text = "\n".join(node.lines)
    text = text[text.index("ChildFailedError") :]
    assert "exitcode  : -7" in text
    assert re.search(r"shared memory is full: /dev/shm holds 2\.0 MiB, of which 0\.0 MiB are free; .*--shm-size", text)


FAILS_FIRST = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if rank == "0":
    while not all((folder / name).exists() for name in "12"):
        time.sleep(0.02)
    (folder / "failed").write_text(str(time.time()))
    os._exit(3)
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / rank).touch()
while True:
    time.sleep(0.02)
"""


def test_the_report_has_the_time_of_the_failure_and_no_stopped_worker(start: Start, agent: str, tmp_path: Path) -> None:
    script, grace = tmp_path / "fails_first.py", shutdown_timeout(4, agent)
    script.write_text(FAILS_FIRST)
    options = [*grace, f"--log-dir={tmp_path / 'logs'}"]
    node = start(2, tmp_path, nnodes="1", nproc=3, restarts=0, script=script, options=options)
    assert node.wait() == 1
    text = "\n".join(node.lines)
    text = text[text.index("ChildFailedError") :]
    assert "<NO_OTHER_FAILURES>" in text
    assert "SIGKILL" not in text
    shown = re.search(r"time +: (\S+)", text)
    assert shown is not None
    failed = float((tmp_path / "failed").read_text())
    assert abs(datetime.fromisoformat(shown[1].replace("_", " ")).timestamp() - failed) < 2, "it ended 4 s later"
    result = ask("why", "--events", tmp_path / "logs").stdout
    assert "2 other workers were stopped: " in result
    assert re.search(r"1 by SIGKILL \(\S+ rank 1\)", result), result
    assert re.search(r"1 by SIGTERM \(\S+ rank 2\)", result), result


def test_a_sigkill_is_reported_with_a_hint_at_memory(start: Start) -> None:
    # pytorch #113546: most SIGKILLs come from the kernel's OOM killer.
    nodes = [start(n, nnodes="2", restarts=0, script=FAMILY) for n in (2, 3)]
    pids = [int(place(node, 2)["pid"]) for node in nodes]
    os.kill(pids[1], signal.SIGKILL)
    for text in failure_of(nodes):
        assert "SIGKILL on 127.0.0.3" in text
        assert "exitcode  : -9" in text
        assert "OOM" in text
        assert str(pids[1]) in text


def test_a_spare_that_was_not_needed_ends_well(start: Start, job: Job, tmp_path: Path) -> None:
    # pytorch #114097: with PyTorch's launcher the spare ends with 1.
    done = tmp_path / "done"
    nodes = [start(n, "--until", done, nnodes="2:2", script=FAMILY) for n in (2, 3)]
    for node in nodes:
        place(node, 2)
    spare = start(4, "--until", done, nnodes="2:2", script=FAMILY)
    host = next(node for node in nodes if any("hosts the coordinator" in line for line in node.lines))
    host.line(r"127\.0\.0\.4 .* joined \(3 of 2 nodes\)")
    assert job.workers(spare) == {}
    done.touch()
    assert [node.wait() for node in [*nodes, spare]] == [0, 0, 0]


def test_the_log_of_a_round_is_a_handful_of_lines_that_name_the_job(start: Start, tmp_path: Path) -> None:
    done = tmp_path / "done"
    nodes = [start(n, "--exit=1:7", "--until", done, nnodes="2", script=FAMILY) for n in (2, 3)]
    for node in nodes:
        node.line(r"WORKER .* restarts=1")
    done.touch()
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        of_endpoint = re.compile("the (coordinator at|endpoint) 127")
        lines = [line for line in node.lines if line.startswith("[elastic_rs]") and not of_endpoint.search(line)]
        hosts = any("this process hosts the coordinator" in line for line in node.lines)
        assert all(": [job] " in line for line in lines)
        rounds = [[line for line in lines if f"round {number}" in line] for number in (1, 2)]
        # The host also logs the coordinator's decisions.
        assert all(2 < len(result) < (8 if hosts else 5) for result in rounds), "\n".join(lines)
        (began, *rest) = [line for line in rounds[0] if "agent: [job] round 1, node rank" in line]
        assert re.search(r"runs as rank \d to \d of 2, role default, restart 0 of 3; pids \d+$", began)
        # A failure is logged once, as a warning.
        failed = re.compile(r"WARNING agent: .* after \d+\.\d s: .*rank 1 .*exit code 7")
        assert len([line for line in rest if failed.search(line)]) == 1, "\n".join(rest)


def test_a_restart_is_logged_as_a_warning(start: Start, tmp_path: Path) -> None:
    options = {"nnodes": "1", "restarts": 1, "script": FAMILY, "env": {"ELASTIC_RS_LOG": ""}}
    (tmp_path / "done").touch()
    node = start(2, "--exit=0:7", "--until", tmp_path / "done", **options)
    assert node.wait() == 0
    result = [line for line in node.lines if "elastic_rs" in line]
    assert len(result) == 3, node.tail()
    said = r"\[elastic_rs\] \S+ WARNING agent: \[job\] round 1, node rank 0, after \d+\.\d s: {}: {}"
    failure = "rank 0 .* exit code 7(?!.*notified)"  # the job has one node
    assert re.match(said.format("stopping all workers", failure), result[0])
    assert re.match(said.format("restarting all workers", "restart 1 of 1; "), result[1]), "the failure is logged once"
    assert re.search(r" INFO job: \[job\] recovered in .* s: \S+ rank 0 exit code 7; .*, restart 1 of 1$", result[2])


def test_restarts_are_logged_in_pytorch_s_wording(start: Start, tmp_path: Path) -> None:
    # People search logs for this wording.
    done = tmp_path / "done"
    options = {"nnodes": "1:2", "restarts": 1, "script": FAMILY}
    first = start(2, "--exit=0:7", "--until", done, **options)
    first.line(r"restarting all workers: restart 1 of 1; 1/1 attempts left; will restart worker group")
    first.line(r"round 2 is complete")
    second = start(3, "--until", done, **options)
    first.line(r"Detected 1 new nodes; will restart worker group")
    place(second, 2)
    done.touch()
    assert [node.wait() for node in (first, second)] == [0, 0]


def test_a_node_with_no_restarts_left_logs_it(start: Start) -> None:
    options = {"nnodes": "1", "restarts": 1, "script": FAMILY, "env": {"ELASTIC_RS_LOG": ""}}
    node = start(2, "--raise=0", **options)
    assert node.wait() == 1
    result = [line for line in node.lines if re.search("WARNING agent: .* rank 0 .* exit code 1", line)]
    assert len(result) == 2, "one line for each of the two failures"
    node.line(r"WARNING agent: .* the job has failed: no restarts left: all 1 restarts are used up \(max_restarts\)$")


def test_a_node_that_waits_for_another_logs_it_within_seconds(start: Start) -> None:
    node = start(2, nnodes="2", env={"ELASTIC_RS_LOG": ""})
    line = node.line(r"WARNING .*\[job\] waiting for \d+s of up to .*").group()
    assert re.search(r"waiting for [3-9]s of up to 600s \(join_timeout\): round 1: 1 of 2 nodes have joined ", line)
    assert re.search(r"joined \(127\.0\.0\.2 .*\); 1 more needed", line)
    node.signal(signal.SIGINT)
    assert node.wait() == 130


def test_an_interrupted_host_does_not_wait_for_sessions(start: Start) -> None:
    # `drain_timeout` must not apply: another node's session may stay open.
    host = start(2, nnodes="2", conf="drain_timeout=600")
    host.line(JOINED.format(2))
    guest = start(3, nnodes="3", run_id="other")
    host.line(r"\[other\] .*127\.0\.0\.3 .* joined")
    guest.signal(signal.SIGSTOP)
    try:
        host.signal(signal.SIGINT)
        assert host.wait() == 130
    finally:
        guest.signal(signal.SIGCONT)
    guest.signal(signal.SIGINT)
    assert guest.wait() in {1, 130}  # its signal and the coordinator's end may come in either order


def test_a_limit_of_the_exit_barrier_names_the_unfinished_nodes(start: Start, tmp_path: Path) -> None:
    # Without the key there is no limit: see `crates/sim/tests/simulation/agent.rs`.
    conf = "keep_alive_interval=0.1,keep_alive_max_attempt=900,exit_barrier_timeout=3"
    done = {number: tmp_path / f"done{number}" for number in (2, 3)}
    nodes = {n: start(n, "--until", done[n], nnodes="2", script=FAMILY, conf=conf) for n in (2, 3)}
    for node in nodes.values():
        place(node, 2)
    host = next(number for number, node in nodes.items() if any("hosts the coord" in line for line in node.lines))
    guest = 5 - host
    done[guest].touch()
    said = nodes[guest].line(r"WARNING agent: .* have not finished within 3s \(exit_barrier_timeout\): .*").group()
    assert re.search(rf"1 of 2 nodes has finished; still at work \(127\.0\.0\.{host} .*this node's have, and", said)
    assert nodes[guest].wait() == 0
    assert nodes[host].running
    done[host].touch()
    assert nodes[host].wait() == 0
