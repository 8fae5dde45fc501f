"""What a user reads whose Python, platform, torch or installation is not what the wheel needs (docs/install.md)."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from elastic_rs._integration import _plugin
from packaging.tags import cpython_tags
from torch.distributed.elastic.rendezvous import RendezvousParameters

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-index", "--no-deps"]


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = [*ROOT.glob("build/tested/elastic_rs-*.whl"), *ROOT.glob("dist/elastic_rs-*.whl")]
    if not wheels:
        pytest.skip("no wheel is built here: `make build` does")
    return max(wheels, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    subprocess.run([*PIP, "install", "--quiet", *OFFLINE, "--target", folder, wheel], check=True, timeout=250)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python without any package."""
    folder = tmp_path_factory.mktemp("empty")
    venv.EnvBuilder(symlinks=True).create(folder)
    return folder / "bin" / "python"


def run(*command: str | Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=False, timeout=120)


def test_pip_does_not_choose_the_wheel_for_a_python_that_is_too_old(wheel: Path, tmp_path: Path) -> None:
    chosen: list[str | Path] = ["--python-version", "3.10", "--only-binary=:all:", "--find-links", wheel.parent]
    done = run(*PIP, "download", *OFFLINE, *chosen, "--dest", tmp_path, "elastic_rs")
    assert done.returncode == 1
    assert "No matching distribution found for elastic_rs" in done.stderr
    assert not list(tmp_path.iterdir())


def test_pip_names_the_python_that_the_index_asks_for(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        asks = re.search(r"^Requires-Python: (.*)$", files.read(name).decode(), re.MULTILINE)
    assert asks is not None
    version = wheel.name.split("-")[1]
    index = tmp_path / "elastic-rs" / "index.html"
    index.parent.mkdir()
    sdist = f"elastic_rs-{version}.tar.gz"
    index.write_text(f"<!DOCTYPE html><a href={sdist} data-requires-python='{html.escape(asks[1])}'>{sdist}</a>")
    options = ["--no-deps", "--python-version=3.10", f"--index-url=file://{tmp_path}", "--dest", str(tmp_path)]
    done = run(*PIP, "download", *options, "elastic_rs", PIP_FIND_LINKS="")
    assert done.returncode == 1
    assert f"require a different python version: {version} Requires-Python >=3.11" in done.stderr


def test_the_wheel_is_not_for_a_python_without_a_global_lock(wheel: Path) -> None:
    """Pip asks this of the interpreter that it installs into."""
    python, abi = wheel.name.split("-")[2:4]
    for version in ((3, 13), (3, 14)):
        name = f"cp{version[0]}{version[1]}"
        assert (python, abi) in {(tag.interpreter, tag.abi) for tag in cpython_tags(version, [name])}
        assert (python, abi) not in {(tag.interpreter, tag.abi) for tag in cpython_tags(version, [f"{name}t"])}


def test_a_wheel_of_another_platform_is_refused(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / f"{'-'.join(wheel.name.split('-')[:4])}-manylinux_2_17_s390x.whl"
    shutil.copy(wheel, other)
    done = run(*PIP, "install", *OFFLINE, "--target", tmp_path / "there", other)
    assert done.returncode == 1
    assert "is not a supported wheel on this platform" in done.stderr


def test_without_torch_the_launcher_runs_and_says_so(installed: Path, empty: Path) -> None:
    done = run(empty, "-m", "elastic_rs.run", "--version", PYTHONPATH=installed)
    assert done.stdout.rstrip().endswith(", no torch)")
    run_true = ["-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1", "--no-python", "true"]
    done = run(empty, *run_true, PYTHONPATH=installed)
    assert done.returncode == 0, done.stderr
    done = run(empty, "-m", "elastic_rs.run", "doctor", PYTHONPATH=installed)
    assert "note  torch        not found by" in done.stdout


@pytest.mark.parametrize("create", [_plugin.create_rust_c10d, _plugin.create_rust_etcd])
def test_an_old_torch_is_refused_in_one_sentence(create: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    assert callable(create)
    with pytest.raises(
        RuntimeError, match=r"^elastic_rs needs PyTorch 2.6 or later, and this is 2.5.1\+cpu: pip install"
    ):
        create(RendezvousParameters("rust-c10d", "localhost:0", "job", 1, 1))


def test_the_command_of_a_removed_installation(installed: Path, empty: Path, tmp_path: Path) -> None:
    left = tmp_path / "elastic-run"
    left.write_text(
        f"#!{empty}\n" + "".join((installed / "bin" / "elastic-run").read_text().splitlines(keepends=True)[1:])
    )
    left.chmod(0o755)
    done = run(left, "--version", PYTHONPATH="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'elastic_rs'"


ASKS = """
import torch.distributed.elastic.rendezvous.registry
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry
registry.create_handler(RendezvousParameters("rust-c10d", "localhost:0", "job", 1, 1))
"""


def test_torchrun_finds_a_target_folder_by_pythonpath(installed: Path, empty: Path) -> None:
    packages = Path(torch.__file__).parents[1]
    path = f"{installed}{os.pathsep}{packages}"
    done = run(empty, "-c", f"{ASKS.rstrip()}\nprint('found')", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
    done = run(empty, installed / "bin" / "elastic-run", "--version", PYTHONPATH=path)
    assert done.stdout.startswith("elastic-run "), done.stderr


def test_the_doctor_finds_two_versions_at_once(installed: Path, empty: Path, tmp_path: Path) -> None:
    """A newer version was unpacked over an older one, whose description stayed."""
    mixed = tmp_path / "mixed"
    shutil.copytree(installed, mixed)
    (info,) = mixed.glob("elastic_rs-*.dist-info")
    version = info.name.removesuffix(".dist-info").partition("-")[2]
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", "\nVersion: 0.0.1\n"))
    info.rename(mixed / "elastic_rs-0.0.1.dist-info")
    done = run(empty, "-m", "elastic_rs.run", "doctor", PYTHONPATH=mixed)
    assert f"0.0.1, but its compiled part is {version}: two installations are mixed" in done.stdout, done.stdout


def test_an_entry_point_of_a_removed_installation(installed: Path, empty: Path, tmp_path: Path) -> None:
    (info,) = installed.glob("elastic_rs-*.dist-info")
    shutil.copytree(info, tmp_path / info.name)
    packages = Path(torch.__file__).parents[1]
    done = run(empty, "-c", ASKS, PYTHONPATH=f"{tmp_path}{os.pathsep}{packages}")
    said = "RuntimeError: Failed to load the backend extension: elastic_rs. You can disable extension auto-loading "
    assert done.stderr.splitlines()[-1] == said + "with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    # An older torch has no such entry points, and finds out when it is asked for the backend.
    done = run(empty, "-c", ASKS, PYTHONPATH=f"{tmp_path}{os.pathsep}{packages}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    said = "ValueError: The rendezvous backend 'rust-c10d' is not registered. Did you forget to call `register`?"
    assert done.stderr.splitlines()[-1] == said


def test_a_home_that_cannot_be_written(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    command: list[str | Path] = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=1", script]
    done = run(*command, PYTHONPATH=installed, HOME="/proc", XDG_CACHE_HOME="/proc/none")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
