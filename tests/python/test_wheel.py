"""The wheel, installed elsewhere: what is started by its name, by PyTorch, by ssh or by the core, starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_rs import _python

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
from importlib.metadata import entry_points
import torch.distributed.elastic.rendezvous.registry
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry
for found in entry_points(group="torchrun.handlers"):
    if found.name.startswith("rust-"):
        print(found.name, found.load()().__module__)
params = RendezvousParameters("rust-c10d", "localhost:0", "job", 1, 1)
print(type(registry.create_handler(params)).__name__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheels = [*ROOT.glob("build/tested/elastic_rs-*.whl"), *ROOT.glob("dist/elastic_rs-*.whl")]
    if not wheels:
        pytest.skip("no wheel is built here: `make build` does")
    folder = tmp_path_factory.mktemp("installed")
    wheel = max(wheels, key=lambda path: path.stat().st_mtime)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, timeout=250)
    return folder


def started(installed: Path, command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "ELASTIC_RS_LOG": ""}
    return subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_it_is_the_package_that_is_found(installed: Path) -> None:
    done = started(installed, [sys.executable, "-c", "import elastic_rs; print(elastic_rs.__file__)"])
    assert done.stdout == f"{installed}/elastic_rs/__init__.py\n"


def test_pytorch_finds_the_entry_points(installed: Path) -> None:
    done = started(installed, [sys.executable, "-c", ENTRY_POINTS])
    assert done.returncode == 0, done.stderr
    plugin = "elastic_rs._integration._plugin"
    lines = done.stdout.splitlines()
    assert sorted({*lines[:-1]}) == [f"rust-c10d {plugin}", f"rust-etcd {plugin}"]
    assert lines[-1] == "RustC10dRendezvousHandler"


@pytest.mark.parametrize("name", ["elastic-run", "elastic-rs"])
def test_commands(installed: Path, name: str) -> None:
    done = started(installed, [sys.executable, str(installed / "bin" / name), "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: {name} " in done.stdout


def test_modules(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('elastic_rs._warm._fork_server' in sys.modules)")
    run = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1"]
    for flags, said in (
        ([str(script)], "False"),
        (["--run-path", str(script)], "False"),
        (["--warm-modules=json", str(script)], "True"),
    ):
        done = started(installed, [*run, *flags])
        assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr
    done = started(installed, [sys.executable, "-m", "elastic_rs", "--version"])
    assert done.stdout.startswith("elastic-rs ")
    done = started(installed, [*run[:3], "doctor"])
    assert "elastic_rs" in done.stdout


def test_an_agent_that_a_driver_starts(installed: Path) -> None:
    done = started(installed, [sys.executable, *_python.arguments(_python.AGENT)], '{"token": "f00d"}\n')
    assert (done.returncode, done.stderr) == (1, ""), "the driver has gone"
    assert done.stdout.startswith('elastic_rs-agent f00d {"up": {"version": "')
