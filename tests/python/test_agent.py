"""``LocalElasticAgent``, used directly, as PyTorch's launcher and PyTorch's own tests use it."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elastic_rs
import pytest
from elastic_rs.agent._failures import NOT_AVAILABLE, failures_of
from elastic_rs.agent._functions import Functions
from elastic_rs.run._report import Failure as OurFailure
from helpers import functions
from torch.distributed.elastic import timer
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TheirAgent
from torch.distributed.elastic.metrics import api as metrics
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

if TYPE_CHECKING:
    from helpers.procs import Job

NODE = "127.0.0.1"
STARTS = ["spawn", "fork", "forkserver"]
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Give back what an agent replaces for the rest of its process."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def agent_of(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., Any]]:
    """Return a function that makes an agent; what it was given to join is shut down at the end."""
    made: list[RendezvousHandler] = []

    def agent_of(
        entrypoint: Any,
        *args: Any,
        nproc: int = 1,
        restarts: int = 0,
        backend: str = "rust-c10d",
        port: int | None = None,
        nodes: str = "1",
        cls: Any = elastic_rs.LocalElasticAgent,
        logs: LogsSpecs | None = None,
        spec: dict[str, Any] | None = None,
        conf: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        low, _, high = nodes.partition(":")
        if port is None:
            port = 0 if backend == "rust-c10d" else free_port()
        config = {"last_call_timeout": 1, "drain_timeout": 0} if backend == "rust-c10d" else {"is_host": "1"}
        if backend == "static":
            config = {"rank": 0}
        params = RendezvousParameters(
            backend, f"{NODE}:{port}", "job", int(low), int(high or low), local_addr=NODE, **config | (conf or {})
        )
        made.append(get_rendezvous_handler(params))
        given = {"role": "trainer", "local_world_size": nproc, "max_restarts": restarts, "monitor_interval": 0.05}
        worker = WorkerSpec(entrypoint=entrypoint, args=args, rdzv_handler=made[-1], **given | (spec or {}))
        logs = logs or DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
        return cls(spec=worker, logs_specs=logs, **options)

    yield agent_of
    for handler in reversed(made):
        handler.shutdown()


def until(found: Callable[[], bool], what: str) -> None:
    """Wait for what no event announces."""
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# Functions.


@pytest.mark.parametrize("start_method", STARTS)
def test_a_function_returns_its_values_by_global_rank(agent_of: Any, start_method: str) -> None:
    result = agent_of(functions.large, nproc=2, start_method=start_method).run()
    assert result.state == WorkerState.SUCCEEDED
    assert {rank: (len(value), value[0]) for rank, value in result.return_values.items()} == {
        0: (1_000_000, 0),
        1: (1_000_000, 1),
    }
    assert result.failures == {}
    assert not result.is_failed()


@pytest.mark.parametrize("start_method", STARTS)
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7), ("kill", -signal.SIGKILL)])
def test_a_function_that_fails_is_the_cause(agent_of: Any, start_method: str, how: str, code: int) -> None:
    result = agent_of(functions.fails, 1, how, nproc=2, start_method=start_method).run()
    assert result.is_failed()
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    assert (first.local_rank, first.exitcode) == (1, code)
    assert first is result.failures[1]
    if how == "raise":
        assert first.error_file_data["message"]["message"] == "ValueError: no such luck"
        assert "Traceback" in first.error_file_data["message"]["extraInfo"]["py_callstack"]
    if how == "kill":
        assert "OOM" in first.message or "SIGKILL" in first.message


@pytest.mark.parametrize("backend", ["rust-c10d", "static"])
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_functions_are_restarted(agent_of: Any, start_method: str, backend: str) -> None:
    agent = agent_of(
        functions.fails_at_first,
        nproc=2,
        restarts=2,
        start_method=start_method,
        backend=backend,
    )
    result = agent.run()
    assert result.return_values == {0: 1, 1: 1}
    assert agent._remaining_restarts == 1


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_function_that_exits_with_0_has_succeeded_with_none(agent_of: Any, nproc: int) -> None:
    # PyTorch's agent waits for its value for ever (`MultiprocessContext._poll`).
    result = agent_of(functions.leaves_without_returning, 0, nproc=nproc, start_method="fork").run()
    assert result.return_values == {0: None, 1: 1} if nproc == 2 else {0: None}


def test_a_function_that_exits_is_not_waited_for_to_be_noted(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The thread that notes what functions return may be later than the end of the job.
    monkeypatch.setattr(Functions, "_collect", lambda _: None)
    result = agent_of(functions.leaves_at_once, nproc=2, start_method="fork").run()
    assert result.return_values == {0: None, 1: None}


def test_a_value_that_cannot_be_read_hangs_nobody(agent_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    result = agent_of(functions.unreadable, nproc=2, start_method="fork").run()
    assert result.return_values == {0: None, 1: 1}
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("start_method", STARTS)
def test_a_value_that_cannot_be_pickled_is_named_as_the_cause(agent_of: Any, start_method: str) -> None:
    result = agent_of(functions.unpicklable, nproc=2, start_method=start_method).run()
    assert result.is_failed()
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    assert first.exitcode == 1
    assert "AttributeError: " in first.message or "PicklingError: " in first.message
    assert "unpicklable.<locals>.<lambda>" in first.message
    assert "ret_val_.put(ret)" in first.message, "and where"


def test_a_failure_whose_words_are_no_utf_8_is_told(agent_of: Any) -> None:
    result = agent_of(functions.fails_over_a_name_that_is_no_text, start_method="fork").run()
    assert result.is_failed()
    (failure,) = result.failures.values()
    assert failure.message["message"] == "ValueError: no file \udcff"


def test_a_function_that_cannot_be_pickled_is_an_error_and_leaves_nothing(agent_of: Any) -> None:
    agent = agent_of(lambda: None, start_method="spawn")
    # Which of the two depends on Python's version.
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"Can't (pickle|get) local object"):
        agent.run()
    assert agent._functions is None


# Programs.


def test_a_program_returns_none_for_each_rank(agent_of: Any) -> None:
    result = agent_of("true", nproc=2).run()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: None, 1: None}, {})


def test_a_program_that_is_not_there_costs_restarts_and_is_named(agent_of: Any) -> None:
    agent = agent_of("/no/such/program", nproc=2, restarts=2)
    result = agent.run()
    assert result.is_failed()
    assert agent._remaining_restarts == 0
    assert "/no/such/program" in result.failures[0].message
    assert list(result.failures) == [0]


def test_what_a_program_said_last_is_its_message(agent_of: Any) -> None:
    result = agent_of("sh", "-c", "echo for this reason >&2; exit 9").run()
    assert result.failures[0].exitcode == 9
    assert "for this reason" in result.failures[0].message


def test_arguments_know_their_local_rank(agent_of: Any, tmp_path: Path) -> None:
    agent_of("touch", f"{tmp_path}/${{local_rank}}.seen", nproc=2).run()
    assert sorted(path.name for path in tmp_path.glob("*.seen")) == ["0.seen", "1.seen"]


# As PyTorch's.


def test_it_is_one_of_torch_s_agents(agent_of: Any) -> None:
    agent = agent_of("true", nproc=2)
    assert isinstance(agent, TheirAgent)
    assert isinstance(agent, SimpleElasticAgent)
    group = agent.get_worker_group()
    assert group.state == WorkerState.INIT
    agent.run()
    assert group.state == WorkerState.SUCCEEDED
    assert (group.group_rank, group.group_world_size) == (0, 1)
    assert [worker.global_rank for worker in group.workers] == [0, 1]
    assert all(worker.id > 0 for worker in group.workers)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_workers_have_the_environment_that_torch_gives(
    agent_of: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    seen = []
    for cls in (TheirAgent, elastic_rs.LocalElasticAgent):
        agent = agent_of(
            functions.environment,
            nproc=2,
            restarts=3,
            cls=cls,
            start_method="fork",
            backend=backend,
        )
        seen.append(agent.run().return_values)
    theirs, ours = seen
    for rank in (0, 1):
        differ = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST"}
        assert ours[rank].pop("TORCHELASTIC_GENERATION") == "1"
        assert {**ours[rank], **dict.fromkeys(differ)} == {**theirs[rank], **dict.fromkeys(differ)}


@contextlib.contextmanager
def metrics_of_torch() -> Iterator[set[str]]:
    """Give the names of the metrics that PyTorch's handler gets meanwhile."""

    class Metrics(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            names.add(metric_data.name)

    names: set[str] = set()
    metrics.configure(Metrics(), group="torchelastic")
    try:
        yield names
    finally:
        metrics.configure(metrics.NullMetricHandler(), group="torchelastic")


def told_by(
    agent: Any, destination: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, str, int | None]], set[str]]:
    """Run it and return the events it has recorded and the names of its metrics."""
    handlers = pytest.importorskip("torch.distributed.elastic.events.handlers")

    class Events(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event = json.loads(record.getMessage())
            about = event["metadata"]
            assert about["hostname"] == socket.getfqdn()
            events.append((event["name"].rpartition(".")[2], event["source"], about["global_rank"]))

    events: list[tuple[str, str, int | None]] = []
    monkeypatch.setitem(handlers._log_handlers, destination, Events())
    with metrics_of_torch() as names:
        agent.run()
        assert agent.get_event_succeeded().metadata["state"] == "SUCCEEDED"
    return events, names


def test_events_and_metrics_are_those_of_torch(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "event_log_handler" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no choice of event handlers")
    script = "exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    seen = []
    for number, (cls, backend) in enumerate(
        [
            (TheirAgent, "static"),
            (elastic_rs.LocalElasticAgent, "static"),
            (elastic_rs.LocalElasticAgent, "rust-c10d"),
        ]
    ):
        destination = f"collect{number}"  # torch makes a logger for each, once
        options = {"spec": {"event_log_handler": destination}, "cls": cls, "backend": backend}
        agent = agent_of("sh", "-c", script, nproc=2, restarts=1, **options)
        seen.append(told_by(agent, destination, monkeypatch))
    events = [sorted(events) for events, _ in seen]
    assert events[0] == events[1] == events[2]
    assert ("RENDEZVOUS", "AGENT", None) in events[0]
    # Steps that ours does not have: docs/agent.md.
    steps = ("_monitor_workers", "_stop_workers", "_initialize_workers", "_restart_workers")
    theirs = {name for name in seen[0][1] if not name.partition(".")[2].startswith(steps)}
    assert theirs <= seen[1][1]
    assert theirs <= seen[2][1]
    assert "LocalElasticAgent._start_workers.duration.ms" in theirs


@pytest.mark.parametrize("cls", [TheirAgent, elastic_rs.LocalElasticAgent])
@pytest.mark.parametrize("backend", ["static", "rust-c10d"])
def test_the_master_s_address_may_be_given(agent_of: Any, cls: Any, backend: str) -> None:
    given = {"master_addr": "elsewhere", "master_port": 42}
    agent = agent_of(
        functions.environment,
        start_method="fork",
        cls=cls,
        backend=backend,
        spec=given,
    )
    environment = agent.run().return_values[0]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("elsewhere", "42")


def test_theirs_handler_s_exit_barrier_waits_for_the_other_node(agent_of: Any, port: int) -> None:
    results: list[RunResult] = []
    with contextlib.ExitStack() as stack:
        for host in ("1", "0"):
            agent = agent_of(
                "true",
                backend="c10d",
                port=port,
                nodes="2",
                conf={"is_host": host},
            )
            thread = threading.Thread(target=lambda agent=agent: results.append(agent.run()))
            thread.start()
            stack.callback(thread.join, LIMIT_S)
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert sorted(rank for result in results for rank in result.return_values) == [0, 1]


def test_a_waiting_node_makes_workers_begin_anew(agent_of: Any, tmp_path: Path) -> None:
    # With another handler than ours: it has to be asked.
    marks = tmp_path / "marks"
    marks.mkdir()
    script = f'touch {marks}/$TORCHELASTIC_GENERATION; [ "$TORCHELASTIC_GENERATION" = 2 ] || sleep 300'
    agent = agent_of("sh", "-c", script, backend="static")
    handler = agent.get_worker_group().spec.rdzv_handler
    handler.num_nodes_waiting = lambda: int({path.name for path in marks.iterdir()} == {"1"})
    assert agent.run().return_values == {0: None}
    assert agent._remaining_restarts == 0
    assert sorted(path.name for path in marks.iterdir()) == ["1", "2"]


def test_a_join_that_fails_leaves_nothing_behind(agent_of: Any) -> None:
    agent = agent_of("sleep", "300")
    agent.get_worker_group().spec.rdzv_handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        agent.run()
    assert agent._agent is None


def test_run_may_be_called_again(agent_of: Any) -> None:
    agent = agent_of(functions.rank, start_method="fork", backend="static")
    assert [agent.run().return_values for _ in range(2)] == [{0: 0}, {0: 0}]


def test_it_runs_outside_of_the_main_thread(agent_of: Any) -> None:
    agent = agent_of(functions.rank, nproc=2, start_method="spawn")
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    thread.join(LIMIT_S)
    assert [result.return_values for result in results] == [{0: 0, 1: 1}]


def test_every_node_counts_for_itself_if_asked(agent_of: Any) -> None:
    agent = agent_of("sh", "-c", "exit 3", restarts=1, conf={"restart_budget": "node"})
    result = agent.run()
    assert result.failures[0].exitcode == 3
    assert agent._remaining_restarts == 0


# Helpers of an agent.


def test_every_generation_has_a_watchdog_and_none_is_left(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    script = f"echo $TORCHELASTIC_TIMER_FILE >> {tmp_path}/seen; exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    before = {*threading.enumerate()}
    result = agent_of("sh", "-c", script, restarts=1).run()
    assert not result.is_failed()
    files = (tmp_path / "seen").read_text().split()
    assert len({*files}) == 2
    until(lambda: not any(thread.name.startswith("FileTimer") for thread in {*threading.enumerate()} - before), "end")
    until(lambda: not any(Path(file).exists() for file in files), "their files are removed")


def test_the_watchdog_ends_a_worker_whose_time_is_up(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    ended: list[int] = []
    reap = timer.FileTimerServer._reap_worker

    def reap_others(self: timer.FileTimerServer, pid: int, number: int) -> bool:
        ended.append(pid)
        return pid == os.getpid() or reap(self, pid, number)

    # Newer ones end the agent too: here that is this process.
    monkeypatch.setattr(timer.FileTimerServer, "_reap_worker", reap_others)
    agent = agent_of(functions.is_late_at_first, nproc=2, restarts=1, start_method="fork")
    assert agent.run().return_values == {0: 1, 1: 1}
    assert agent._remaining_restarts == 0
    assert len(ended) == 1 or ended[1:] == [os.getpid()]


def test_the_health_check_hook_is_started_and_stopped(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent as theirs

    seen: list[str] = []

    class Server:
        def start(self) -> None:
            seen.append("start")

        def stop(self) -> None:
            seen.append("stop")

    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "1234")
    monkeypatch.setattr(theirs, "create_healthcheck_server", lambda **_: Server())
    agent_of("sh", "-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))", restarts=1).run()
    assert seen == ["start", "stop"] * 2


def test_a_health_check_server_that_was_given_lives_until_workers_are_stopped(agent_of: Any) -> None:
    if "health_check_server" not in inspect.signature(TheirAgent.__init__).parameters:
        pytest.skip("this torch takes no server")
    seen: list[str] = []

    class Server:
        def stop(self) -> None:
            seen.append("stopped")

    agent = agent_of("true", health_check_server=Server())
    join = agent._handler.join

    def joins() -> Any:
        seen.append("joins")
        return join()

    agent._handler.join = joins
    agent.run()
    assert seen == ["joins", "stopped"]


@pytest.mark.parametrize("cls", [TheirAgent, elastic_rs.LocalElasticAgent])
@pytest.mark.parametrize("entry", ["program", "function"])
def test_workers_are_bound_to_a_numa_node(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cls: Any, entry: str
) -> None:
    if "numa_options" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no numa_options")
    from torch.numa import binding

    # In place of what looks at GPUs, and of a program that need not be installed.
    (cpu, *_) = os.sched_getaffinity(0)
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **_: {cpu})
    bind = '#!/bin/sh\ncpus=${1#--physcpubind=}\nshift\nexec taskset --cpu-list "$cpus" "$@"\n'
    (tmp_path / "numactl").write_text(bind)
    (tmp_path / "numactl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = {"numa_options": binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)}
    given: dict[str, Any] = {"backend": "static", "cls": cls, "spec": options}
    if entry == "program":
        agent_of("sh", "-c", f"grep Cpus_allowed_list /proc/self/status >> {tmp_path}/bound", nproc=2, **given).run()
        assert (tmp_path / "bound").read_text().split() == ["Cpus_allowed_list:", str(cpu)] * 2
    else:
        result = agent_of(functions.cpus, nproc=2, start_method="fork", **given).run()
        assert result.return_values == {0: [cpu], 1: [cpu]}


def test_a_worker_that_sleeps_uninterruptibly_fails_the_job(agent_of: Any, tmp_path: Path) -> None:
    agent = agent_of(
        functions.sleeps_uninterruptibly,
        str(tmp_path),
        nproc=2,
        restarts=3,
        start_method="fork",
        uninterruptible_state_timeout=0.5,
        shutdown_timeout=2,
    )
    result = agent.run()
    assert result.is_failed()
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    assert first is result.failures[1]
    assert "uninterruptible sleep" in first.message
    # A new worker could not use the device either.
    assert [path.name for path in tmp_path.glob("attempt*")] == ["attempt0"], (
        "a new worker could not use the device either"
    )


def test_each_worker_sees_its_own_gpu_as_the_first(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "virtual_local_rank" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no virtual_local_rank")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    agent = agent_of(functions.environment, nproc=2, start_method="fork", spec={"virtual_local_rank": True})
    values = agent.run().return_values
    assert [(values[i]["LOCAL_RANK"], values[i]["CUDA_VISIBLE_DEVICES"]) for i in (0, 1)] == [("0", "6"), ("0", "7")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    agent = agent_of("true", nproc=2, spec={"virtual_local_rank": True})
    with pytest.raises(ValueError, match="exceeds available GPUs"):
        agent.run()


# Logs.

# Older torch leaves it as it is.
HOSTNAME = " ${hostname}" if "hostname" in inspect.getsource(TheirAgent._start_workers) else ""
PRINTS = 'echo "out $RANK"; echo "err $RANK" >&2; echo "loss $RANK"'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch leaves its files to be closed
@pytest.mark.parametrize(
    ("template", "shown_ranks"),
    [(None, None), (f"<${{role_name}} ${{rank}} ${{local_rank}}{HOSTNAME}>", None), (None, {1})],
)
def test_logs_are_those_of_torch(
    agent_of: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    template: str | None,
    shown_ranks: set[int] | None,
) -> None:
    seen = []
    for cls in (TheirAgent, elastic_rs.LocalElasticAgent):
        folder = tmp_path / cls.__module__
        options: dict[str, Any] = {}
        if "duplicate_stdout_filters" in WorkerSpec.__dataclass_fields__:
            options = {"duplicate_stdout_filters": ["loss"], "duplicate_stderr_filters": ["err"]}
        agent = agent_of(
            "sh",
            "-c",
            PRINTS,
            nproc=2,
            cls=cls,
            logs=DefaultLogsSpecs(
                log_dir=str(folder),
                tee={0: Std.ALL, 1: Std.OUT},
                redirects={1: Std.ERR},
                local_ranks_filter=shown_ranks,
            ),
            backend="static",
            log_line_prefix_template=template,
            spec=options,
        )
        capfd.readouterr()
        agent.run()
        shown = capfd.readouterr()
        lines = [sorted(stream.splitlines()) for stream in shown]
        files = {
            str(file.relative_to(next(folder.iterdir()))): sorted(file.read_text().split("\n"))
            for file in folder.rglob("*.log")
        }
        seen.append((files, lines))
    assert seen[0] == seen[1]
    assert "attempt_0/0/stdout.log" in seen[0][0]


def test_what_is_teed_goes_to_python_s_streams(agent_of: Any, capfd: pytest.CaptureFixture[str]) -> None:
    # As with PyTorch's agent: a notebook has its own, and many a program redirects them.
    script = "echo out $RANK; echo err $RANK >&2; head -c 300000 /dev/zero | tr '\\0' x; echo"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        agent_of("sh", "-c", script, nproc=2, logs=DefaultLogsSpecs(tee=Std.ALL)).run()
    assert sorted(out.getvalue().split("\n")) == [
        "",
        *(f"[trainer{i}]:{text}" for i in (0, 1) for text in ("out " + str(i), "x" * 300_000)),
    ]
    assert sorted(err.getvalue().split("\n")) == ["", "[trainer0]:err 0", "[trainer1]:err 1"]
    assert capfd.readouterr() == ("", "")


def test_a_stream_that_takes_nothing_stops_no_worker(agent_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed):
        result = agent_of("seq", "1000000", logs=DefaultLogsSpecs(tee=Std.OUT)).run()
    assert not result.is_failed()
    assert "not shown any longer" in caplog.text


def test_logs_are_kept_by_generation(agent_of: Any, tmp_path: Path) -> None:
    agent_of(
        "sh",
        "-c",
        "echo $TORCHELASTIC_RESTART_COUNT; exit $((2 - TORCHELASTIC_RESTART_COUNT))",
        restarts=2,
        logs=DefaultLogsSpecs(log_dir=str(tmp_path / "kept"), redirects=Std.ALL),
    ).run()
    kept = {path.parts[-3]: path.read_text() for path in (tmp_path / "kept").rglob("stdout.log")}
    assert kept == {"attempt_0": "0\n", "attempt_1": "1\n", "attempt_2": "2\n"}


def test_logs_may_go_where_a_user_says(agent_of: Any, tmp_path: Path) -> None:
    class Mine(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            paths = {i: f"{tmp_path}/mine-{env['RANK']}" for i, env in envs.items()}
            files: Any = {}
            if "filtered_stdout" in LogsDest.__dataclass_fields__:
                files = {"filtered_stdout": "", "filtered_stderr": ""}
            return LogsDest(paths, paths, {}, {}, dict.fromkeys(envs, os.devnull), **files)

        @property
        def root_log_dir(self) -> str:
            return str(tmp_path)

    agent_of("sh", "-c", "echo out; echo err >&2", nproc=2, logs=Mine()).run()
    assert [sorted((tmp_path / f"mine-{i}").read_text().split()) for i in (0, 1)] == [["err", "out"]] * 2


@pytest.mark.parametrize(
    ("script", "redirects", "kept"), [("true", 0, False), ("echo x", 3, True), ("exit 1", 0, True)]
)
def test_a_folder_that_nobody_asked_for_is_removed_if_there_is_nothing_to_see(
    agent_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, redirects: int, *, kept: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    agent_of("sh", "-c", script, logs=DefaultLogsSpecs(redirects=Std(redirects))).run()
    assert bool(list((tmp_path / "tmp").glob("torchelastic_*"))) == kept


def test_a_folder_that_a_user_has_chosen_is_kept(
    agent_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent_of("true", logs=DefaultLogsSpecs(log_dir=str(tmp_path / "torchelastic_of_mine"))).run()
    assert (tmp_path / "torchelastic_of_mine").is_dir()


# Signals and exceptions.


@pytest.mark.parametrize("entry", ["program", "function"])
@pytest.mark.parametrize("backend", ["rust-c10d", "static"])
def test_a_signal_ends_workers_and_agent(agent_of: Any, tmp_path: Path, entry: str, backend: str) -> None:
    agent = (
        agent_of(functions.waits, str(tmp_path), nproc=2, start_method="spawn", backend=backend)
        if entry == "function"
        else agent_of(
            "sh",
            "-c",
            f"echo $$$$ > {tmp_path}/$RANK.tmp; mv {tmp_path}/$RANK.tmp {tmp_path}/$RANK; sleep 300",
            nproc=2,
            backend=backend,
        )
    )

    def interrupt() -> None:
        until(lambda: all((tmp_path / str(i)).exists() for i in (0, 1)), "workers run")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as caught, metrics_of_torch() as names:
        agent.run()
    thread.join()
    assert caught.value.sigval == signal.SIGTERM
    assert "SimpleElasticAgent.run.failure" in names
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 128 + signal.SIGTERM
    pids = [int((tmp_path / str(i)).read_text()) for i in (0, 1)]
    assert [gone(pid) for pid in pids] == [True, True]


def test_a_signal_in_the_middle_of_a_start_leaves_no_worker(agent_of: Any, tmp_path: Path) -> None:
    script = f"echo $$$$ > {tmp_path}/$RANK.tmp; mv {tmp_path}/$RANK.tmp {tmp_path}/$RANK; sleep 300"
    agent = agent_of("sh", "-c", script, nproc=16)

    def interrupt() -> None:
        until((tmp_path / "0").exists, "the first worker runs")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    pids = [int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert pids
    assert [pid for pid in pids if not gone(pid)] == []


def test_a_worker_stopped_the_moment_it_was_forked_is_no_second_agent(agent_of: Any) -> None:
    # The handler of the agent's would raise its exception in the middle of the agent's own stack.
    agent = agent_of(functions.rank, start_method="fork")
    parent, armed = os.getpid(), True

    def stop_child() -> None:
        if armed and os.getppid() == parent:
            os.kill(os.getpid(), signal.SIGTERM)

    os.register_at_fork(after_in_child=stop_child)
    try:
        result = agent.run()
    finally:
        armed = False
    assert result.is_failed()
    assert "SignalException" in str(result.failures[0].message)


@pytest.mark.parametrize("entry", ["program", "function"])
def test_an_exception_from_outside_leaves_no_worker(agent_of: Any, tmp_path: Path, entry: str) -> None:
    # Raised by a handler of the user's: not one of the signals that agents handle.
    class EnoughError(Exception):
        pass

    def handler(*_: object) -> None:
        raise EnoughError

    if entry == "function":
        agent = agent_of(functions.waits, str(tmp_path), start_method="fork")
    else:
        agent = agent_of("sh", "-c", f"echo $$$$ > {tmp_path}/0.tmp; mv {tmp_path}/0.tmp {tmp_path}/0; sleep 300")
    before = signal.signal(signal.SIGUSR1, handler)

    def interrupt() -> None:
        until((tmp_path / "0").exists, "the worker runs")
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        agent.run()
    except EnoughError as error:  # noqa: F841 - held on purpose
        # The exception holds the frames of `run`, and with them whatever these refer to.
        pid = int((tmp_path / "0").read_text())
        assert gone(pid)
    else:
        pytest.fail("nothing was raised")
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


# What is said of failures: in PyTorch's words, and in those of `elastic-run`.

MAKERS = pytest.mark.parametrize("make", [ProcessFailure, OurFailure], ids=["PyTorch's", "ours"])


class _Cause:
    node, role, local_rank, global_rank, pid, message = "node1:7", "trainer", 0, 2, 70, "x\ny"
    exit, returncode = "exit code 3", 3


@MAKERS
def test_another_node_s_failure_is_told_with_its_node(make: Any) -> None:
    cause: Any = _Cause()
    failures = failures_of(cause, [(0, 5, -15), (1, 6, -15)], 0, {}, "no restart is left", make=make)
    assert list(failures) == [2, 0, 1]
    assert failures[2].message == "exit code 3 on node1:7\n  x\n  y"
    assert failures[2].exitcode == 3
    assert min(failures.values(), key=lambda failure: failure.timestamp) is failures[2]


@MAKERS
def test_a_failure_of_which_nothing_is_known_points_to_how_to_know_more(make: Any) -> None:
    # A worker whose stderr is a terminal.
    cause: Any = _Cause()
    cause.message = ""
    (elsewhere,) = failures_of(cause, [], 0, {}, None, make=make).values()
    hint = make(0, 70, 3, NOT_AVAILABLE).message
    assert "https://pytorch.org/docs/stable/elastic/errors.html" in hint
    assert elsewhere.message == f"exit code 3 on node1:7\n  {hint}"
    cause.exit, cause.returncode = "SIGKILL", -9
    (killed,) = failures_of(cause, [], 0, {}, None, make=make).values()
    assert killed.message == "SIGKILL on node1:7", "it recorded nothing, with or without a decorator"


@MAKERS
def test_a_start_that_failed_elsewhere_is_not_taken_for_a_worker_of_ours(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "ours", "extraInfo": {"timestamp": "1"}}}))
    cause: Any = _Cause()
    cause.pid, cause.exit, cause.returncode = 0, "a failure to start", 1
    assert "ours" not in failures_of(cause, [(0, 5, -15)], 0, {0: str(file)}, None, make=make)[2].message


@MAKERS
def test_a_job_that_failed_without_a_worker_says_why(make: Any) -> None:
    assert failures_of(None, [], 4, {}, "the run is over", make=make)[4].message == "the run is over"


@pytest.mark.torchrun
def test_python_s_exit_code_names_the_signal(job: Job) -> None:
    node = job.torchrun(
        "--rdzv-backend=rust-c10d",
        f"--rdzv-endpoint={NODE}:0",
        "--no-python",
        "sh",
        "-c",
        "echo started; exec sleep 300",
        name="node",
    )
    node.line("started")
    node.signal(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
