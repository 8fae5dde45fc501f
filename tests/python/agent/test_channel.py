"""A worker's end of the channel to its agent, from Python."""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
from elastic_rs import _elastic_rs
from helpers.channel import LIMIT_S, Agent, Worker
from helpers.procs import Job, Process

T = TypeVar("T")
EXITS = 10


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


@pytest.fixture
def connected(agent: Agent) -> tuple[Worker, _elastic_rs.WorkerChannel]:
    channel = _elastic_rs.WorkerChannel.connect(agent.address, LIMIT_S)
    return agent.accept(), channel


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """Give a function that calls another one in a thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def test_a_worker_changes_its_world(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
    beside: Callable[[Callable[[], _elastic_rs.World]], Future[_elastic_rs.World]],
) -> None:
    worker, channel = connected
    worker.world(1, {"RANK": "0", "WORLD_SIZE": "1"})
    assert channel.world().generation == 1
    assert [channel.check() for _ in range(3)] == [0, 0, 0]
    worker.change(1, 2, "node b joins")
    assert worker.hear() == ("ack", 1, 3)
    assert channel.wait_change() == (1, 2)
    worker.raise_at(1, 5)
    assert [channel.check() for _ in range(3)] == [0, 1, 1]
    assert (channel.reason, channel.flags) == ("node b joins", 2)
    called = beside(lambda: channel.park(4))
    assert worker.hear() == ("parked", 4)
    worker.world(2, {"RANK": "1", "WORLD_SIZE": "2", "EMPTY": ""}, "node b has joined")
    world = called.result(LIMIT_S)
    assert world.variables == {"RANK": "1", "WORLD_SIZE": "2", "EMPTY": ""}
    assert (world.generation, world.source, world.sync) == (2, 1, True)
    assert (world.reason, channel.reason) == ("node b has joined", "node b has joined")
    assert channel.check() == 0


def test_a_failure_is_found_and_waited_for(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
    beside: Callable[[Callable[[], bool]], Future[bool]],
) -> None:
    worker, channel = connected
    assert not channel.failed_within(0.0)
    assert not channel.failed_within(0.02)
    found = beside(lambda: channel.failed_within(LIMIT_S))
    assert channel.failed_rank is None
    worker.fail("worker 1 was killed", rank=300)
    assert found.result(LIMIT_S)
    assert channel.failed_within(0.0)
    assert [channel.check(), channel.check()] == [2, 2]
    assert (channel.reason, channel.flags, channel.failed_rank) == ("worker 1 was killed", 0, 300)


def test_a_check_waits_until_it_is_known_where_the_world_changes(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
    beside: Callable[[Callable[[], int]], Future[int]],
) -> None:
    worker, channel = connected
    worker.change(1, 1, "a node leaves")
    assert worker.hear() == ("ack", 1, 0)
    check = beside(channel.check)
    worker.raise_at(1, 1)
    assert check.result(LIMIT_S) == 1


def test_every_wait_ends_with_the_connection(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
    beside: Callable[[Callable[[], object]], Future[object]],
) -> None:
    worker, channel = connected
    waits: list[Callable[[], object]] = [channel.world, channel.wait_change, lambda: channel.failed_within(LIMIT_S)]
    ends = [beside(wait) for wait in waits]
    worker.close()
    for end in ends:
        with pytest.raises(ConnectionError, match=r"the connection with the agent at `.*` was closed: the agent has"):
            end.result(LIMIT_S)
    for call in (channel.check, lambda: channel.park(None)):
        with pytest.raises(ConnectionError, match="the agent's log says more"):
            call()


def test_a_refusal_is_the_reason_for_which_every_call_fails(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
) -> None:
    worker, channel = connected
    worker.refuse("process 7 is a stranger")
    worker.close()
    with pytest.raises(ConnectionError, match="the agent refuses this process: process 7 is a stranger"):
        channel.world()


def test_an_agent_that_has_ended_is_named(agent: Agent) -> None:
    agent.close()
    with pytest.raises(
        ConnectionError, match=r"cannot connect to the agent at `@elastic_rs-test-.*` \(ELASTIC_RS_AGENT\)"
    ):
        _elastic_rs.WorkerChannel.connect(agent.address, 1.0)
    with pytest.raises(ValueError, match="limit_s is `-1` seconds"):
        _elastic_rs.WorkerChannel.connect(agent.address, -1.0)


def test_sockets_of_a_mark_that_was_released_are_not_guarded(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
) -> None:
    _, channel = connected
    mark = channel.mark_sockets()
    channel.release_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        assert channel.guard_sockets(mark) == 0


# The rest runs in a process of its own, whose first argument is the agent's address.
CONNECTED = """
import os, signal, socket, sys, threading
from pathlib import Path
from elastic_rs import _elastic_rs
channel = _elastic_rs.WorkerChannel.connect(sys.argv[1], 60.0)
"""


def start(job: Job, agent: Agent, code: str) -> tuple[Process, Worker]:
    process = job.start([sys.executable, "-c", CONNECTED + code, agent.address])
    return process, agent.accept()


def test_a_signal_ends_a_park_which_is_said_once(job: Job, agent: Agent) -> None:
    code = """
