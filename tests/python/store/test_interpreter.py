"""The extension module and the interpreter: exits, forks, imports, signals, and the interpreter's lock."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import elastic_rs
import pytest
import torch.distributed as dist
from elastic_rs import _elastic_rs
from helpers.stores import HOST

EXITS = 20
EXITS_WITH_TORCH = 2  # each imports torch; `make test-long` runs EXITS of them


def python(code: str, *args: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


# Without torch, so that many runs are quick. The waiting thread is a daemon, and in the middle of a call at exit.
CORE_OPEN_AT_EXIT = """
import logging, sys, threading
level = getattr(logging, sys.argv[1])
logging.basicConfig(level=level, format="LOG %(name)s %(message)s")
from elastic_rs import _elastic_rs
_elastic_rs.reset_log_levels()
server = _elastic_rs.StoreServer.listen(None, 0)
clients = [_elastic_rs.StoreClient("127.0.0.1", server.port) for _ in range(3)]
clients[0].set("k", "v")
threading.Thread(target=clients[1].wait, args=(["never"],), daemon=True).start()
while server.waiting == 0:
    pass
"""
STORES_OPEN_AT_EXIT = """
import logging, sys
logging.basicConfig(level=getattr(logging, sys.argv[1]), format="LOG %(name)s %(message)s")
import torch.distributed as dist
import elastic_rs
from elastic_rs import _elastic_rs
_elastic_rs.reset_log_levels()
owner = elastic_rs.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
tenant = elastic_rs.TCPStore("127.0.0.1", owner.port, is_master=True, multi_tenant=True)
clients = [elastic_rs.TCPStore("127.0.0.1", owner.port), dist.TCPStore("127.0.0.1", owner.port), owner.clone()]
core = _elastic_rs.StoreClient("127.0.0.1", owner.port)
clients[0].set("k", "v")
"""


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
@pytest.mark.parametrize(
    ("code", "times"),
    [
        pytest.param(CORE_OPEN_AT_EXIT, EXITS, id="core"),
        pytest.param(STORES_OPEN_AT_EXIT, EXITS_WITH_TORCH, id="stores"),
        pytest.param(STORES_OPEN_AT_EXIT, EXITS, id="stores, often", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(400)
def test_an_exit_with_everything_open_is_clean(code: str, times: int, level: str) -> None:
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda _: python(code, level), range(times)))
    for run in runs:
        assert run.returncode == 0, run.stderr
        assert run.stdout == ""
        foreign = [line for line in run.stderr.splitlines() if not line.startswith("LOG ")]
        assert foreign == []
        assert ("LOG elastic_rs.store.server" in run.stderr) == (level == "DEBUG")


def test_importing_the_package_and_its_entry_point_does_not_import_torch() -> None:
    code = """
import sys
from importlib.metadata import entry_points
import elastic_rs
from elastic_rs import _elastic_rs
for entry in entry_points(group="torchrun.handlers"):
    if entry.name == "rust-c10d":
        print(entry.load())
assert dir(elastic_rs)
print("torch" in sys.modules)
"""
    run = python(code)
    assert run.stderr == ""
    assert "rust_c10d" in run.stdout
    assert run.stdout.splitlines()[-1] == "False"


# The child ends by `os._exit`, because only the call is tested.
FORKED = """
import os, sys
from elastic_rs import _elastic_rs
server = _elastic_rs.StoreServer.listen(None, 0)
client = _elastic_rs.StoreClient("127.0.0.1", server.port)
client.set("k", "v")
parent = os.getpid()
child = os.fork()
if child == 0:
    try:
        {call}
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent", parent, client.get("k"), server.stopped)
"""
SESSION = """_elastic_rs.Session([("127.0.0.1", server.port)], _elastic_rs.NodeOptions(
            run_id="r", name="n", local_addr=None, nodes=(1, 1), config=_elastic_rs.RendezvousConfig(),
            max_restarts=None, ranks_as_asked=False, use_agent_store=True))"""
CALLS = {
    "an operation": 'client.get("k")',
    "a wait": 'client.wait(["k"])',
    "a clone": "client.clone()",
    "a new client": '_elastic_rs.StoreClient("127.0.0.1", server.port)',
    "a new session": SESSION,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_forked_child_raises_at_once(call: str) -> None:
    run = python(FORKED.format(call=CALLS[call]))
    assert run.returncode == 0, run.stdout + run.stderr
    said, parent = run.stdout.splitlines()
    pid = parent.split()[1]
    assert said.startswith(f"elastic_rs was used in process {pid} before it forked this one (")
    assert parent == f"parent {pid} b'v' False"


def test_a_forked_child_that_ends_leaves_the_parents_store_alone() -> None:
    code = """
