"""``make gpu-check`` without a GPU. A rehearsal on the CPU runs the same code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.gpus import driver, environment

__all__ = ["driver"]  # a fixture

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "gpu_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import gpu_check

    return gpu_check


def test_without_a_gpu_it_says_so_and_leaves_the_page(check: Any, tmp_path: Path) -> None:
    if not check.why_no_gpu():
        pytest.skip("there is one")
    page = tmp_path / "gpu.md"
    page.write_text("as it was")
    result = subprocess.run(
        [sys.executable, TOOL, "--output", page], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 3
    assert result.stdout.startswith("gpu-check: there is no GPU to be checked: ")
    assert page.read_text() == "as it was"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_check_and_writes_no_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    flags = ["--device=cpu", "--repetitions=1", f"--model-bytes={64 << 20}", "--output", str(page)]
    result = subprocess.run([sys.executable, TOOL, *flags], capture_output=True, text=True, check=False, timeout=840)
    # Without a device, these times depend only on the machine's load, and are not checked.
    judged = [line for line in result.stdout.splitlines() if "memory is free" not in line]
    assert not [line for line in judged if "NOT OK" in line or "not carried out" in line], result.stdout
    assert result.returncode in {0, 1}, result.stderr
    assert "rehearsal, no GPU" in judged[0]
    for row in (
        "`--nproc-per-node=cpu`",
        "`elastic-run doctor`: GPUs",
        "Gloo all-reduce, 2 ranks, torchrun, rust-c10d: start to end",
        "Gloo all-reduce, 2 ranks, elastic-run: start to end",
        "Gloo all-reduce, 2 ranks, elastic-run, warm: start to end",
        "`--warm-start` of a module that has initialised the device",
        "Gloo group ended and made again in place, 2 ranks, 10 times",
        "Gloo job of 2 ranks, the last one sleeps",
        "next worker's first line, elastic-run",
        "next workers have context and model, elastic-run, warm",
    ):
        (line,) = [line for line in judged if line.startswith(f"| {row} |")]
        assert line.endswith("| yes |"), line
    assert "killed worker's memory is free, elastic-run" in result.stdout
    assert not page.exists()


def test_the_page_has_gpu_date_and_the_figures_of_both(check: Any) -> None:
    rows = [check.Row("restart", "5 ms", "4 ms", passed=True), check.Row("a | b", "-", "two\nlines", passed=False)]
    text = check.page(rows, ["2030-01-02, 1 x NVIDIA H100, driver 1.2"])
    assert text.startswith(check.INTRODUCTION)
    assert "- 2030-01-02, 1 x NVIDIA H100, driver 1.2\n" in text
    assert "| restart | 5 ms | 4 ms | yes |" in text
    assert r"| a \| b | - | two lines | **no** |" in text
    assert "not been run" not in text


def test_with_a_gpu_the_page_is_written(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    class Memory:
        def used(self, _: list[int]) -> int:
            return 0

        def driver(self) -> str:
            return "1.2.3"

    monkeypatch.setattr(check, "DeviceMemory", Memory)
    monkeypatch.setattr(check, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(check.Check, "rows", lambda it: iter([check.Row("ranks", "2", str(it.workers), passed=True)]))
    page = tmp_path / "gpu.md"
    assert check.main(["--output", str(page)]) == 0
    assert f"{page} is written" in capsys.readouterr().out
    text = page.read_text()
    assert "2 x NVIDIA H100, driver 1.2.3\n" in text
    assert f"- {time.strftime('%Y-', time.gmtime())}" in text
    assert f"torch {torch.__version__} " in text
    assert "| ranks | 2 | 2 | yes |" in text


def test_the_page_says_that_it_has_not_been_run_until_it_has(check: Any) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text == check.page([], []) or text.startswith(f"{check.INTRODUCTION}\n## Result\n")


def test_memory_and_driver_are_read_from_nvidias_library(driver: Path) -> None:
    code = "import gpu_jobs; memory = gpu_jobs.DeviceMemory(); print(memory.used([]) >> 20, memory.driver())"

    def counted(gpus: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **environment(driver, gpus), "PYTHONPATH": str(TOOL.parent)}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=120
        )

    assert counted("GPU-a,GPU-b,GPU-c").stdout == "6 1.2.3\n"
    assert "CheckError: NVIDIA's management library: nvmlInit_v2 returned 9" in counted("broken").stderr


def test_memory_that_is_freed_too_late_is_a_failed_check(check: Any) -> None:
    def passed(*given_back: float | None) -> bool:
        ours = [check.Restart(value, up=2.0, ready=3.0) for value in given_back]
        rows = list(check._restart_rows("elastic-run", [], ours))
        assert len(rows) == 3
        return bool(rows[0].passed)

    assert passed(1.0, 2.0)
    assert not passed(1.0, 2.5)
    assert not passed(1.0, None)
    (row,) = check._restart_rows("elastic-run", [], check.CheckError("why"))
    assert (row.passed, row.ours) == (False, "not carried out: why")


def test_groups_are_resized_in_place_with_each_nccl_that_torch_has(check: Any) -> None:
    today = {"gloo", "nccl", "nccl2", "nccl-legacy", "nccl-lazy"}
    assert check.resized_backends("cuda", today, goes_back=False) == [
        ("cpu:gloo,cuda:nccl", "NCCL (`nccl`, that is `nccl2`)"),
        ("cpu:gloo,cuda:nccl-legacy", "NCCL (`nccl-legacy`)"),
    ]
    assert check.resized_backends("cuda", today, goes_back=True)[0][1] == "NCCL (`nccl`, that is `nccl-legacy`)"
    assert check.resized_backends("cuda", {"gloo", "nccl"}, goes_back=False) == [("cpu:gloo,cuda:nccl", "NCCL")]
    assert check.resized_backends("cpu", today, goes_back=False) == [("gloo", "Gloo")]


def test_each_nccl_has_a_row(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "DeviceMemory", lambda: Mock(used=lambda _: 0))
    monkeypatch.setattr(check, "torchs_nccl", lambda: ({"nccl", "nccl-legacy"}, False))
    made = []

    class Job:
        def __init__(self, launcher: list[str], _folder: Path, workers: int, task: list[Any], port: int = 0) -> None:
            made.append((launcher, workers, task))
            assert bool(port) == (task[0] == "hang"), "a job of one node without a port is known to itself alone"
            raise check.CheckError("there is no GPU")

    monkeypatch.setattr(check, "Job", Job)
    monkeypatch.setattr(check.Check, "_count", lambda _: check.Row("devices", "2", "2", passed=True))
    monkeypatch.setattr(check.Check, "_doctor", lambda _: check.Row("doctor", "2", "2", passed=True))
    rows = [row.what for row in check.Check("cuda", 2, tmp_path, 1, 1 << 20).rows()]
    assert [row for row in rows if "in place" in row] == [
        "resizes in place, NCCL (`nccl`, that is `nccl2`)",
        "resizes in place, NCCL (`nccl-legacy`)",
    ]
    assert [task[3] for _, _, task in made if task[0] == "hang"] == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl-legacy"]
    resized = [(launcher, workers, task) for launcher, workers, task in made if task[0] == "resize"]
    assert [task[3] for _, _, task in resized] == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl-legacy"]
    assert all(workers == 2 and "--in-place=nccl" in launcher for launcher, workers, _ in resized)


def test_torch_says_which_nccl_it_has(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    names, goes_back = check.torchs_nccl()
    assert ("nccl-legacy" in names) == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15))
    assert not goes_back
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert check.torchs_nccl()[1]


def test_memory_that_resizes_keep_is_a_failed_check(check: Any) -> None:
    def passed(*used: int) -> bool:
        result = [("world", 0.0, used[0])]
        for number, mib in enumerate(used[1:], start=1):
            result += [("fails", 1.0 * number, 0), ("world", number + 0.25, mib)]
        row = check.resize_row([check.Event(what, at, 0, 1, str(mib << 20)) for what, at, mib in result], "NCCL")
        assert row.what == f"NCCL group ended and made again in place, 1 rank, {len(used) - 1} times"
        assert row.ours.startswith("250 ms (at most 250); memory after the last: ")
        return bool(row.passed)

    assert passed(100, 500, 530, 532)  # the first world makes what later ones use again
    assert not passed(100, 500, 517, 533)


def test_a_failed_check_sets_the_exit_code(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.Check, "rows", lambda _: iter([check.Row("counts", "1", "2", passed=False)]))
    assert check.main(["--device=cpu"]) == 1
    assert "gpu-check: NOT OK: counts: 2" in capsys.readouterr().out
    monkeypatch.setattr(check.Check, "rows", lambda _: iter([check.Row("counts", "1", "1", passed=True)]))
    assert check.main(["--device=cpu"]) == 0


def test_a_hang_must_be_named_with_its_rank_its_line_and_its_collective(check: Any) -> None:
    stands = "1 rank   3  n1  idle   clock_nanosleep               stand_still gpu_worker.py:9 < hang gpu_worker.py:7"
    waits = "3 ranks  0,2-3  n1  waits  all_reduce #11 of default_pg  hang gpu_worker.py:5"
    hang = {
        "ranks": [3],
        "still_s": 5.06,
        "lines": ["training stands still for 5 s", "  at stand_still gpu_worker.py:9"],
    }
    rank = {"view": {"groups": [{"last": 10}]}}

    def wrong(hang: Any, lines: list[str], rank: Any, workers: int = 4) -> str:
        row = check.hang_row("NCCL", workers, hang, {"lines": lines}, rank)
        return "" if row.passed else row.ours

    assert not wrong(hang, [stands, waits], rank)
    row = check.hang_row("NCCL", 4, hang, {"lines": [stands, waits]}, rank)
    assert row.ours.startswith("named after 5.1 s: 1 rank 3 n1 idle clock_nanosleep stand_still gpu_worker.py:9 ")
    assert "`status` does not say where rank 3 stands: no hang" in wrong(None, [stands, waits], rank)
    assert "`status` does not say" in wrong({**hang, "ranks": [0]}, [stands, waits], rank)
    assert "`stacks` does not say where rank 3 stands" in wrong(hang, [waits], rank)
    assert "does not name the collective" in wrong(hang, [stands, waits.replace(" #11", "")], rank)
    assert "does not name the collective" in wrong(hang, [stands], rank)
    assert "its recorder knows of [9]" in wrong(hang, [stands, waits], {"view": {"groups": [{"last": 9}]}})
    alone = stands.replace("rank   3", "rank   0")
    assert not wrong({**hang, "ranks": []}, [alone], rank, workers=1)
