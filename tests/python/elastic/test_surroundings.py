"""What surrounds the user's function: process groups, wraps, frames, hooks, threads, and the connection."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from elastic_rs import elastic
from elastic_rs.elastic import _group, _membership
from elastic_rs.elastic._group import Wraps
from elastic_rs.elastic._membership import MEMBERSHIP
from helpers.elastic import GONE, FakeChannel, Recorded, World
from torch import nn
from torch.distributed import ProcessGroupGloo, new_group
from torch.nn.parallel import DistributedDataParallel

Attend = Callable[..., FakeChannel]


def test_a_wrap_that_is_still_alive_does_no_harm(attend: Attend) -> None:
    """PyTorch's 21344: the hooks of an old wrap run in the backward pass of the module."""
    channel = attend(World(), World())
    wraps = []
    model = nn.Linear(2, 1, bias=False)

    @elastic.run
    def train(state: Any) -> None:
        wraps.append(DistributedDataParallel(state.model))  # they never die
        loss = wraps[-1](torch.ones(1, 2)).sum()
        if len(wraps) == 1:
            channel.failed = True
            raise GONE
        loss.backward()

    train(elastic.TorchState(model=model))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_only_wraps_made_inside_are_touched() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outside = DistributedDataParallel(nn.Linear(1, 1))
    wraps = Wraps()
    with wraps.noted():
        inside = DistributedDataParallel(nn.Linear(1, 1))
        nn.Sequential(nn.Linear(1, 1))
    DistributedDataParallel(nn.Linear(1, 1))
    assert list(wraps._made) == [inside]
    wraps.release()
    outside(torch.ones(1, 1)).sum().backward()


def test_what_the_function_held_is_gone_before_the_next_world(attend: Attend) -> None:
    class Held:
        pass

    seen: list[weakref.ref[Held]] = []
    alive = []

    def on_park(_: FakeChannel) -> None:
        alive.append(seen[0]() is not None)

    channel = attend(World(), World(), on_park=on_park)

    @elastic.run
    def train(_: elastic.State) -> None:
        held = Held()
        if not seen:
            seen.append(weakref.ref(held))
            channel.failed = True
            try:
                raise GONE
            except RuntimeError as error:
                raise RuntimeError("a framework's") from error

    gc.disable()  # not even cycles are left
    try:
        train(Recorded())
    finally:
        gc.enable()
    assert alive == [False]


def test_hooks_of_groups_do_not_pile_up(attend: Attend) -> None:
    """Each group wraps ``sys.excepthook`` to print its rank."""
    channel = attend(*[World(generation=number) for number in range(6)])
    original = sys.excepthook
    hooks = []

    @elastic.run
    def train(_: elastic.State) -> None:
        hooks.append(sys.excepthook)
        if len(channel.worlds) > 1:
            channel.failed = True
            raise GONE

    try:
        train(Recorded())
        assert len(hooks) == 6
        for hook in hooks:
            cells = {cell.cell_contents for cell in hook.__closure__ or ()}
            assert original in cells
    finally:
        sys.excepthook = original


