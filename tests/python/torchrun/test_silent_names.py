"""A name server that never answers delays no start, restart, end or report."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.names import NAME, silent_name_server

from .conftest import Start

# Not with PyTorch's agent: PyTorch's store client looks its peer's name up (docs/agent.md).
pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.parametrize("agent", ["rust", "run"], indirect=True),
]

# Fails in the first attempts. A wait for a look-up would exceed the test's limit.
SCRIPT = """
import os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"ATTEMPT {attempt}\\n".encode())  # one write for the whole line: workers share a pipe
sys.exit(attempt < int(sys.argv[1]))
"""


@pytest.fixture
def under(tmp_path: Path) -> Iterator[list[str]]:
    with silent_name_server(tmp_path) as under:
        yield under


def test_workers_start_and_end_though_no_name_server_answers(start: Start, tmp_path: Path, under: list[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    node = start(2, 1, nnodes="1", nproc=8, restarts=1, script=script, under=under)
    assert node.wait() == 0, node.tail()
    assert sum(line.endswith("ATTEMPT 1") for line in node.lines) == 8


def test_a_failure_is_reported_though_no_name_server_answers(start: Start, tmp_path: Path, under: list[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    node = start(2, 1, nnodes="1", nproc=2, restarts=0, script=script, under=under)
    assert node.wait() == 1, node.tail()
    # The result of `socket.getfqdn` without an answer.
    assert node.line(r"host +: (\S+)")[1] == NAME
