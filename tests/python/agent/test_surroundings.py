"""Features of PyTorch's agent around workers: watchdogs, health checks, NUMA nodes, D-state time-out, and GPUs."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import functions
from torch.distributed.elastic import timer
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as TheirAgent

from .conftest import until


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

    # Newer torch ends the agent too, which is this process here.
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


def test_a_given_health_check_server_lives_until_the_workers_are_stopped(agent_of: Any) -> None:
    if "health_check_server" not in inspect.signature(TheirAgent.__init__).parameters:
        pytest.skip("this torch takes no server")
    seen: list[str] = []

    class Server:
        def stop(self) -> None:
            seen.append("stopped")

    agent = agent_of("true", health_check_server=Server())
    join = agent._handler.join

    def joins(_agent: Any) -> Any:
        seen.append("joins")
        return join()

    agent._handler.join = joins
    agent.run()
    assert seen == ["joins", "stopped"]


@pytest.mark.parametrize("entry", ["program", "function"])
def test_workers_are_bound_to_cpus_without_a_gpu_and_without_numactl(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str
) -> None:
    if "numa_options" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no numa_options")
    from torch.numa import binding

    before = os.sched_getaffinity(0)
    *_, cpu = sorted(before)
    monkeypatch.setattr(
        "elastic_rs.agent._generation.cpus_of", lambda mode, count: [[], [cpu]][:count] * (mode == "node")
    )
    options = {"numa_options": binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)}
    given: dict[str, Any] = {"backend": "static", "spec": options}
    all_cpus = sorted(before)
    if entry == "program":
        show = f"import os; print(sorted(os.sched_getaffinity(0)), file=open('{tmp_path}/' + os.environ['RANK'], 'w'))"
        agent_of(sys.executable, "-c", show, nproc=2, **given).run()
        bound = [(tmp_path / rank).read_text().strip() for rank in "01"]
        assert bound == [str(all_cpus), str([cpu])]
    else:
        result = agent_of(functions.cpus, nproc=2, start_method="fork", **given).run()
        assert result.return_values == {0: all_cpus, 1: [cpu]}
    assert os.sched_getaffinity(0) == before


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