import os
import warnings
import elastic_rs
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.12 and later
store = elastic_rs.TCPStore("127.0.0.1", 0, is_master=True)
store.set("k", "v")
child = os.fork()
if child == 0:
    del store
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(store.get("k"))
"""
    run = python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "b'v'\n", "")


@pytest.fixture
def debug_logging(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "elastic_rs"):
        _elastic_rs.reset_log_levels()
        yield caplog
    _elastic_rs.reset_log_levels()


def test_a_client_that_keeps_the_interpreter_while_it_waits_is_answered(
    debug_logging: pytest.LogCaptureFixture,
) -> None:
    # PyTorch's client holds the interpreter's lock during these two calls. A server that needed the lock, for example
    # for log records, would wait for ever, and so would the calls.
    store = elastic_rs.TCPStore(HOST, 0, is_master=True, timeout=timedelta(seconds=60))
    stock = dist.TCPStore(HOST, store.port)
    stock.set("k", "v")
    for _ in range(50):
        accepted = dist.TCPStore(HOST, store.port)
        assert accepted.list_keys() == ["k"]
        assert accepted.queue_len("q") == 0
        del accepted  # its end is logged while the next call holds the lock
        assert stock.list_keys() == ["k"]
    assert "connection accepted" in debug_logging.text


# A client waits in the main thread. `server` is in the same process, so that the test knows when the wait has begun.
WAITING = """
import os, signal, sys, threading
from elastic_rs import _elastic_rs
server = _elastic_rs.StoreServer.listen(None, 0)
client, other = (_elastic_rs.StoreClient("127.0.0.1", server.port) for _ in range(2))
def once_it_waits(do):
    def run():
        while server.waiting == 0:
            pass
        do()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
"""


@pytest.mark.parametrize("to", ["the process", "another thread"])
def test_a_signal_ends_a_wait(to: str) -> None:
    # A signal that another thread takes does not interrupt the wait: Python's handlers run only in the main thread.
    code = """
me = lambda: threading.get_ident()
send = {
    "the process": lambda: os.kill(os.getpid(), signal.SIGINT),
    "another thread": lambda: (signal.pthread_kill(me(), signal.SIGINT), threading.Event().wait()),
}[sys.argv[1]]
once_it_waits(send)
try:
    client.wait(["never"])
except KeyboardInterrupt:
    print("ended", client.num_keys())
"""
    run = python(WAITING + code, to)
    assert (run.stdout, run.stderr) == ("ended 0\n", "")


def test_a_signal_handler_may_wait_too() -> None:
    code = """
def handler(number, frame):
    other.set("from the handler", "v")
    once_it_waits(lambda: other.set("k", "v"))
    client.clone().wait(["from the handler"])
signal.signal(signal.SIGUSR1, handler)
once_it_waits(lambda: os.kill(os.getpid(), signal.SIGUSR1))
client.wait(["k"])
print("released")
"""
    run = python(WAITING + code)
    assert (run.stdout, run.stderr) == ("released\n", "")


def test_threads_of_ours_take_no_signals() -> None:
    code = """
import logging
from pathlib import Path
logging.getLogger("elastic_rs").setLevel(logging.DEBUG)
_elastic_rs.reset_log_levels()
second = _elastic_rs.StoreServer.listen(None, 0)
# The server logs the connection. The first record starts the thread that passes records to Python.
_elastic_rs.StoreClient("127.0.0.1", second.port).set("k", "v")
once_it_waits(lambda: other.set("k", "v"))
client.wait(["k"])  # the runtime's threads have started
for task in Path("/proc/self/task").iterdir():
    try:
        text = (task / "status").read_text()
    except OSError:
        continue  # the thread has ended meanwhile
    status = dict(line.split(":\\t", 1) for line in text.splitlines() if ":\\t" in line)
    takes = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1)
             if not int(status["SigBlk"], 16) >> number - 1 & 1]
    print("main" if task.name == str(os.getpid()) else status["Name"].rstrip("0123456789"), len(takes))
"""
    run = python(WAITING + code)
    assert run.stderr == ""
    assert {"elastic_rs 0", "elastic_rs-log 0", "store- 0", "main 4"} <= {*run.stdout.splitlines()}


def test_an_exit_does_not_wait_for_threads_that_wait() -> None:
    code = """
import time
for _ in range(3):
    waiter = _elastic_rs.StoreClient("127.0.0.1", server.port)
    threading.Thread(target=waiter.wait, args=(["never"],), daemon=True).start()
while server.waiting < 3:
    pass
began = time.monotonic()
_elastic_rs._shutdown()
print(time.monotonic() - began)
"""
    # Waiting threads are woken, and waited for at most a second. The fastest of three runs excludes the machine's load.
    assert min(float(python(WAITING + code).stdout) for _ in range(3)) < 0.9
