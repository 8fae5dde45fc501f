"""A channel whose agent is the test: for `elastic_rs.elastic` without an agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_rs import elastic

GONE = RuntimeError("[gloo] Connection closed by peer")


@dataclass
class World:
    """A world as the agent pushes it."""

    variables: Mapping[str, str] = field(default_factory=dict)
    generation: int = 1
    source: int = 0
    sync: bool = True
    reason: str = "test"


@dataclass
class FakeChannel:
    """Answers as the test says, and keeps what it was asked."""

    worlds: list[World]
    """The present world, and those that :meth:`park` brings one after the other."""
    changes_at: int | None = None
    """The check from which on the world changes. Counting begins anew in each world."""
    failed: bool = False
    """Whether a failure is known. :meth:`park` resets it."""
    on_park: Callable[[FakeChannel], None] = lambda _: None
    flags: int = 2
    reason: str = "the test says so"
    failed_rank: int | None = None
    checks: int = 0
    parked: list[int | None] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    limits_s: list[float | None] = field(default_factory=list)
    """The limits of steps towards a world, and None when it was formed or left."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    synchronised_in: list[int] = field(default_factory=list)
    """The generations of the worlds in which the worker had the job's state."""
    announced: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def until_quiet(self) -> None:
        self.calls.append("until_quiet")

    def no_process_group(self) -> None:
        self.calls.append("no_process_group")

    def forms_within(self, limit_s: float) -> None:
        self.limits_s.append(limit_s)

    def formed(self) -> None:
        self.limits_s.append(None)

    def synchronised(self) -> None:
        self.synchronised_in.append(self.worlds[0].generation)

    def stuck(self) -> None:
        self.calls.append("stuck")
        self.failed = True  # the agent tells all members

    def raised(self, error: str, message: str) -> None:
        self.calls.append(f"raised {error}: {message}")
        self.failed = True  # the agent sends it to all members

    def unfit(self, message: str) -> None:
        self.calls.append(f"unfit: {message}")

    def raises_at(self) -> tuple[int | None, int]:
        return self.changes_at, self.checks

    def check(self) -> int:
        self.checks += 1
        if self.failed:
            return 2
        return int(self.changes_at is not None and self.checks >= self.changes_at)

    def failed_within(self, limit_s: float) -> bool:
        self.asked_s.append(limit_s)
        return self.failed

    def park(self, commit: int | None) -> World:
        self.calls.append("park")
        self.parked.append(commit)
        self.failed, self.changes_at, self.checks = False, None, 0
        self.worlds.pop(0)
        self.on_park(self)
        return self.worlds[0]

    def world(self) -> World:
        return self.worlds[0]

    def mark_sockets(self) -> int:
        self.calls.append("mark")
        return len(self.calls)

    def guard_sockets(self, mark: int, store_port: int | None = None) -> int:
        assert self.calls[mark - 1] == "mark"
        del store_port
        self.calls.append("guard")
        return 0

    def guard_loops(self, store_port: int | None = None) -> int:
        del store_port
        self.calls.append("guard loops")
        return 0

    def release_sockets(self) -> None:
        self.calls.append("release")

    def wait_change(self) -> tuple[int, int]:
        self.announced.acquire()
        if not self.changes:
            raise ConnectionError("the agent has gone")
        return self.changes.pop(0)

    def announce(self, number: int, flags: int) -> None:
        self.changes.append((number, flags))
        self.announced.release()

    def close(self) -> None:
        self.announced.release()


class Recorded(elastic.ObjectState):
    """A state that writes down what is done to it."""

    def __init__(self, **values: Any) -> None:
        self.calls: list[str] = []
        super().__init__(**values)

    def save(self) -> None:
        self.calls.append("save")
        super().save()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def reset(self) -> None:
        self.calls.append("reset")