try:
    channel.park(3)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("world", channel.park(3).generation)
"""
    process, worker = start(job, agent, code)
    assert worker.hear() == ("parked", 3)
    process.signal(signal.SIGINT)
    process.line("interrupted")
    worker.world(8, {})
    process.line("world 8")
    assert process.wait() == 0
    assert worker.hear() is None


def test_a_fork_has_no_channel_and_leaves_its_parents_alone(job: Job, agent: Agent) -> None:
    code = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.12 and later
calls = {
    "check": channel.check, "park": lambda: channel.park(1), "world": channel.world, "wait_change": channel.wait_change,
    "failed_within": lambda: channel.failed_within(60.0), "reason": lambda: channel.reason,
    "mark_sockets": channel.mark_sockets, "guard_loops": channel.guard_loops, "release": channel.release_sockets,
}
# Threads of the parent wait with the channel's locks when it forks.
for wait in (channel.wait_change, lambda: channel.failed_within(600.0)):
    threading.Thread(target=wait, daemon=True).start()
child = os.fork()
if child == 0:
    refused = 0
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert f"opened in process {os.getppid()}, and this one ({os.getpid()}) was forked" in str(error), error
            refused += 1
    print("refused", refused, flush=True)
    del calls, channel
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent", channel.check(), channel.world().generation)
"""
    process, worker = start(job, agent, code)
    process.line("refused 9")
    worker.world(5, {})
    process.line("parent 0 5")
    assert process.wait() == 0, process.tail()


def test_an_exit_while_connected_is_clean(job: Job, agent: Agent) -> None:
    code = """
for wait in (channel.wait_change, lambda: channel.failed_within(600.0)):
    threading.Thread(target=wait, daemon=True).start()
channel.check()
"""
    for _ in range(EXITS):
        process, worker = start(job, agent, code)
        with contextlib.suppress(BrokenPipeError):  # it may have ended already
            worker.fail("worker 1 was killed")
            worker.change(1, 2, "while it exits")
        assert process.wait() == 0
        assert process.lines == []


def test_a_worker_has_one_thread_of_ours(job: Job, agent: Agent) -> None:
    # A runtime would be lost in a fork, and a thread that takes signals could take them from the main thread.
    code = """
channel.guard_sockets(channel.mark_sockets())
print(channel.failed_within(0.01))
channel.park(None)
for task in sorted(Path("/proc/self/task").iterdir()):
    status = dict(line.split(":\\t", 1) for line in (task / "status").read_text().splitlines() if ":\\t" in line)
    takes = not int(status["SigBlk"], 16) >> signal.SIGTERM - 1 & 1
    print("thread", status["Name"], takes)
"""
    process, worker = start(job, agent, code)
    assert worker.hear() == ("parked", None)
    worker.world(1, {})
    assert process.wait() == 0
    threads = [line for line in process.lines if line.startswith("thread")]
    assert sorted(line.split()[2] for line in threads) == ["False", "True"], process.tail()
    assert "thread agent-channel False" in threads


def test_a_change_is_answered_while_python_computes(job: Job, agent: Agent) -> None:
    # One operation of long integers keeps the interpreter's lock until it is done.
    code = """
print("computing", flush=True)
number = 7 ** 4_000_000
print("computed")
"""
    process, worker = start(job, agent, code)
    process.line("computing")
    worker.change(1, 2, "node b joins")
    assert worker.hear() == ("ack", 1, 0)
    assert "computed" not in process.lines
    process.line("computed")
    assert process.wait() == 0


