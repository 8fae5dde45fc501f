"""``examples/skypilot`` against SkyPilot's schemas, and its commands on two machines."""

import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.machines import Lan
from helpers.procs import Job

from .conftest import ENGINES, EXAMPLES, WORKER

RECIPE = EXAMPLES / "skypilot" / "train.yaml"
pytestmark = pytest.mark.usefixtures("engines")


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return SkyPilot's module of schemas. The rest of SkyPilot needs a hundred packages, and is left out."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
        monkeypatch.delitem(sys.modules, name)
    package = types.ModuleType("sky")
    package.__path__ = [str(ENGINES / "sky")]
    package.__dict__["__version__"] = "0.14.1"
    monkeypatch.setitem(sys.modules, "sky", package)
    autostop = types.ModuleType("sky.skylet.autostop_lib")

    class AutostopWaitFor:
        @staticmethod
        def supported_modes() -> list[str]:
            return []

    autostop.__dict__["AutostopWaitFor"] = AutostopWaitFor
    monkeypatch.setitem(sys.modules, "sky.skylet.autostop_lib", autostop)
    module = importlib.import_module("sky.utils.schemas")
    # That of a task's `config`, which the recipe does not have, needs SkyPilot's server.
    monkeypatch.setattr(module, "_task_config_schema", dict)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
        sys.modules.pop(name)


def task() -> dict[str, Any]:
    return importlib.import_module("yaml").safe_load(RECIPE.read_text())


def test_the_task_agrees_with_the_published_schemas(schemas: Any) -> None:
    validate = importlib.import_module("jsonschema").validate
    found = task()
    validate(found, schemas.get_task_schema())
    validate(found["resources"], schemas.get_resources_schema())
    invalid = importlib.import_module("jsonschema").ValidationError
    with pytest.raises(invalid, match="nodes"):
        validate(found | {"nodes": 4}, schemas.get_task_schema())


def test_its_commands_train_on_two_machines(job: Job, lan: Lan, tmp_path: Path) -> None:
    # SkyPilot runs the text in bash on each machine, with these variables.
    commands = task()["run"]
    assert "train.py --checkpoints /checkpoints" in commands
    commands = commands.replace("train.py --checkpoints /checkpoints", str(WORKER))
    commands = commands.replace("$HOME/elastic-logs", str(tmp_path / "logs"))
    machines = [lan.machine(f"node{number}") for number in range(2)]
    env = {
        **task()["envs"],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in machines),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_TASK_ID": "sky-2026-11-22-10-00-00-000000_train_1",
    }
    nodes = [
        job.start(
            machine.container("bash", "-c", commands), name=machine.name, env=env | {"SKYPILOT_NODE_RANK": str(rank)}
        )
        for rank, machine in reversed([*enumerate(machines)])
    ]
    assert [node.wait() for node in nodes] == [0, 0]
    for rank, node in enumerate(reversed(nodes)):
        node.line(rf"DONE rank={rank}")