def test_an_agent_that_does_not_answer_is_no_reason_to_stop(
    attend: Attend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend()

    def refuse(_path: str, _limit_s: float) -> FakeChannel:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(_membership, "WorkerChannel", Mock(connect=refuse))
    with caplog.at_level(logging.WARNING, "elastic_rs"):
        assert elastic.run(lambda _: "done")(Recorded()) == "done"
    assert "will be restarted when the world changes: no connection to its agent: nobody listens" in caplog.text


def test_a_lost_connection_to_the_agent_does_not_end_the_training(
    attend: Attend, caplog: pytest.LogCaptureFixture
) -> None:
    channel = attend()

    def lost(*_: object) -> int:
        raise ConnectionError("the connection has ended")

    @elastic.run
    def train(state: Any) -> str:
        state.commit()
        channel.check = channel.failed_within = lost  # type: ignore[method-assign,assignment]
        for _ in range(2):
            state.commit()
            state.check_host_updates()
        return "done"

    with caplog.at_level(logging.WARNING, "elastic_rs"):
        assert train(Recorded()) == "done"
    assert caplog.text.count("the connection has ended") == 1


def test_init_makes_the_group_once(attend: Attend) -> None:
    channel = attend()
    elastic.init("gloo", timeout=timedelta(seconds=5))
    group = dist.group.WORLD
    elastic.init()
    assert elastic.run(lambda _: dist.group.WORLD)(Recorded()) is group
    assert channel.calls == ["no_process_group", "mark", "guard"]
    assert elastic.is_initialized()
    elastic.shutdown()
    elastic.shutdown()
    assert not elastic.is_initialized()


def test_groups_of_the_script_are_guarded_while_a_function_runs(attend: Attend) -> None:
    channel = attend(World(), World())
    maker = vars(ProcessGroupGloo)["__init__"]

    def calls_of(make: Callable[[], object]) -> list[str]:
        before = len(channel.calls)
        make()
        return channel.calls[before:]

    @elastic.run
    def train(_: elastic.State) -> None:
        assert calls_of(lambda: new_group([0])) == ["mark", "guard"], "by a function that was imported before"
        before = len(channel.calls)
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            ProcessGroupGloo()  # type: ignore[call-arg, unused-ignore]
        assert channel.calls[before:] == ["mark", "guard"], "it could not be made, and is not being made"
        if len(channel.worlds) > 1:
            channel.failed = True
            raise GONE

    train(Recorded())
    assert vars(ProcessGroupGloo)["__init__"] is maker
    assert calls_of(lambda: new_group([0])) == []
    # The next function gets to know the group that was made meanwhile.
    assert calls_of(lambda: elastic.run(lambda _: None)(Recorded())) == ["guard loops"]


def test_listeners_are_notified_of_changes(attend: Attend) -> None:
    channel = attend()
    heard: list[tuple[int, elastic.HostUpdateResult]] = []
    called = threading.Semaphore(0)

    class Broken:
        def on_hosts_updated(self, timestamp: int, update_res: elastic.HostUpdateResult) -> None:
            raise ValueError(timestamp, update_res)

    class Hearing:
        def on_hosts_updated(self, timestamp: int, update_res: elastic.HostUpdateResult) -> None:
            heard.append((timestamp, update_res))
            called.release()

    listener = Hearing()
    elastic.register_listener(Broken())
    elastic.register_listener(listener)
    elastic.init("gloo")
    thread = MEMBERSHIP.listeners._thread
    assert thread is not None
    try:
        for number, flags in ((1, 2), (2, 1)):
            channel.announce(number, flags)
            assert called.acquire(timeout=30)
        assert heard == [(1, elastic.HostUpdateResult.added), (2, elastic.HostUpdateResult.removed)]
        elastic.remove_listener(listener)
        channel.announce(3, 1)
    finally:
        channel.close()
        thread.join(30)
    assert not thread.is_alive()
    assert len(heard) == 2


def test_groups_of_nccl_are_aborted_while_the_main_thread_waits(
    attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU only the thread is tested: it aborts once for each failure, and only a group that is there."""
    channel = attend()
    aborted = threading.Semaphore(0)
    news = threading.Event()
    monkeypatch.setattr(_group, "_abort", aborted.release)
    monkeypatch.setattr(channel, "failed_within", news.wait)
    aborter = _group._Aborter(channel)  # type: ignore[arg-type]
    try:
        for _ in range(2):
            aborter.arm()
            assert not aborted.acquire(blocking=False)
            news.set()
            assert aborted.acquire(timeout=30)
            # The main thread has been freed. It makes sure that there is no group left, and then the next world comes.
            aborter.disarm(abort=True)
            assert aborted.acquire(blocking=False)
            news.clear()
        aborter.arm()
        aborter.disarm(abort=False)  # the world changes without a failure: the group is destroyed as usual
        news.set()
    finally:
        aborter._stop()
    assert not aborter._thread.is_alive()
    assert not aborted.acquire(blocking=False)
