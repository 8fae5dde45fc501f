"""Process groups that a program makes: when a worker hangs, no other waits for it in them, nor while they are made."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.elastic_node import Node, one

SCRIPT = Path(__file__).parents[1] / "scripts" / "elastic_groups.py"


@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param(["new_group", "mesh", "split", "threads"], id="in a collective"),
        pytest.param(["new_group-making", "split-making", "thread-making"], id="while a group is made"),
    ],
)
def test_nobody_waits_for_a_worker_that_hangs(node: Node, worlds: list[str]) -> None:
    """In each world the highest rank hangs, and the others go on in the next one, in the same processes."""
    names = [chr(ord("A") + number) for number in range(len(worlds) + 1)]
    world = node.plan(*names)
    for name in names:
        node.start(name, world, *worlds, script=SCRIPT)
    node.enter(world)
    for number, how in enumerate(worlds, 1):
        hung = names.pop()
        node.processes[hung].line("STOPPED")
        for name in names:
            node.processes[name].line(f'{"MAKES" if how.endswith("making") else "MADE"} .*"world": {number}')
        node.fail(*names)
        node.kill(hung)
        node.enter(node.plan(*names))
    (last,) = names
    assert node.processes[last].wait() == 0, node.processes[last].tail()
    assert one(node.processes[last], "END")["pid"] == node.processes[last].pid
