"""What the workers of a chaos test have recorded (``scripts/chaos_worker.py``), and what must hold for it.

trace = Trace(folder)
trace.update()
assert [*overlaps(trace), *losses(trace)] == []
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.procs import Process

RESTART = r"restarting all workers: (?P<reason>.*)"
FALSE_REASON = "cannot change in place|does not report what became|agent that does not change"
"""Each worker uses ``elastic_rs.elastic``, so none of these is ever the reason."""


@dataclass
class World:
    """What the workers of one world have recorded."""

    begins: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By worker: with what it has begun."""
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    commits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def began_ns(self) -> int:
        return min(int(begin["at_ns"]) for begin in self.begins.values())

    @property
    def first_step_done_ns(self) -> int | None:
        return min((int(steps[0]["at_ns"]) for steps in self.steps.values()), default=None)

    @property
    def last_step_began_ns(self) -> int | None:
        return max((int(steps[-1]["began_ns"]) for steps in self.steps.values()), default=None)


class Trace:
    """The records of all workers, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._sizes: dict[int, int] = {}
        self.records: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Read and return what is new."""
        new = []
        for path in self._folder.glob("trace.*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        self._sizes |= {record["world"]: record["size"] for record in new if record["kind"] == "world"}
        self.records += new
        return new

    def world_that_steps(self, since_ns: int, *, size: int | None = None) -> int | None:
        """Read what is new. Returns the world of a step in that, which began later, and of so many workers."""
        for record in self.update():
            if record["kind"] == "step" and record["began_ns"] > since_ns:
                world = int(record["world"])
                if size in {None, self._sizes[world]}:
                    return world
        return None

    def worlds(self) -> list[World]:
        worlds: dict[int, World] = {}
        for record in self.records:
            if record["kind"] == "world":
                worlds.setdefault(record["world"], World()).begins[record["worker"]] = record
        for record in self.records:
            if record["kind"] in {"step", "commit"}:
                world = worlds[record["world"]]
                of = world.steps if record["kind"] == "step" else world.commits
                of.setdefault(record["worker"], []).append(record)
        return sorted(worlds.values(), key=lambda world: world.began_ns)


def overlaps(trace: Trace) -> Iterator[str]:
    """Yield the pairs of worlds of which the older one began a step after the newer one had completed one."""
    worlds = trace.worlds()
    for index, newer in enumerate(worlds):
        if newer.first_step_done_ns is None:
            continue
        for older in worlds[:index]:
            if older.last_step_began_ns is not None and older.last_step_began_ns > newer.first_step_done_ns:
                late_s = (older.last_step_began_ns - newer.first_step_done_ns) / 1e9
                yield (
                    f"{_name(older, worlds)} began a step {late_s:.3f} s after {_name(newer, worlds)} had completed one"
                )


def losses(trace: Trace) -> Iterator[str]:
    """Yield what was lost between consecutive worlds."""
    worlds = trace.worlds()
    # With which checkpoint each process has begun.
    loaded = {it["worker"]: it["loaded"] for it in trace.records if it["kind"] == "process"}
    for before, last, world in zip([World(), *worlds], worlds, worlds[1:], strict=False):
        name = _name(world, worlds)
        starts = {(begin["length"], begin["digest"]) for begin in world.begins.values()}
        if len(starts) != 1:
            yield f"{name} begins with several states: {starts}"
            continue
        ((length, _),) = starts
        survivors = last.begins.keys() & world.begins.keys()
        if not survivors:
            if length not in {loaded[worker] for worker in world.begins}:
                yield f"{name} begins at {length}, and its workers have loaded {loaded}"
            continue
        # A state is kept as with a commit where a worker takes it. Where none is new it may go on as it is.
        is_kept = bool(last.begins.keys() - before.begins.keys())
        for worker in survivors:
            begin, commits = last.begins[worker], last.commits.get(worker)
            if not commits and is_kept and length < begin["length"]:
                yield f"{name} begins at {length}, and {worker} had begun at {begin['length']}"
            committed = commits[-1] if commits else begin["kept"]
            kept = world.begins[worker]["kept"]
            if (kept["length"], kept["digest"]) != (committed["length"], committed["digest"]):
                yield f"{name} begins at {length}, and {worker} had committed {committed['length']}"


def _name(world: World, worlds: list[World]) -> str:
    at_s = (world.began_ns - worlds[0].began_ns) / 1e9
    return f"world {worlds.index(world)} (of {', '.join(sorted(world.begins))}, {at_s:.3f} s after the first one)"


def reasons_of_restarts(processes: Iterable[Process]) -> Counter[str]:
    """Why all workers of a node were restarted, by reason; numbers and names of nodes are left out."""
    lines = [line for process in processes for line in process.lines]
    found = (re.search(RESTART, line) for line in lines)
    return Counter(re.sub(r"\d+(\.\d+)?", "N", match["reason"]) for match in found if match)


def check_results(folder: Path, count: int) -> None:
    """Check that so many workers have ended with one history, and with the parameters that follow from it."""
    results = [json.loads(path.read_text()) for path in folder.glob("result.*")]
    assert len(results) == count
    assert all(one == other for one, other in pairwise(results))
    weight = 1
    for value in results[0]["history"]:
        weight = (weight * 3 + value) % 65_521
    assert results[0]["weight"] == weight
