"""The wheel and the sdist of a release, as their users meet them. Long: `make test-long` builds them first."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
NATIVE = f"*-cp311-abi3-manylinux*_2_17_{platform.machine()}.whl"
RELEASE_PYTHON = ROOT / "build" / "release" / "bin" / "python"
TRAIN = """
import os
import platform
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(f"rank {os.environ['RANK']} of {int(one)} trained", flush=True)
dist.destroy_process_group()
"""


def built(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        pytest.skip(f"no {pattern} in dist: `make wheel` builds it")
    return found[0]


@pytest.mark.long
def test_the_first_example_runs_in_an_empty_environment(tmp_path: Path, port: int) -> None:
    wheel = built(NATIVE)
    bin_folder = tmp_path / "venv" / "bin"
    venv.EnvBuilder(symlinks=True, with_pip=True).create(tmp_path / "venv")
    python = bin_folder / "python"
    env = {"PATH": str(bin_folder), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # no compiler, no cargo
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, wheel], env=env, check=True, timeout=60)
    # PyTorch is there, as the README asks. Its own package has 5 GB, so the environment sees the one of the tests.
    import torch

    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [python, "-c", code], env=env, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    (Path(packages.strip()) / "torch_of_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    torchrun = bin_folder / "torchrun"
    torchrun.write_text(f"#!{python}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n")
    torchrun.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^\$ (torchrun .*)$", readme, flags=re.MULTILINE)
    command = shlex.split(line.replace(":29400", f":{port}"))
    done = subprocess.run(
        [torchrun, *command[1:]], env=env, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 trained", "rank 1 of 2 trained"]


NO_INTERFACES = """
import socket
assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
with socket.socket() as server:
    try:
        server.connect(("127.0.0.1", 9))
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture
def cut_off() -> list[str | Path]:
    """Return the command that runs another one in a network namespace whose loopback is down."""
    command: list[str | Path] = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    tried = subprocess.run(
        [*command, sys.executable, "-c", NO_INTERFACES], check=False, capture_output=True, text=True, timeout=60
    )
    if tried.returncode != 0:
        pytest.skip(f"`{command[0]}` makes no network namespace here: {tried.stderr.strip()}")
    assert tried.stdout == "Network is unreachable\n"
    return command


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_sdist_builds_without_a_network(tmp_path: Path, cut_off: list[str | Path]) -> None:
    sdist = built("elastic_rs-*.tar.gz")
    # What is compiled stays: a second run compiles elastic_rs alone. Files get today's time, by which cargo knows them
    # from those of another commit.
    source = ROOT / "build" / "sdist"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    unpack: list[str | Path] = ["tar", "--extract", "--touch", "--strip-components=1", "--directory", source, "--file"]
    subprocess.run([*unpack, sdist], check=True, timeout=60)
    env = {**os.environ, "CARGO_HOME": str(tmp_path / "cargo"), "CARGO_NET_OFFLINE": "true"}
    env |= {"CARGO_TARGET_DIR": str(ROOT / "build" / "sdist-target"), "PYO3_PYTHON": sys.executable}
    env |= {"PATH": f"{RELEASE_PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}
    # Whether it builds is asked, and not how fast it runs.
    env |= {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_LTO": "off"}
    out = tmp_path / "out"
    pip: list[str | Path] = [RELEASE_PYTHON, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    offline: list[str | Path] = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*cut_off, *pip, *offline, "--wheel-dir", out, source], env=env, check=True, timeout=3500)
    (wheel,) = out.glob("*.whl")
    folder = tmp_path / "there"
    shutil.unpack_archive(wheel, folder, "zip")
    code = "from elastic_rs import _elastic_rs; print(_elastic_rs.COMMIT)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(folder)}, check=True, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == (source / "crates" / "py" / "commit").read_text() + "\n", "the sdist names its commit"
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?\n", done.stdout)
