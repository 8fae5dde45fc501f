"""Logs of several nodes in one folder, and what consoles show of a whole job."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.procs import Process

from .conftest import SCRIPTS, Start

pytestmark = [pytest.mark.torchrun]

# Each line in one write: `print` makes two of it where Python does not buffer.
PRINTS = (
    "import os, sys; rank = os.environ['RANK']; "
    "sys.stdout.write(f'out of {rank}\\n'); sys.stderr.write(f'err of {rank}\\n')\n"
)
STEPS = SCRIPTS / "steps.py"


@pytest.fixture
def prints(tmp_path: Path) -> Path:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    return script


def shown(*nodes: Process) -> list[list[str]]:
    """Return what workers have printed on each node's console."""
    return [sorted(line for line in node.lines if re.match(r"(\[\w+\]:)?(out|err) of", line)) for node in nodes]


@pytest.mark.parametrize("agent", ["run", "rust"], indirect=True)
def test_nodes_share_a_log_folder_and_a_global_rank_is_found_by_its_name(
    start: Start, prints: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    options = [f"--log-dir={logs}", "--redirects=3"]
    nodes = [start(number, nnodes="2", nproc=2, script=prints, options=options) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    folders = list(logs.iterdir())
    assert len(folders) == 2
    random = len("_12345678")  # `_` is among the characters of `mkdtemp`
    assert {folder.name[:-random] for folder in folders} == {f"job_{os.uname().nodename}"}
    for rank in range(4):
        (found,) = logs.glob(f"*/rank_{rank}.attempt_0")
        assert (found / "stdout.log").read_text() == f"out of {rank}\n"
        assert found.readlink() == Path("attempt_0", str(rank % 2))
    assert len(list(logs.glob("*/attempt_*/*/stdout.log"))) == 4, "torchrun's layout has each file once"


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["err of 0", "out of 0"]),
        (["--tee=3"], ["[default0]:err of 0", "[default0]:out of 0"]),
        (["--log-dir=/dev/null"], ["err of 0", "out of 0"]),
        (["--local-ranks-filter=1"], []),
    ],
    ids=["console", "tee", "no files", "local rank too"],
)
def test_one_flag_on_all_nodes_leaves_the_output_of_rank_0(
    start: Start, prints: Path, options: list[str], expected: list[str]
) -> None:
    options = ["--ranks-filter=0", *options]
    nodes = [start(number, nnodes="2", nproc=2, script=prints, options=options) for number in (2, 3)]
    assert [node.wait() for node in nodes] == [0, 0]
    assert sorted(shown(*nodes)) == [[], expected] if expected else [[], []]


@pytest.mark.parametrize("agent", ["run"], indirect=True)
@pytest.mark.parametrize("options", [[], ["--tee=3"]], ids=["console", "tee"])
def test_the_console_follows_rank_0_to_a_survivor(start: Start, tmp_path: Path, options: list[str]) -> None:
    done, logs = tmp_path / "done", tmp_path / "logs"
    options = ["--ranks-filter=0", f"--log-dir={logs}", *options]
    conf = "last_call_timeout=30,settle_timeout=0.2"
    arguments = {"nnodes": "1:2", "script": STEPS, "options": options, "conf": conf}
    other = start(3, "--until", done, **arguments)
    other.line("hosts the coordinator")  # it stays
    first = start(2, "--until", done, **arguments)
    begin = other.line(r"node rank 1 of 2 .* pids (\d+)")
    first.line(r"WORLD rank=0 world=2 ")
    first.line(r"STEP 20 ")
    assert not any("WORLD" in line or "STEP" in line for line in other.lines)
    first.signal(signal.SIGKILL)
    first.wait()
    after = other.line(r"WORLD rank=0 world=1 .*pid=(\d+)")
    assert after[1] == begin[1], "the worker that lives on"
    done.touch()
    assert other.wait() == 0
    if options[2:]:
        (folder,) = (path for path in logs.iterdir() if (path / "rank_0.attempt_1").exists())
        assert (folder / "rank_0.attempt_1").readlink() == Path("attempt_0", "0"), "it goes on with its log"
