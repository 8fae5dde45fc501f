"""Real workers of `elastic_rs.elastic` over gloo, whose agent is the test."""

from __future__ import annotations

import json
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs

if TYPE_CHECKING:
    from helpers.channel import Agent, Worker
    from helpers.procs import Job, Process

WORKER = Path(__file__).parents[1] / "scripts" / "elastic_worker.py"


class World:
    """A world of processes by name, in the order of their ranks. It has a store of its own, as from their agents."""

    def __init__(self, generation: int, names: Sequence[str]) -> None:
        self.names = list(names)
        self.generation = generation
        self.store = _elastic_rs.StoreServer.listen("127.0.0.1", 0)

    def variables(self, name: str) -> dict[str, str]:
        rank, size = self.names.index(name), len(self.names)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_GENERATION": self.generation,
        }
        return {key: str(value) for key, value in variables.items()}


class Node:
    """The test as the agent of all processes."""

    def __init__(self, job: Job, agent: Agent) -> None:
        self.job = job
        self.agent = agent
        self.worlds: list[World] = []
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Worker] = {}
        self.changes = 0

    def plan(self, *names: str) -> World:
        self.worlds.append(World(len(self.worlds) + 1, names))
        return self.worlds[-1]

    def start(self, name: str, world: World, *options: str, script: Path = WORKER) -> Process:
        """Start a process whose first world this is."""
        env = {
            "ELASTIC_RS_AGENT": self.agent.address,
            "ELASTIC_RS_IN_PLACE": "gloo",
            "ELASTIC_RS_LOG": "info",
            **world.variables(name),
        }
        command = [sys.executable, str(script), "--name", name, *options]
        self.processes[name] = self.job.start(command, name=name, env=env)
        return self.processes[name]

    def enter(self, world: World, *, source: int = 0, sync: bool = True, names: Sequence[str] = ()) -> None:
        """Push the world to its workers: to those that are not connected yet, when they are."""

        def push(name: str) -> None:
            self.workers[name].world(world.generation, world.variables(name), source=source, sync=sync)

        missing = [name for name in names or world.names if name not in self.workers]
        for name in names or world.names:
            if name not in missing:
                push(name)
        while missing:
            worker = self.agent.accept()
            pid, _, _ = struct.unpack("3i", worker.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            (name,) = [name for name, process in self.processes.items() if process.pid == pid]
            self.workers[name] = worker
            missing.remove(name)
            push(name)

    def fail(self, *names: str) -> list[int | None]:
        """Tell these workers that another one has failed, and return with which commits they park."""
        for name in names:
            self.workers[name].fail("the test says so")
        return self.parked(*names)

    def change(self, *names: str, check: int) -> list[int | None]:
        """Let the world change at this check of all its workers, and return with which commits they park."""
        self.changes += 1
        for name in names:
            self.workers[name].change(self.changes, 3, "the test says so")
        for name in names:
            kind, number, count = self.workers[name].hear() or ("gone", 0, 0)  # type: ignore[misc]
            assert (kind, number) == ("ack", self.changes)
            assert count is not None
            assert count < check, "the change came too late for that check"
        for name in names:
            self.workers[name].raise_at(self.changes, check)
        return self.parked(*names)

    def parked(self, *names: str) -> list[int | None]:
        heard = [self.workers[name].hear() for name in names]
        assert [one and one[0] for one in heard] == ["parked"] * len(names)
        return [one and one[1] for one in heard]  # type: ignore[misc]

    def kill(self, name: str) -> None:
        """End a process, as an agent does with one that is not needed any more."""
        self.processes[name].signal(signal.SIGKILL)
        self.processes[name].wait()

    def end(self, *names: str) -> list[dict[str, Any]]:
        """Wait for processes that succeed, and return what they say at the end: all have the same state."""
        for name in names:
            assert self.processes[name].wait() == 0, self.processes[name].tail()
        ends = [one(self.processes[name], "END") for name in names]
        assert {last["state"] for last in ends} == {ends[0]["state"]}
        return ends

    def said(self, what: str, *names: str) -> list[dict[str, Any]]:
        return [one for name in names or self.processes for one in said(self.processes[name], what)]


def said(process: Process, what: str) -> list[dict[str, Any]]:
    """Return what the workers of the process have said by that word."""
    return [json.loads(line.partition(" ")[2]) for line in process.lines if line.startswith(f"{what} ")]


def one(process: Process, what: str) -> dict[str, Any]:
    (only,) = said(process, what)
    return only
