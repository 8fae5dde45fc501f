"""``examples/ray`` without Ray: what the script makes of the ends of its agents."""

import importlib.util
import sys
import types
from typing import Any

import pytest

from .conftest import EXAMPLES


class TaskError(Exception):
    """What Ray raises for an error inside an actor."""

    cause = FileNotFoundError("elastic-run")


class ActorError(Exception):
    """What Ray raises for an actor that is gone."""


class Cluster:
    """A cluster whose agents end at once, each as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[str, list[Any]]) -> None:
        self.ends = ends
        self.starts: list[str] = []
        self.results: dict[str, Any] = {}
        modules = {name: types.ModuleType(name) for name in ("ray", "ray.exceptions", "ray.util")}
        scheduling = types.ModuleType("ray.util.scheduling_strategies")
        modules["ray.exceptions"].__dict__.update(RayActorError=ActorError, RayTaskError=TaskError)
        modules["ray.util"].__dict__.update(get_node_ip_address=lambda: "127.0.0.1")
        scheduling.__dict__.update(NodeAffinitySchedulingStrategy=lambda name, **_: name)
        modules["ray"].__dict__.update(
            remote=lambda **_: lambda cls: cls, nodes=self.nodes, wait=self.wait, get=self.get
        )
        for module in (*modules.values(), scheduling):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
        spec = importlib.util.spec_from_file_location("elastic_on_ray", EXAMPLES / "ray" / "elastic_on_ray.py")
        assert spec is not None
        assert spec.loader is not None
        self.script: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)
        monkeypatch.setattr(self.script, "Agent", self)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "Resources": {"CPU": 1}} for name in self.ends
        ]

    def options(self, *, scheduling_strategy: str, **_: float) -> Any:
        def run(_: list[str]) -> str:
            self.starts.append(scheduling_strategy)
            return f"{scheduling_strategy} {len(self.starts)}"

        actor = types.SimpleNamespace(run=types.SimpleNamespace(remote=run))
        return types.SimpleNamespace(remote=lambda: actor)

    def wait(self, pending: list[str], **_: float) -> tuple[list[str], list[str]]:
        return [result for result in pending if self.ends[result.split()[0]]][:1], []

    def get(self, result: str, **_: float) -> int:
        if result not in self.results:
            self.results[result] = self.ends[result.split(maxsplit=1)[0]].pop(0)
        end = self.results[result]
        if isinstance(end, Exception):
            raise end
        return int(end)

    def follow(self) -> int:
        return int(self.script.follow(["elastic-run"], {"num_cpus": 1.0, "num_gpus": 0.0}, most=4))


def test_a_node_that_cannot_run_an_agent_is_tried_three_times_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = {"bare": [TaskError(), 2, TaskError()], "good": [*[ActorError()] * 6, 0]}
    cluster = Cluster(monkeypatch, ends)
    assert cluster.follow() == 0
    assert (cluster.starts.count("bare"), cluster.starts.count("good")) == (3, 7)
    assert "an agent cannot be started: elastic-run" in capfd.readouterr().err


def test_a_job_that_no_node_can_run_has_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, {"one": [2, 2, 2], "two": [TaskError(), TaskError(), TaskError()]})
    assert cluster.follow() == 1
    assert len(cluster.starts) == 6
    assert "no node can run an agent" in capfd.readouterr().err


def test_a_job_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster(monkeypatch, {"one": [1]}).follow() == 1
