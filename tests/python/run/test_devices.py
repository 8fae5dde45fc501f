"""``--nproc-per-node=gpu``: the number must be PyTorch's. The driver's library is a fake, PyTorch is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from helpers.gpus import LIMIT_S, driver, environment

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Job

__all__ = ["driver"]  # a fixture

GPUS = "GPU-aa1,GPU-aa2,GPU-b,GPU-c"

VARIABLES = [
    *(None, "", "0", "3,1", "0, 1 ,2", "+1", "0,4,1", "4", "-1", "0,-1,1", "0,,1", "0,x,1", "1gpu2,2ampere", "1,1"),
    *("none", "GPU-b", "GPU-b,GPU-aa1", "GPU-aa", "GPU-b,GPU-aa,GPU-c", "GPU-b,GPU-b", "GPU-b, GPU-c", "GPU-b,1"),
    *("GPU-d", "GPU-", "gpu-b", "0,GPU-b", " 2", "2 ", "2;1", "0x1", "01,1", "1e1", "3,2,1,0,0", "GPU-b,", ",0"),
]

PROGRAM = """
import json, os, sys
for variable in json.load(sys.stdin):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if variable is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = variable
    print(count(variable))
"""
OURS = "from elastic_rs._elastic_rs import visible_gpus as count\n" + PROGRAM
THEIRS = "import torch\ncount = lambda variable: torch.cuda.device_count()\n" + PROGRAM


def counts(program: str, env: dict[str, str]) -> dict[str | None, int]:
    """Return the number of visible GPUs for each value of the variable."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(VARIABLES),
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    return dict(zip(VARIABLES, map(int, result.stdout.split()), strict=True))


def test_a_module_in_the_current_folder_is_not_asked_for_devices(tmp_path: Path) -> None:
    result = tmp_path / "told"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(result)!r}, 'w').close()\n")
    code = "from elastic_rs.run._devices import count_of; count_of('nobodys')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert "must be a number, auto, cpu, gpu or xpu" in done.stderr, done.stderr
    assert not result.exists()


@pytest.mark.parametrize("gpus", ["GPU-b", GPUS])
def test_the_number_of_visible_gpus_is_pytorchs(driver: Path, gpus: str) -> None:
    env = environment(driver, gpus)
    ours = counts(OURS, env)
    assert ours == counts(THEIRS, env)
    assert ours[None] == len(gpus.split(","))


def test_a_gpu_that_has_fallen_off_the_bus_keeps_its_number(driver: Path) -> None:
    env = environment(driver, "GPU-a,,GPU-c")
    ours = counts(OURS, env)
    theirs = counts(THEIRS, env)
    # With UUIDs PyTorch would ask CUDA, which does not exist here.
    numbers = [variable for variable in VARIABLES if "GPU" not in (variable or "")]
    assert [ours[variable] for variable in numbers] == [theirs[variable] for variable in numbers]
    assert ours[None] == 3


@pytest.mark.parametrize("launcher", [pytest.param("torch.distributed.run", marks=pytest.mark.long), "elastic_rs.run"])
def test_each_visible_gpu_gets_a_worker(driver: Path, job: Job, tmp_path: Path, launcher: str) -> None:
    env: dict[str, Any] = environment(driver, GPUS) | {"CUDA_VISIBLE_DEVICES": "3,GPU-b,0"}
    worker = ["sh", "-c", f"touch {tmp_path}/$RANK-of-$WORLD_SIZE-sees-$CUDA_VISIBLE_DEVICES"]
    flags = ["--standalone", "--nproc-per-node=gpu", "--no-python"]
    process = job.start([sys.executable, "-m", launcher, *flags, *worker], env=env)
    assert process.wait() == 0
    assert [file.name for file in tmp_path.glob("?-of-*")] == ["0-of-1-sees-3,GPU-b,0"]
    env["CUDA_VISIBLE_DEVICES"] = "GPU-c,GPU-aa2"
    process = job.start([sys.executable, "-m", launcher, *flags, *worker], env=env)
    assert process.wait() == 0
    assert {file.name for file in tmp_path.glob("?-of-2-*")} == {f"{i}-of-2-sees-GPU-c,GPU-aa2" for i in (0, 1)}


def test_a_driver_that_does_not_work_is_an_error(driver: Path, job: Job) -> None:
    env = environment(driver, "broken")
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=gpu", "--no-python", "true"]
    process = job.start(command, env=env)
    assert process.wait() == 2
    assert "no NVIDIA driver answers" in "\n".join(process.lines)


def test_pytorch_counts_parts_of_gpus_that_only_cuda_knows(driver: Path, job: Job) -> None:
    env = environment(driver, GPUS) | {"CUDA_VISIBLE_DEVICES": "MIG-GPU-b/1/0"}
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", "--nproc-per-node=gpu", "--no-python", "true"]
    process = job.start(command, env=env)
    assert process.wait() == 2
    assert "PyTorch says: " in "\n".join(process.lines)


@pytest.mark.parametrize(
    ("chosen", "result"), [(None, "4 of 4"), ("3,1", "2 of 4 seen by processes, CUDA_VISIBLE_DEVICES is `3,1`")]
)
def test_the_doctor_shows_the_number_of_gpus(driver: Path, chosen: str | None, result: str) -> None:
    env = {**os.environ, **environment(driver, GPUS)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "elastic_rs.run", "doctor"]
    done = subprocess.run(
        command,
        env=env if chosen is None else env | {"CUDA_VISIBLE_DEVICES": chosen},
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert f"gpus         {result}" in done.stdout
