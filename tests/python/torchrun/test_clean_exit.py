"""Clean runs end without errors from clients whose server has gone (pytorch #69520)."""

import pytest
from helpers.procs import Process

from .conftest import Start

pytestmark = [pytest.mark.torchrun, pytest.mark.cold]

# Words in the output of PyTorch's client when its server has gone. It prints about 20 lines of stack frames per agent.
TRACES = ("recv", "Broken pipe", "Connection reset", "Connection was likely closed", "Traceback", "WARNING", "ERROR")


def assert_clean(nodes: list[Process], world: int) -> None:
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    lines = [line for node in nodes for line in node.lines]
    assert sum(line.startswith("SUM") for line in lines) == world
    # All nodes of a test are on one machine.
    found = [line for line in lines if any(trace in line for trace in TRACES) and " is on loopback: " not in line]
    assert found == []


@pytest.mark.parametrize(
    ("agent", "nnodes", "nproc"),
    [
        ("rust", 2, 1),
        ("run", 1, 2),
        pytest.param("rust", 1, 2, marks=pytest.mark.long),
        pytest.param("torch", 2, 1, marks=pytest.mark.long),
        pytest.param("run", 2, 1, marks=pytest.mark.long),
        *(pytest.param(agent, 2, 2, marks=pytest.mark.long) for agent in ("rust", "run", "torch")),
        pytest.param("torch", 1, 2, marks=pytest.mark.long),
    ],
    indirect=["agent"],
)
def test_clean_runs_end_without_a_trace(start: Start, nnodes: int, nproc: int) -> None:
    nodes = [start(number, "--torch", nnodes=str(nnodes), nproc=nproc) for number in range(2, 2 + nnodes)]
    assert_clean(nodes, nnodes * nproc)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_clean_runs_in_a_row_end_without_a_trace(start: Start) -> None:
    for run in range(50):
        nnodes = 2 if run % 5 == 4 else 1  # ten of them
        nodes = [start(number, "--torch", nnodes=str(nnodes), nproc=2) for number in range(2, 2 + nnodes)]
        assert_clean(nodes, nnodes * 2)
