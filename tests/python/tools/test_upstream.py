"""PyTorch's own tests on our classes, and that their runner (``tests/upstream``) notices what it must notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "upstream" / "run.py"

# Paths of PyTorch's tests with other contents. `ours` is whether our store is in PyTorch's place.
MADE_UP = """
import multiprocessing, os, subprocess, threading, unittest
import pytest
import torch.distributed as dist

ours = dist.TCPStore.__module__.startswith("elastic_rs")

def in_child(queue):
    import torch.distributed
    queue.put(torch.distributed.TCPStore.__module__)

class MadeUpTest(unittest.TestCase):
    def test_a_passes(self):
        pass

    def test_b_fails_on_both(self):
        self.fail("on both")

    def test_c_fails_on_ours(self):
        self.assertFalse(ours, "the reason")

    @pytest.mark.timeout(2)
    def test_d_hangs_on_ours(self):
        if ours:
            threading.Event().wait()

    def test_e_crashes_on_ours(self):
        if ours:
            os.abort()

    def test_f_leaves_a_process(self):
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(os.environ["LEFT"], "a") as file:
            print(left.pid, file=file)

    def test_g_spawned_processes_have_what_this_one_has(self):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=in_child, args=(queue,))
        child.start()
        self.assertEqual(queue.get(), dist.TCPStore.__module__)
        child.join()

class EndlessTest(unittest.TestCase):
    def test_starts_a_process_and_hangs(self):
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(os.environ["LEFT"], "w") as file:
            print(os.getpid(), left.pid, file=file)
        threading.Event().wait()
"""


def start(*args: str, tests: Path | None = None, **env: str) -> subprocess.Popen[str]:
    where = [] if tests is None else ["--tests", str(tests)]
    command = [sys.executable, str(RUN), *where, *args]
    return subprocess.Popen(command, env=os.environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*args: str, tests: Path | None = None, limit_s: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
    process = start(*args, tests=tests, **env)
    try:
        said = process.communicate(timeout=limit_s)
    except BaseException:
        process.terminate()  # it ends what the tests have started
        process.communicate()
        raise
    return subprocess.CompletedProcess(args, process.returncode, *said)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Return a folder like PyTorch's, with one file of made-up tests."""
    (tmp_path / "test" / "distributed").mkdir(parents=True)
    (tmp_path / "test" / "distributed" / "test_store.py").write_text(MADE_UP)
    return tmp_path / "test"


def pytorchs_tests(name: str, *args: str, limit_s: float) -> None:
    if not os.environ.get("TORCH_TESTS"):
        pytest.skip("no tests of PyTorch: `make test` gets them (tools/find_tool.py)")
    if not os.environ.get("ETCD"):
        pytest.skip("no etcd: `make test` gets one (tools/find_tool.py), or ETCD=/path/to/etcd names one")
    result = run("--set", name, "--impl", "ours", *args, limit_s=limit_s)
    assert result.returncode == 0, result.stdout


def test_pytorchs_own_tests_pass_on_our_classes() -> None:
    pytorchs_tests("quick", "--timeout-scale", "0.4", limit_s=280)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_more_of_pytorchs_own_tests_pass_on_our_classes() -> None:
    pytorchs_tests("short", limit_s=1180)


def test_what_fails_hangs_or_crashes_on_ours_alone_is_named(made_up: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    args = ["--out", str(tmp_path / "out"), "test_store.py::MadeUpTest"]
    result = run(*args, tests=made_up, LEFT=str(left))
    assert result.returncode == 1, result.stderr
    outcomes: dict[str, dict[str, str]] = {"stock": {}, "ours": {}}
    for line in (tmp_path / "out").read_text().splitlines():
        row = json.loads(line)
        outcomes[row["impl"]][row["test"].partition("::test_")[2][0]] = row["outcome"]
    assert outcomes["stock"] == {**dict.fromkeys("acdefg", "pass"), "b": "fail"}
    assert outcomes["ours"] == {
        "a": "pass",
        "b": "fail",
        "c": "fail",
        "d": "timeout",
        "e": "crash",
        "f": "pass",
        "g": "pass",
    }
    said = result.stdout
    assert (
        "FAIL: test_store.py::MadeUpTest::test_c_fails_on_ours\n    AssertionError: True is not false : the reason"
        in said
    )
    assert "not counted, fail on stock too: test_store.py::MadeUpTest::test_b_fails_on_both" in said
    assert "3 of 6 tests that count have passed" in said
    pids = [int(pid) for pid in left.read_text().split()]
    assert len(pids) == 2
    assert all(map(is_gone, pids))


def test_a_run_that_is_ended_leaves_nothing(made_up: Path, tmp_path: Path) -> None:
    os.mkfifo(left := tmp_path / "left")
    process = start("--impl", "ours", "test_store.py::EndlessTest", tests=made_up, LEFT=str(left))
    try:
        pids = [int(pid) for pid in left.read_text().split()]  # waits until the test has opened it
        assert not any(map(is_gone, pids))
    finally:
        process.terminate()
        process.communicate()
    assert len(pids) == 2
    assert all(map(is_gone, pids))


@pytest.mark.parametrize(
    ("does", "left"),
    [
        ("pass", "torch.distributed.TCPStore, torch.distributed.rendezvous.TCPStore"),
        ("plain(agent=False)", "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"),
        ("plain(rendezvous=False)", "the handler of c10d, the handler of etcd"),
    ],
)
def test_an_install_that_replaces_too_little_passes_nothing(
    made_up: Path, tmp_path: Path, does: str, left: str
) -> None:
    import elastic_rs

    package = tmp_path / "other" / "elastic_rs"
    package.parent.mkdir()
    package.symlink_to(Path(elastic_rs.__file__).parent)
    (tmp_path / "other" / "sitecustomize.py").write_text(
        f"import elastic_rs\nplain = elastic_rs.install\ndef install():\n    {does}\nelastic_rs.install = install\n"
    )
    result = run(
        "--impl", "ours", "--path", str(package.parent), "test_store.py::MadeUpTest::test_a_passes", tests=made_up
    )
    assert result.returncode == 2
    assert "error: RuntimeError: install() has left PyTorch's own in place: " in result.stdout
    assert left in result.stdout


def test_tests_that_are_not_there_are_an_error(made_up: Path) -> None:
    result = run("--impl", "stock", "test_nothing.py", tests=made_up)
    assert result.returncode == 2
    assert "pytest did not begin with test_nothing.py" in result.stdout
