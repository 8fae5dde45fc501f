"""``--omp-threads``, and the message about ``OMP_NUM_THREADS``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_rs.run import _cpus
from elastic_rs.run._usage import UsageError

MANY = 64
"""CPUs that this process seems to have."""


@pytest.fixture(autouse=True)
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)))
    monkeypatch.setattr(_cpus, "_quotas", lambda *_: [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def mounted(root: Path, proc: str, files: dict[str, str]) -> tuple[str, str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc").write_text(proc)
    return str(root / "proc"), str(root)


V1 = "3:memory:/pod\n2:cpu,cpuacct:/pod/one\n"


@pytest.mark.parametrize(
    ("proc", "files", "quotas"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, [2]),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "400000 100000\n"}, [8, 4]),
        ("0::/only/the/host/has/it\n", {"cpu.max": "1600000 100000\n"}, [16]),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, [0]),
        (V1, {"cpu/pod/one/cpu.cfs_quota_us": "300000\n", "cpu/pod/one/cpu.cfs_period_us": "100000\n"}, [3]),
        (V1, {"cpu/pod/one/cpu.cfs_quota_us": "-1\n", "cpu/pod/one/cpu.cfs_period_us": "100000\n"}, []),
        ("0::/\n", {"cpu.max": "nonsense\n"}, []),
        ("", {}, []),
    ],
)
def test_the_quotas_of_all_cgroups_around_a_process_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proc: str, files: dict[str, str], quotas: list[int]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)))
    where = mounted(tmp_path, proc, files)
    assert _cpus._quotas(*where) == quotas
    assert _cpus.usable_cpus(*where) == max(1, min([MANY, *quotas]))


@pytest.mark.parametrize(
    ("given", "workers", "expected"),
    [
        (None, 1, None),
        (None, 8, "1"),
        ("auto", 1, "64"),
        ("auto", 8, "8"),
        ("auto", 100, "1"),
        ("12", 1, "12"),
        ("12", 8, "12"),
    ],
)
def test_workers_share_the_cpus(given: str | None, workers: int, expected: str | None) -> None:
    _cpus.check_omp_threads(given)
    assert _cpus.omp_threads(given, workers).get("OMP_NUM_THREADS") == expected
    assert "OMP_NUM_THREADS" not in os.environ, "a program that launches keeps its environment"


def test_the_flag_overrides_the_variable_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _cpus.omp_threads(None, 8) == {}
    assert _cpus.omp_threads("auto", 8) == {"OMP_NUM_THREADS": "8"}


def test_the_message_has_the_number_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    _cpus.omp_threads(None, 4)
    assert "--omp-threads=auto sets 16 here (64 usable CPUs)" in caplog.text


@pytest.mark.parametrize("value", ["", "0", "-1", "all", "1.5", "²", "100000"])
def test_other_values_are_refused_before_anything_starts(value: str) -> None:
    with pytest.raises(UsageError, match=r"--omp-threads is `.*`, must be `auto`"):
        _cpus.check_omp_threads(value)
    command = [sys.executable, "-m", "elastic_rs.run", "--standalone", f"--omp-threads={value}", "--no-python", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--omp-threads is `" in done.stderr


def test_each_worker_gets_its_share() -> None:
    flags = ["--standalone", "--nproc-per-node=2", "--omp-threads=7", "--no-python"]
    command = [sys.executable, "-m", "elastic_rs.run", *flags, "sh", "-c", "printf $OMP_NUM_THREADS"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "77", "")


def test_pytorchs_launcher_is_not_given_what_it_does_not_know() -> None:
    flags = ["--standalone", "--omp-threads=2", "--event-log-handler=console", "--no-python"]
    command = [sys.executable, "-m", "elastic_rs.run", *flags, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--omp-threads and --event-log-handler cannot be combined" in done.stderr
    assert "set OMP_NUM_THREADS" in done.stderr
