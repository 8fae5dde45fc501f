"""``elastic-run doctor``: each verdict by its rule, and the command beside real servers, strangers and silence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import machinery
from pathlib import Path
from resource import RLIM_INFINITY
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _elastic_rs, run
from elastic_rs._elastic_rs import PROTOCOL_VERSION
from elastic_rs.doctor import _net as net
from elastic_rs.doctor import _node as node
from elastic_rs.doctor._findings import Answer, Finding, Question, asked
from elastic_rs.doctor._peer import Reached, reach
from elastic_rs.run import _flags, _options

if TYPE_CHECKING:
    from helpers.procs import Job

BIN = Path(sys.executable).parent
RUN = str(BIN / "elastic-run")
MIB = 1 << 20
JOB = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job")
GUEST = (*JOB, "--rdzv-conf=is_host=0")

OURS = Reached("coordinator", "10.0.0.1", version=PROTOCOL_VERSION, took_s=0.001)
NEWER = Reached("coordinator", "10.0.0.1", version=PROTOCOL_VERSION + 1)
STORE = Reached("store", "10.0.0.1")
OTHER = Reached("other", "10.0.0.1", "it says `SSH-2.0`")
SILENT = Reached("silent", "10.0.0.1")
REFUSED = Reached("refused", "10.0.0.1")
TAKEN = "port 1 on 10.0.0.1 is already in use by pid 7 (x)"
AT_HOME = ["127.0.1.1"]


def gpus(there: int, seen: int, *, nproc: str = "1", workers: int | None = 1, others: tuple[str, ...] = ()) -> Finding:
    return node.gpus(there, seen, chosen="0,9", nproc=nproc, workers=workers, why_none="no driver", others=list(others))


def own_name(
    answer: Answer[list[str]], *, gloo: str | None = None, others: bool = True, local_addr: str | None = None
) -> Finding:
    return net.own_name("vm", answer, gloo, others=others, local_addr=local_addr)


VERDICTS: list[tuple[Finding, str, str]] = [
    (node.python((3, 11, 0), "/py"), "ok", "3.11.0, /py"),
    (node.python((3, 10, 9), "/py"), "mend", "install Python 3.11"),
    (node.package("0.1.0", "0.1.0"), "ok", "0.1.0"),
    (node.package("0.1.0", None), "ok", "0.1.0"),
    (node.package("0.1.0", "0.2.0"), "mend", "two installations are mixed"),
    (node.torch(None, None, None), "note", "not found"),
    (node.torch("2.6.0", "/t", None), "ok", "2.6.0, /t"),
    (node.torch("2.15.1+cu132", "/t", None), "ok", "2.15.1+cu132"),
    (node.torch("2.5.1", "/t", None), "mend", "pip install 'torch>=2.6'"),
    (node.torch("1.13.0", "/t", None), "mend", "older than 2.6"),
    (node.torch("2.16.0a0+git", "/t", None), "note", "newer than 2.15"),
    (node.torch("3.0", "/t", None), "note", "newer than 2.15"),
    (node.torch(None, "/cwd/torch", None), "mend", "/cwd/torch is not PyTorch"),
    (node.torch("2.0", "/t", "/opt/python"), "note", "PYTHON_EXEC=/opt/python"),
    (gpus(0, 0), "ok", "none: no driver; CUDA_VISIBLE_DEVICES is `0,9`"),
    (gpus(0, 0, nproc="gpu"), "mend", "--nproc-per-node is `gpu`, but there is none: no driver"),
    (gpus(0, 0, nproc="gpu", others=("/dev/kfd",)), "note", "none of NVIDIA's, but /dev/kfd"),
    (gpus(8, 8), "ok", "8 of 8"),
    (gpus(8, 2, workers=2), "ok", "2 of 8 seen by processes, CUDA_VISIBLE_DEVICES is `0,9`"),
    (gpus(8, 2, workers=4), "note", "fewer than the 4 workers"),
    (gpus(8, 0), "note", "0 of 8"),
    (gpus(8, 0, nproc="gpu", workers=None), "mend", "unset CUDA_VISIBLE_DEVICES"),
    (node.descriptors(1024, 4096, 8, 4), "ok", "host of 4 nodes with 8 workers each may need 200"),
    (node.descriptors(RLIM_INFINITY, RLIM_INFINITY, 8, 4000), "ok", "unlimited"),
    (node.descriptors(1024, 1 << 20, 8, 64), "mend", "ulimit -n 1280 before"),
    (node.descriptors(1024, RLIM_INFINITY, 8, 64), "mend", "ulimit -n 1280 before"),
    (node.descriptors(1024, 1024, 8, 64), "mend", "LimitNOFILE=1280"),
    (node.processes(None, "", 8), "ok", "no limit"),
    (node.processes(800, "ulimit -u", 8), "ok", "800"),
    (node.processes(799, "ulimit -u", 8), "mend", "ulimit -u 800"),
    (node.processes(799, "/sys/fs/cgroup/pids.max", 8), "mend", "--pids-limit=800"),
    (node.script("a.py", ""), "ok", "a.py"),
    (node.script("a.py", "the script `a.py` does not exist"), "mend", "copy it to this node"),
    (node.supervision("", ""), "ok", "its end was noticed"),
    (node.supervision("", "Function not implemented"), "ok", "without pidfds (pidfd_open: Function not implemented)"),
    (node.supervision("`signalfd4` has failed: no", ""), "mend", "seccomp"),
    (node.clock(0), "ok", "1970-01-01T00:00:00Z"),
    (node.place("logs", "/l", 256 * MIB, "", least=64 * MIB, enough=256 * MIB), "ok", "/l is writable, 256 MiB"),
    (node.place("logs", "/l", 255 * MIB, "", least=64 * MIB, enough=256 * MIB), "note", "may not be enough"),
    (node.place("logs", "/l", 63 * MIB, "", least=64 * MIB, enough=256 * MIB), "mend", "make room there"),
    (node.place("/dev/shm", "/dev/shm", 0, "", least=1, enough=2), "mend", "--shm-size"),
    (node.place("logs", "/l", 0, "Read-only file system", least=1, enough=2), "mend", "written to: Read-only"),
    (own_name(Answer(["10.0.0.1"], 0.1)), "ok", "`vm` is 10.0.0.1"),
    (own_name(Answer(AT_HOME, 0.1)), "mend", "Debian's line `127.0.1.1`"),
    (own_name(Answer(AT_HOME, 0.1), others=False), "ok", "127.0.1.1"),
    (own_name(Answer(AT_HOME, 0.1), gloo="eth0"), "ok", "127.0.1.1"),
    (own_name(Answer(["127.0.1.1", "10.0.0.1"], 0.1)), "ok", "127.0.1.1, 10.0.0.1"),
    (own_name(Answer(["10.0.0.1"], 1.1)), "note", "slow"),
    (own_name(Answer(["10.0.0.1"], 0.1), local_addr="vm.local"), "note", "all other nodes must resolve"),
    (own_name(Answer(None, 5.0, error="no answer", late=True)), "mend", "cannot be resolved: no answer"),
    (own_name(Answer(None, 0.1, error="unknown"), others=False), "note", "cannot be resolved: unknown"),
    (net.own_reverse("10.0.0.1", Answer("vm", 0.5)), "ok", "10.0.0.1 is vm"),
    (net.own_reverse("10.0.0.1", Answer(None, 0.5, error="unknown")), "ok", "without a name (unknown)"),
    (net.own_reverse("10.0.0.1", Answer("vm", 1.5)), "note", "vm after 1.500 s, which is slow: PyTorch's store"),
    (net.own_reverse("10.0.0.1", Answer(None, 5.0, error="no answer within 5 s", late=True)), "note", "no answer"),
    (net.unresolved("h:1", Answer(None, 0.1, error="unknown"), hosts=False), "mend", "/etc/resolv.conf"),
    (net.unresolved("h:1", Answer(None, 0.1, error="unknown"), hosts=True), "note", "this node's own name"),
    (net.here("h:1", REFUSED, "", must=False), "ok", "would host the coordinator"),
    (net.here("h:1", REFUSED, "port 1 cannot be listened on", must=True), "mend", "above 1023"),
    (net.here("h:1", Reached("unreachable", "h", "No network"), "", must=False), "mend", "reached from it: No network"),
    (net.here("h:1", Reached("timeout", "h"), "", must=False), "mend", "reached from it: nothing came back"),
    (net.here("h:1", OURS, TAKEN, must=False), "ok", f"{TAKEN}. It is a coordinator"),
    (net.here("h:1", OURS, TAKEN, must=True), "mend", "told to be the host itself"),
    (net.here("h:1", NEWER, TAKEN, must=False), "mend", "install one version"),
    (net.here("h:1", STORE, TAKEN, must=False), "mend", f"{TAKEN}. a plain c10d store"),
    (net.elsewhere("h:1", OURS, 600, 5), "ok", "a coordinator answers, in 1.0 ms"),
    (net.elsewhere("h:1", NEWER, 600, 5), "mend", "version 3 of the protocol, this node version 2"),
    (net.elsewhere("h:1", STORE, 600, 5), "mend", "a plain c10d store answers"),
    (net.elsewhere("h:1", OTHER, 600, 5), "mend", "it says `SSH-2.0`"),
    (net.elsewhere("h:1", SILENT, 600, 5), "mend", "does not answer"),
    (net.elsewhere("h:1", REFUSED, 600, 5), "note", "nobody listens there yet"),
    (net.elsewhere("h:1", Reached("timeout", "h"), 600, 5), "mend", "nothing came back within 5 s"),
    (net.elsewhere("h:1", Reached("unreachable", "h", "No route to host"), 600, 5), "mend", "No route to host"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("finding", "verdict", "text"), VERDICTS, ids=[f"{found.check} {text}" for found, _, text in VERDICTS]
)
def test_verdicts(finding: Finding, verdict: str, text: str) -> None:
    assert finding.verdict == verdict, finding
    assert text in str(finding)
    assert bool(finding.remedy) == (verdict == "mend"), "who is told of a fault is told what to do"
    assert str(finding).startswith(f"{verdict:<5} {finding.check}")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "0: the only node"),
        (("--nnodes=4", "--node-rank=2"), "2, by --node-rank, in every round; others see this node as `vm:PID` at"),
        ((*JOB, "--rdzv-endpoint=h"), "in the first round by natural order of addresses (node9 before node10)"),
        ((*JOB, "--rdzv-endpoint=h", "--rdzv-conf=node_rank=3"), "asks for 3 (node_rank) in the first round"),
    ],
)  # fmt: skip
def test_rank_order(flags: tuple[str, ...], text: str) -> None:
    args = _flags.parse([*flags, "x"])
    alone = _options.is_alone(args, _options.nodes_of(args.nnodes))
    finding = net.ranks(_options.rendezvous_of(args), "vm", "10.0.0.1", alone=alone)
    assert finding.verdict == "ok"
    assert text in finding.text


@pytest.mark.parametrize(
    ("to_endpoint", "host", "seen"),
    [
        ("10.0.0.2", "node0", "10.0.0.2"),
        ("127.0.0.1", "node0", "10.0.0.1"),
        ("127.0.0.1", "localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("", "node0", ""),
    ],
)
def test_what_others_see_of_a_node(to_endpoint: str, host: str, seen: str) -> None:
    assert net.seen_by_others(to_endpoint, "10.0.0.1", host) == seen


def test_a_question_has_an_end_and_its_answer_a_cause() -> None:
    release = threading.Event()
    began = time.monotonic()
    late = asked(release.wait, 0.05)
    assert (late.value, late.late, late.error) == (None, True, "no answer within 0.05 s")
    assert time.monotonic() - began < 30
    release.set()
    assert asked(lambda: "x", 30).value == "x"

    def fails() -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    found = Question(fails).answer(30)
    assert (found.value, found.late, found.error) == (None, False, "Name or service not known")


def test_a_question_that_no_thread_can_ask_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    found = asked(lambda: "x", 30)
    assert (found.value, found.late, found.error) == (None, False, "can't start new thread")


def test_what_strangers_say_moves_no_cursor() -> None:
    text = str(Finding("mend", "endpoint", "it says `\x1b[31m\x07\0`, ä", "not \udcff\r"))
    line, remedy = text.split("\n")
    assert line.endswith(r"it says `\x1b[31m\x07\x00`, ä")
    assert remedy.endswith(r"not \xff\r")


def test_torch_is_found_without_being_imported(tmp_path: Path) -> None:
    import torch

    version, where = node.find_torch()
    assert (version, where) == (torch.__version__, str(Path(torch.__file__).parent))
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise SystemExit('imported')")
    (fake / "version.py").write_text('__version__ = "2.5.1"\n')
    code = "from elastic_rs.doctor._node import find_torch; print(*find_torch())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert told.stdout == f"2.5.1 {fake}\n", "what stands in the way of the real one is what workers would import"


@pytest.mark.parametrize("files", [{"torch.py": ""}, {"torch/__init__.py": "", "torch/version.py": "\xff"}])
def test_what_stands_in_the_way_of_torch_has_not_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    spec = machinery.PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr(node.util, "find_spec", lambda _: spec)
    version, where = node.find_torch()
    assert version is None
    assert where is not None
    assert where.startswith(str(tmp_path))


def test_a_folder_that_happens_to_have_its_name_is_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(node.util, "find_spec", lambda _: spec)
    assert node.find_torch() == (None, str(tmp_path))
    monkeypatch.setattr(node.util, "find_spec", lambda _: None)
    assert node.find_torch() == (None, None)


@pytest.mark.parametrize(
    ("folder", "verdict", "text"),
    [
        ("not/made/yet", "ok", "is writable"),
        ("file", "mend", "Not a directory"),
        ("file/in/it", "mend", "Not a directory"),
        ("x" * 300, "mend", "File name too long"),
    ],
)
def test_a_folder_of_logs_need_not_be_there(tmp_path: Path, folder: str, verdict: str, text: str) -> None:
    (tmp_path / "file").touch()
    finding = node._place("logs", str(tmp_path / folder), 30, least=0, enough=0)
    assert finding.verdict == verdict
    assert text in finding.text
    assert [it.name for it in tmp_path.iterdir()] == ["file"], "nothing is made"


def test_a_file_system_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(_: str) -> tuple[int, str]:
        release.wait()
        return 0, ""

    monkeypatch.setattr(node, "room", hang)
    finding = node._place("logs", "/far/away", 0.05, least=1, enough=1)
    release.set()
    assert (finding.verdict, finding.text) == ("mend", "/far/away cannot be written to: no answer within 0.05 s")


def test_room_is_room_that_can_be_used(tmp_path: Path) -> None:
    free, why_not = node.room(str(tmp_path))
    assert free > 0
    assert not why_not
    assert not list(tmp_path.iterdir()), "nothing is left"
    assert node.room(str(tmp_path / "none")) == (0, "No such file or directory")


@contextlib.contextmanager
def answering(said: bytes | None) -> Iterator[int]:
    """Serve connections: say this, or nothing; None closes at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            held = []
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if said:
                        connection.sendall(said)
                    if said is None:
                        connection.close()
                    held.append(connection)
            for connection in held:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """Answer no connection: the queue of those that wait is full, so the kernel drops whoever comes."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_who_answers_is_told_apart(free_port: Callable[[], int]) -> None:
    from torch.distributed import TCPStore

    host = _elastic_rs.Host.listen("127.0.0.1", 0)
    found = reach(["127.0.0.1"], host.port, 30)
    assert (found.who, found.version) == ("coordinator", PROTOCOL_VERSION), found
    assert host.users[0] == 0, "no session began"
    host.stop()
    for libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
        assert reach(["127.0.0.1"], store.port, 30).who == "store"
        store.set("k", "v")
        assert store.get("k") == b"v", "the store is as it was"
    ours = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
    assert reach(["127.0.0.1"], ours.port, 30).who == "store"
    ours.stop()
    with answering(b"SSH-2.0-OpenSSH_9\r\nx") as port:
        assert reach(["127.0.0.1"], port, 30) == Reached("other", "127.0.0.1", "it says `SSH-2.0-OpenSSH_9`")
    with answering(None) as port:
        assert reach(["127.0.0.1"], port, 30) == Reached("other", "127.0.0.1", "it closes the connection")
    with answering(b"") as port:
        assert reach(["127.0.0.1"], port, 0.2).who == "silent"
    assert reach(["127.0.0.1"], free_port(), 30).who == "refused"
    with swallowing() as port:
        assert reach(["127.0.0.1"], port, 0.2).who == "timeout"


def test_an_address_that_swallows_hides_no_other() -> None:
    with swallowing() as port:
        host = _elastic_rs.Host.listen("127.0.0.2", port)
        found = reach(["127.0.0.1", "127.0.0.2"], port, 30)
        assert (found.who, found.address) == ("coordinator", "127.0.0.2")
        host.stop()


Doctor = Callable[..., list[str]]


@pytest.fixture
def doctor(job: Job) -> Doctor:
    """Run the command, and return its lines. Its exit code says whether something has to be mended."""

    def doctor(*flags: str, env: dict[str, str] | None = None) -> list[str]:
        process = job.start([RUN, "doctor", *flags], env=env)
        code = process.wait()
        to_mend = sum(line.startswith("mend ") for line in process.lines)
        # What else this machine lacks is not these tests' business.
        assert process.lines[-1] == (f"{to_mend} to mend" if to_mend else "nothing has to be mended")
        assert code == (1 if to_mend else 0)
        return process.lines

    return doctor


def about(check: str, lines: list[str]) -> str:
    return next(line for line in lines if re.match(rf"(ok|note|mend) +{check} ", line))


def test_a_node_by_itself(doctor: Doctor) -> None:
    lines = doctor()
    node_checks = ["python", "elastic_rs", "torch", "gpus", "descriptors", "processes", "supervision", "clock"]
    for check in [*node_checks, "/dev/shm", "temporary", "own name"]:
        assert about(check, lines)
    assert "none is needed" in about("endpoint", lines)
    assert about("rank order", lines) == "ok    rank order   0: the only node"


def test_a_coordinator(doctor: Doctor, job: Job) -> None:
    serve = job.start([str(BIN / "elastic-rs"), "store", "serve", "--host=127.0.0.1", "--port=0"])
    port = int(serve.line(r"^listening on 127\.0\.0\.1:(\d+)$")[1])
    said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("ok ")
    assert f"in use by pid {serve.pid} (" in said
    said = about("endpoint", doctor(*GUEST, env={"PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}))
    assert said.startswith("ok ")
    assert "a coordinator answers" in said
    # Node 0 hosts the coordinator itself.
    said = about("endpoint", doctor("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"))
    assert said.startswith("mend ")
    assert "told to be the host itself" in said
    serve.signal(signal.SIGTERM)
    assert serve.wait() == 0


def test_a_free_port(doctor: Doctor, port: int) -> None:
    said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("ok ")
    assert "the port is free: this node would host the coordinator" in said
    with socket.create_server(("127.0.0.1", port)):
        pass  # it is free still
    said = about("endpoint", doctor(*GUEST, f"--rdzv-endpoint=127.0.0.1:{port}"))
    assert said.startswith("note ")
    assert "nobody listens there yet" in said


def test_any_free_port_is_none_that_others_can_know(doctor: Doctor) -> None:
    said = about("endpoint", doctor(*JOB, "--rdzv-endpoint=[::1]:0"))
    assert said == "mend  endpoint     [::1]:0: this node would take any free port, which no other node can know"
    assert about("endpoint", doctor(*JOB, "--nnodes=1", "--rdzv-endpoint=127.0.0.1:0")).startswith("ok ")


def test_a_port_that_is_held_by_one_who_does_not_listen(doctor: Doctor) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        said = about("endpoint", doctor(*JOB, f"--rdzv-endpoint=127.0.0.1:{holder.getsockname()[1]}"))
    assert said.startswith("mend ")
    assert "cannot be listened on: Address already in use" in said


def test_a_stranger(doctor: Doctor) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        for flags in (JOB, GUEST):
            said = about("endpoint", doctor(*flags, f"--rdzv-endpoint=127.0.0.1:{port}"))
            assert said.startswith("mend ")
            assert "it says `HTTP/1.1 400 Bad Request`" in said


def test_a_black_hole(doctor: Doctor) -> None:
    with swallowing() as port:
        lines = doctor(*GUEST, f"--rdzv-endpoint=127.0.0.1:{port}", "--network-timeout=0.3")
    said = about("endpoint", lines)
    assert said.startswith("mend ")
    assert "nothing came back within 0.3 s" in said
    assert "to mend: check that the host is up" in lines[lines.index(said) + 1]


def test_a_name_server_that_swallows_questions_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    def swallow(*_: object, **__: object) -> None:
        release.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", swallow)
    monkeypatch.setattr(socket, "getnameinfo", swallow)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    began = time.monotonic()
    try:
        assert run.main(["doctor", *JOB, "--rdzv-endpoint=node0.test:29400", "--network-timeout=0.2"]) == 1
    finally:
        release.set()
    assert time.monotonic() - began < 30
    said = capsys.readouterr().out.splitlines()
    assert "node0.test:29400 cannot be resolved: no answer within 0.2 s" in about("endpoint", said)
    assert [line.split("  ")[1].strip() for line in said if line.startswith("mend ")] == ["own name", "endpoint"], said
    assert said[-1] == "2 to mend"


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (("--nnodes=2",), "mend"),
        (("--nnodes=2", "--rdzv-backend=c10d"), "mend"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost"), "ok"),
        (("--nnodes=1",), "ok"),
    ],
)
def test_a_name_at_loopback_is_to_be_mended_where_there_are_several_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], verdict: str
) -> None:
    monkeypatch.setattr(net, "addresses_of", lambda _: AT_HOME)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run.main(["doctor", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert about("own name", lines).startswith(verdict)
    if verdict == "mend":
        assert any(line.startswith("note  endpoint") and "names no other address: nodes" in line for line in lines)


def test_a_script_that_does_not_exist_is_to_be_mended(doctor: Doctor, tmp_path: Path) -> None:
    missing, there = tmp_path / "trian.py", tmp_path / "train.py"
    there.touch()
    assert about("script", doctor("--standalone", str(missing))).startswith("mend  script       the script `")
    assert about("script", doctor("--standalone", str(there))) == f"ok    script       {there}"


def test_a_driver_that_is_not_installed_is_said_in_own_words(doctor: Doctor) -> None:
    if _has_driver():
        pytest.skip("this machine has NVIDIA's driver")
    assert "none: no NVIDIA driver is installed here" in about("gpus", doctor())


def _has_driver() -> bool:
    try:
        _elastic_rs.visible_gpus(None)
    except RuntimeError as error:
        return "no NVIDIA driver answers" in str(error) and "shared object" not in str(error)
    return True


def test_a_wrong_command_line_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["--nnodes=x"], "--nnodes is `x`"),
        (["--network-timeout=0"], "--network-timeout is `0`, must be above 0 s and at most 600"),
        (["--network-timout=1"], "did you mean `--network-timeout`?"),
        (["--nproc-per-node=0"], "--nproc-per-node is `0`"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:b"], "--rdzv-endpoint"),
    ):
        with pytest.raises(SystemExit) as ended:
            run.main(["doctor", *argv])
        assert ended.value.code == 2
        found = capsys.readouterr()
        assert text in found.err
        assert not found.out, "nothing is printed before the command line is understood"


def test_its_help_lists_what_it_heeds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["doctor", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--rdzv-endpoint" in text
    assert "--network-timeout" in text
    assert "--max-restarts" not in text


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; {command.replace('doctor', f'{RUN} doctor')}"
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_the_exit_code_is_told_where_nobody_reads_on() -> None:
    # The right code, though all but the first line was for nobody.
    for folder, code in (("/proc/self/environ", 1), ("/tmp", shell("doctor").returncode)):
        told = shell(f"doctor --log-dir={folder} | head -1")
        assert told.stdout.startswith("ok    python")
        assert (told.returncode, told.stderr) == (code, "")


def test_what_cannot_be_written_is_not_called_healthy() -> None:
    told = shell("doctor > /dev/full")
    assert told.returncode == 1
    assert told.stderr == "elastic-run: error: cannot write the findings: No space left on device\n"


def test_any_terminal_shows_the_findings() -> None:
    told = shell(r"doctor --log-dir=$'/tmp/\xff\xc3\xa4'", PYTHONIOENCODING="ascii")
    assert not told.stderr
    assert r"/tmp/\xff\xe4 is writable" in about("logs", told.stdout.splitlines())


def test_an_interrupt_ends_it_at_once(job: Job) -> None:
    with answering(b"") as port:
        process = job.start([RUN, "doctor", *GUEST, f"--rdzv-endpoint=127.0.0.1:{port}", "--network-timeout=600"])
        process.line("^ok +temporary|^mend +temporary|^note +temporary")
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    assert "Traceback" not in process.tail()


def test_a_whole_command_line_may_follow(doctor: Doctor) -> None:
    assert doctor("--standalone", "--max-restarts=3", "--warm-start=torch", "train.py", "--lr", "0.1", "--nnodes=x")


@pytest.mark.parametrize("argv", [["./doctor"], ["--", "doctor"], ["--no-python", "./doctor"]])
def test_a_script_of_that_name_can_be_run(job: Job, tmp_path: Path, argv: list[str]) -> None:
    script = tmp_path / "doctor"
    script.write_text(f"#!{sys.executable}\nprint('the script')\n")
    script.chmod(0o755)
    command = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), RUN, *argv]
    process = job.start(command)
    assert process.wait() == 0
    assert "the script" in process.lines


def test_torch_is_not_imported() -> None:
    code = "import sys; from elastic_rs import run; run.main(['doctor']); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "False"
