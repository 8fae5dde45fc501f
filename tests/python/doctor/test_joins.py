"""``elastic-run doctor --join``: what a node checks before it joins. The driver's library is a fake (``nvml.c``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from helpers.gpus import driver, environment

from .test_doctor import RUN, about, doctor

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.procs import Job

    from .test_doctor import Doctor

__all__ = ["doctor", "driver"]  # fixtures

GPUS = "GPU-a,GPU-b,GPU-c"
MEND = "mend  health       "


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("", None),
        ("lost 2 0", "GPU 2 has fallen off the bus"),
        ("mute 1 0", "GPU 1 has fallen off the bus"),
        ("field 1 230 1", "GPU 1 needs a reset"),
        ("field 0 230 2", "GPU 0 needs a reboot of its machine"),
        ("field 0 230 3", "GPU 0 needs peer-to-peer traffic to be drained"),
        ("field 0 230 4", "GPU 0 needs to be drained and reset"),
        ("field 0 230 0\nfield 0 144 0\nfield 0 145 0", None),
        ("field 2 230 0\nfield 2 144 1\nfield 2 145 0", "GPU 2 needs a reset: rows of its memory wait to be remapped"),
        ("field 2 144 1\nfield 2 145 1", "GPU 2 could not remap a row of its memory, and has to be replaced"),
        ("xid 1 79", None),  # before anybody listened
    ],
)
def test_gpus_that_their_driver_calls_ill(
    doctor: Doctor, driver: Path, tmp_path: Path, faults: str, says: str | None
) -> None:
    file = tmp_path / "faults"
    file.write_text(faults)
    said = about("health", doctor("--join", env=environment(driver, GPUS, file)))
    assert said == (f"{MEND}{says}" if says else "ok    health       --health-check finds nothing")


@pytest.mark.parametrize("gpus", ["broken", "", ",GPU-b"])
def test_a_driver_that_does_not_work_or_a_gpu_without_a_name(doctor: Doctor, driver: Path, gpus: str) -> None:
    said = about("health", doctor("--join", env=environment(driver, gpus)))
    assert said.startswith("mend " if "GPU" in gpus else "ok "), said


def test_links_that_the_job_names(doctor: Doctor) -> None:
    said = about("health", doctor("--join", env={"GLOO_SOCKET_IFNAME": "nowhere0"}))
    assert said == f"{MEND}there is no interface `nowhere0`, which GLOO_SOCKET_IFNAME names"


def test_a_command(doctor: Doctor) -> None:
    assert about("health", doctor("--join", "--health-check=true")).startswith("ok ")
    ill = about("health", doctor("--join", env={"ELASTIC_RS_HEALTH_CHECK": "echo GPU 3 is hot; exit 1"}))
    assert ill == f"{MEND}`echo GPU 3 is hot; exit 1` ended with exit code 1: GPU 3 is hot"
    unknown = about("health", doctor("--join", "--health-check=exit 5"))
    assert unknown.startswith("note  health       --health-check says nothing, so this machine would count as well: ")
    assert not any(" health " in line for line in doctor("--health-check=exit 1")), "nobody has asked"


def test_a_command_that_no_shell_could_run(job: Job) -> None:
    process = job.start([RUN, "doctor", "--join", "--health-check="])
    assert process.wait() == 2
    assert any("--health-check" in line for line in process.lines)


@pytest.mark.long
def test_a_driver_that_never_answers(doctor: Doctor, driver: Path, tmp_path: Path) -> None:
    """It takes the 30 s that a check may take."""
    file = tmp_path / "faults"
    file.write_text("hangs 0 0")
    said = about("health", doctor("--join", "--network-timeout=1", env=environment(driver, GPUS, file)))
    assert said == f"{MEND}NVIDIA's driver has not answered within 30.0s"
