"""Wait for what a training tells of its steps."""

from __future__ import annotations

import json
from typing import Any

from elastic_rs import _elastic_rs


def first_steps(port: int, round_: int, nodes: int = 1) -> list[dict[str, Any]]:
    """Wait for the first steps of so many nodes in a round, and return what they tell.

    Args:
        port: the coordinator's, on this machine.
        round_: number of the round.
        nodes: number of nodes.
    """
    observer = _elastic_rs.Observer.connect("127.0.0.1", port)
    found: list[dict[str, Any]] = []
    last = 0
    while len(found) < nodes:
        _, _, lines, last, _ = observer.ask(after=last, waits=True)
        events = map(json.loads, lines)
        found += [event["data"] for event in events if event["round"] == round_ and "first_step_us" in event["data"]]
    return found
