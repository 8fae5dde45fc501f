"""``elastic-run doctor``: the rules of the verdicts, and recognition of servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import machinery
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

import pytest
from elastic_rs import _elastic_rs
from elastic_rs._doctor import _net as net
from elastic_rs._doctor import _node as node
from elastic_rs._doctor._findings import Answer, Finding, Question, asked
from elastic_rs._doctor._peer import Reached, reach
from elastic_rs._elastic_rs import PROTOCOL_VERSION
from elastic_rs.run import _flags, _options
from helpers.findings import assert_finding
from helpers.foreign_servers import answering, swallowing

MIB = 1 << 20
JOB = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job")

OURS = Reached("coordinator", "10.0.0.1", version=PROTOCOL_VERSION, elapsed_s=0.001)
OTHER_VERSION = f"version {PROTOCOL_VERSION + 1} of the protocol, this node version {PROTOCOL_VERSION}"
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


OPEN = "none: anyone who can reach the endpoint can end the job or replace a node"
OTHERS = "worker stores serve no other user of their machine"
SERVED = "connections from machines without members are served and logged (store_members=warn)"
SHOWN = "a coordinator on this node shows"


class Secured:
    """A token, or a certificate with so many days left."""

    def __init__(self, text: str, days_left: float | None = None, *warnings: str) -> None:
        self.text, self.days_left, self.warnings = text, days_left, warnings
        self.key_ids = "1" if days_left is None else None


TOKEN, CERTIFICATE = Secured("the token with the id 1"), Secured("the certificate of x", 3.4)


def protected(how: str, own: Secured | None = None, **exposure: Any) -> Finding:
    return net.how_protected("job", how, own, net.Exposure(**exposure))  # type: ignore[arg-type]


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
    (node.descriptors(1024, 4096, 8, 4, tunnel=True), "ok", "host of 4 nodes with 8 workers each may need 328"),
    (node.descriptors(1024, 4096, 8, 4, protected=True), "ok", "host of 4 nodes with 8 workers each may need 200"),
    (node.descriptors(1024, 2559, 8, 4, protected=True), "ok", "may need 267, with pending handshakes"),
    (node.descriptors(1024, RLIM_INFINITY, 8, 49, protected=True), "ok", "may need 1010"),
    (node.descriptors(1024, 1024, 8, 49, protected=True), "mend", "LimitNOFILE=1347"),
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
    (node.stacks(None), "ok", "can read the Python stacks"),
    (node.stacks("kernel.yama.ptrace_scope is 3"), "note", "ptrace_scope is 3"),
    (node.users("", "", ""), "ok", "names the user of each connection"),
    (node.users("", "it shows none", "do this"), "mend", "cannot refuse other users of this machine: it shows none"),
    (node.users("Too many open files", "", ""), "mend", "ulimit -n"),
    (node.clock(0), "ok", "1970-01-01T00:00:00Z"),
    (node.free_space("logs", "/l", 256 * MIB, "", least=64 * MIB, enough=256 * MIB), "ok", "/l is writable, 256 MiB"),
    (node.free_space("logs", "/l", 255 * MIB, "", least=64 * MIB, enough=256 * MIB), "note", "may not be enough"),
    (node.free_space("logs", "/l", 63 * MIB, "", least=64 * MIB, enough=256 * MIB), "mend", "make room there"),
    (node.free_space("/dev/shm", "/dev/shm", 0, "", least=1, enough=2), "mend", "--shm-size"),
    (node.free_space("logs", "/l", 0, "Read-only file system", least=1, enough=2), "mend", "written to: Read-only"),
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
    (protected("alone", several=False), "ok", f"a token that this process makes; {OTHERS}"),
    (protected("alone", several=False, peers="any"), "note", "serve every user of their machine (store_peers=any)"),
    (protected("alone", several=False, store="torch"), "note", "makes; the workers' store is PyTorch's"),
    (protected("alone", several=False, http="all"), "ok", "a token that this process makes"),
    (protected("alone", several=False, http="metrics"), "note", f"{SHOWN} metrics to whoever reaches it"),
    (protected("etcd"), "note", f"etcd's users and TLS decide who reads and writes the job; {OTHERS}; connections"),
    (protected("etcd", http="all"), "note", "connections from every machine are served"),
    (protected("coordinator"), "note", f"{OPEN}; {OTHERS}; {SERVED}. `elastic-rs"),
    (protected("coordinator", http="all"), "note", f"{SERVED}; {SHOWN} metrics and the job's page to whoever"),
    (protected("coordinator", http="metrics"), "note", "reaches it (ELASTIC_RS_HTTP=metrics)"),
    (protected("coordinator", members="strict"), "note", "without members are closed (store_members=strict)"),
    (protected("coordinator", members="off"), "note", "without members are served (store_members=off)"),
    (protected("coordinator", store="endpoint"), "note", f"{OPEN}; workers use the endpoint's"),
    (protected("coordinator", store="torch"), "note", f"{OPEN}; the workers' store is PyTorch's"),
    (protected("coordinator", store="endpoint", members="strict"), "mend", "the agents do not serve"),
    (protected("coordinator", store="torch", members="strict"), "mend", "without TORCH_DISABLE_SHARE"),
    (protected("coordinator", tunnel=True), "mend", "store_tunnel=1 is given without a token"),
    (protected("coordinator", TOKEN), "ok", f"prove the token with the id 1; {OTHERS}; {SERVED}"),
    (protected("coordinator", TOKEN, http="all"), "ok", SERVED),
    (protected("coordinator", TOKEN, http="metrics"), "note", f"{SHOWN} metrics to whoever reaches it"),
    (protected("coordinator", TOKEN, peers="any"), "note", "serve every user of their machine (store_peers=any)"),
    (protected("coordinator", TOKEN, store="torch"), "note", "the workers' store is PyTorch's"),
    (protected("coordinator", TOKEN, tunnel=True), "ok", "id 1; workers reach the store through their agents"),
    (protected("coordinator", TOKEN, tunnel=True, peers="any"), "note", "encrypt that, and serve every user"),
    (protected("coordinator", CERTIFICATE), "ok", "of x (3 days left); any certificate of the CA may join"),
    (protected("coordinator", Secured("the certificate of x", 3.4, "it ends")), "note", f"{SERVED}; it ends"),
    (net.unresolved("h:1", Answer(None, 0.1, error="unknown"), hosts=False), "mend", "/etc/resolv.conf"),
    (net.unresolved("h:1", Answer(None, 0.1, error="unknown"), hosts=True), "note", "this node's own name"),
    (net.here("h:1", REFUSED, "", must=False), "ok", "would host the coordinator"),
    (net.here("h:1", REFUSED, "port 1 cannot be listened on", must=True), "mend", "above 1023"),
    (net.here("h:1", Reached("unreachable", "h", "No network"), "", must=False), "mend", "reached from it: No network"),
    (net.here("h:1", Reached("timeout", "h"), "", must=False), "mend", "reached from it: nothing came back"),
    (net.here("h:1", OURS, TAKEN, must=False), "ok", f"{TAKEN}. It is a coordinator"),
    (net.here("h:1", OURS, TAKEN, must=True), "mend", "this node must host it"),
    (net.here("h:1", NEWER, TAKEN, must=False), "mend", "install one version"),
    (net.here("h:1", STORE, TAKEN, must=False), "mend", f"{TAKEN}. a plain c10d store"),
    (net.elsewhere("h:1", OURS, 600, 5), "ok", "a coordinator answers, in 1.0 ms"),
    (net.elsewhere("h:1", NEWER, 600, 5), "mend", OTHER_VERSION),
    (net.elsewhere("h:1", STORE, 600, 5), "mend", "a plain c10d store answers"),
    (net.elsewhere("h:1", OTHER, 600, 5), "mend", "it says `SSH-2.0`"),
    (net.elsewhere("h:1", SILENT, 600, 5), "mend", "does not answer"),
    (net.elsewhere("h:1", REFUSED, 600, 5), "note", "no process listens there yet"),
    (net.elsewhere("h:1", Reached("timeout", "h"), 600, 5), "mend", "nothing came back within 5 s"),
    (net.elsewhere("h:1", Reached("unreachable", "h", "No route to host"), 600, 5), "mend", "No route to host"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("finding", "verdict", "text"), VERDICTS, ids=[f"{found.check} {text}" for found, _, text in VERDICTS]
)
def test_verdicts(finding: Finding, verdict: str, text: str) -> None:
    assert_finding(finding, verdict, text)


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
def test_the_address_at_which_other_nodes_see_this_one(to_endpoint: str, host: str, seen: str) -> None:
    assert net.seen_by_others(to_endpoint, "10.0.0.1", host) == seen


def test_a_check_ends_within_its_limit_and_names_its_error() -> None:
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


def test_a_check_whose_thread_cannot_start_names_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    found = asked(lambda: "x", 30)
    assert (found.value, found.late, found.error) == (None, False, "can't start new thread")


def test_bytes_of_peers_do_not_control_the_terminal() -> None:
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
    code = "from elastic_rs._doctor._node import find_torch; print(*find_torch())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout == f"2.5.1 {fake}\n", "what stands in the way of the real one is what workers would import"


@pytest.mark.parametrize("files", [{"torch.py": ""}, {"torch/__init__.py": "", "torch/version.py": "\xff"}])
def test_a_file_that_shadows_torch_does_not_have_its_version(
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


def test_a_folder_named_torch_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_log_folder_need_not_exist(tmp_path: Path, folder: str, verdict: str, text: str) -> None:
    (tmp_path / "file").touch()
    finding = node._free_space("logs", str(tmp_path / folder), 30, least=0, enough=0)
    assert finding.verdict == verdict
    assert text in finding.text
    assert [it.name for it in tmp_path.iterdir()] == ["file"], "nothing is made"


def test_a_file_system_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(_: str) -> tuple[int, str]:
        release.wait()
        return 0, ""

    monkeypatch.setattr(node, "room", hang)
    finding = node._free_space("logs", "/far/away", 0.05, least=1, enough=1)
    release.set()
    assert (finding.verdict, finding.text) == ("mend", "/far/away cannot be written to: no answer within 0.05 s")


def test_free_space_is_the_space_that_a_user_can_use(tmp_path: Path) -> None:
    free, why_not = node.room(str(tmp_path))
    assert free > 0
    assert not why_not
    assert not list(tmp_path.iterdir()), "nothing is left"
    assert node.room(str(tmp_path / "none")) == (0, "No such file or directory")


def test_servers_are_distinguished(free_port: Callable[[], int]) -> None:
    from torch.distributed import TCPStore

    host = _elastic_rs.EndpointServer.listen("127.0.0.1", 0)
    found = reach(["127.0.0.1"], host.port, 30)
    assert (found.who, found.version) == ("coordinator", PROTOCOL_VERSION), found
    assert host.users[0] == 0, "no session began"
    host.stop()
    for libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
        assert reach(["127.0.0.1"], store.port, 30).who == "store"
        store.set("k", "v")
        assert store.get("k") == b"v", "the store is unchanged"
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


def test_a_silent_address_does_not_hide_another_one() -> None:
    with swallowing() as port:
        host = _elastic_rs.EndpointServer.listen("127.0.0.2", port)
        found = reach(["127.0.0.1", "127.0.0.2"], port, 30)
        assert (found.who, found.address) == ("coordinator", "127.0.0.2")
        host.stop()