def test_a_receive_that_blocks_is_freed(job: Job, agent: Agent) -> None:
    code = """
listener = socket.create_server(("127.0.0.1", 0))
mark = channel.mark_sockets()
here = socket.create_connection(listener.getsockname())
there, _ = listener.accept()
print("guarded", channel.guard_sockets(mark), flush=True)
print("received", here.recv(1), flush=True)
socket.create_connection(listener.getsockname())
listener.accept()
print(channel.check(), channel.failed_within(0.0), channel.reason)
"""
    process, worker = start(job, agent, code)
    process.line("guarded 2")
    worker.fail("worker 1 was killed")
    process.line("received b''")
    process.line("2 True worker 1 was killed")
    assert process.wait() == 0


GLOO = """

from datetime import timedelta
import torch
import torch.distributed as dist
rank, port = int(sys.argv[2]), int(sys.argv[3])
mark = channel.mark_sockets()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=600))
print("guarded", channel.guard_sockets(mark, port), flush=True)
tensor = torch.ones(4)
dist.all_reduce(tensor)
print("reduced", int(tensor[0]), flush=True)
if rank == 2:
    signal.pause()
try:
    dist.all_reduce(tensor)
except RuntimeError as error:
    print("freed", channel.failed_within(60.0), flush=True)
try:
    store.get("nobody sets it")
except RuntimeError as error:
    print("store", type(error).__name__, flush=True)
dist.destroy_process_group()
print("destroyed", channel.check(), flush=True)
"""


def test_a_collective_of_gloo_is_freed_and_its_group_can_be_destroyed(job: Job, agent: Agent) -> None:
    server = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
    workers = []
    for rank in range(3):
        command = [sys.executable, "-c", CONNECTED + GLOO, agent.address, str(rank), str(server.port)]
        workers.append((job.start(command), agent.accept()))
    for process, _ in workers:
        # A connection to each other worker, and not the one to the store.
        process.line("guarded 2")
        process.line("reduced 3")
    for process, worker in workers[:2]:
        worker.fail("worker 2 hangs")
        process.line("freed True", limit_s=LIMIT_S)
        process.line("store DistNetworkError")
        process.line("destroyed 2")
        assert process.wait() == 0, process.tail()
    assert job.kill_leftovers() != []


def test_two_threads_may_wait_for_the_same(
    connected: tuple[Worker, _elastic_rs.WorkerChannel], beside: Callable[[Callable[[], bool]], Future[bool]]
) -> None:
    worker, channel = connected
    begun = threading.Barrier(3)

    def wait() -> bool:
        begun.wait(LIMIT_S)
        return channel.failed_within(LIMIT_S)

    waits = [beside(wait) for _ in range(2)]
    begun.wait(LIMIT_S)
    worker.fail("worker 1 was killed")
    assert [wait.result(LIMIT_S) for wait in waits] == [True, True]


def test_an_agent_that_speaks_nonsense_is_left(connected: tuple[Worker, _elastic_rs.WorkerChannel]) -> None:
    worker, channel = connected
    worker.socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="is closed: frame of 4294967295 bytes announced, at most 65536"):
        channel.world()
    with pytest.raises(ConnectionError):
        channel.check()
    worker.socket.shutdown(socket.SHUT_WR)


def test_what_a_script_raises_and_a_state_that_it_cannot_take_are_reported(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
) -> None:
    worker, channel = connected
    channel.raised("HorovodInternalError", "loss\nis nan")
    assert worker.hear() == ("raised", "HorovodInternalError", "loss is nan")
    channel.unfit("no group 2")
    assert worker.hear() == ("unfit", "no group 2")


def test_a_worker_knows_the_check_of_a_change_and_its_own_count(
    connected: tuple[Worker, _elastic_rs.WorkerChannel],
    beside: Callable[[Callable[[], int]], Future[int]],
) -> None:
    worker, channel = connected
    worker.world(1, {"RANK": "0"})
    channel.world()
    assert (channel.check(), channel.raises_at()) == (0, (None, 1))
    worker.change(1, 2, "node b joins")
    assert worker.hear() == ("ack", 1, 1)
    check = beside(channel.check)
    worker.raise_at(1, 2)
    assert check.result(LIMIT_S) == 1
    assert channel.raises_at() == (2, 2)
    worker.world(2, {"RANK": "0"})
    while channel.raises_at() != (None, 0):  # the thread reads it
        channel.failed_within(0.01)
