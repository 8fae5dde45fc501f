"""``run`` in one process: with no launcher, and with an agent that the test plays."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_rs import elastic
from elastic_rs.elastic import _channel, _group
from elastic_rs.elastic._group import Group, Wraps
from elastic_rs.elastic._membership import MEMBERSHIP
from helpers.elastic import FakeChannel, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Attend = Callable[..., FakeChannel]
GONE = RuntimeError("[gloo] Connection closed by peer")


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


def test_without_a_launcher_there_is_a_group_of_one() -> None:
    @elastic.run
    def train(state: Any, add: int, *, times: int) -> int:
        assert dist.get_world_size() == 1
        model = DistributedDataParallel(state.model)
        model(torch.ones(1, 2)).sum().backward()
        state.epoch += add * times
        state.commit()
        state.check_host_updates()
        return int(state.epoch)

    state = elastic.TorchState(model=nn.Linear(2, 1), epoch=1)
    assert train(state, 2, times=3) == 7
    assert train(state, 2, times=3) == 13
    assert train.__name__ == "train"
    assert (elastic.rank(), elastic.size()) == (0, 1)


def test_without_an_agent_every_exception_is_raised_at_once() -> None:
    for error in (GONE, elastic.PeerFailed("x"), elastic.HostsUpdatedInterrupt("x"), ValueError("x")):
        state = Recorded()

        @elastic.run
        def train(_: elastic.State, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            train(state)
        assert raised.value is error
        assert "restore" not in state.calls


def test_a_group_that_the_script_has_made_is_used(attend: Attend) -> None:
    channel = attend(World(), World(generation=2))
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    first = dist.group.WORLD
    groups = []

    @elastic.run
    def train(_: elastic.State) -> None:
        groups.append(dist.group.WORLD)
        if len(groups) == 1:
            channel.failed = True
            raise GONE

    train(Recorded())
    assert groups[0] is first
    assert groups[1] is not first
    assert dist.get_backend() == "gloo"
    backend = groups[1]._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.options._timeout == limit
    assert channel.calls == ["guard loops", "release", "park", "mark", "guard"]


def test_a_failure_restores_the_last_commit(attend: Attend) -> None:
    channel = attend(World(), World(generation=2, variables={"GROUP_RANK": "3"}))
    seen = []

    @elastic.run
    def train(state: Any) -> str:
        seen.append((state.step, len(state.calls)))
        if len(seen) == 2:
            return "done"
        state.step = 1
        state.commit()
        state.step = 2
        channel.failed = True
        state.check_host_updates()
        raise AssertionError("a failure was known")

    state = Recorded(step=0)
    state.register_reset_callbacks([lambda: state.calls.append(f"callback on node {elastic.cross_rank()}")])
    assert train(state) == "done"
    assert [step for step, _ in seen] == [0, 1]
    # `on_reset` follows the new group and precedes the sync. A sync ends with a save.
    assert state.calls == ["sync", "save", "save", "restore", "reset", "callback on node 3", "sync", "save"]
    assert channel.parked == [1]  # sync is commit 0
    assert channel.checks == 0  # counted anew in each world
    assert os.environ["GROUP_RANK"] == "3"


def test_a_failure_that_is_known_before_a_commit_saves_nothing(attend: Attend) -> None:
    """A device's collectives may have ended without an error, over garbage."""
    channel = attend(World(), World())
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if len(steps) == 1:
            state.step = -1
            channel.failed = True
            state.commit()

    train(Recorded(step=0))
    assert steps == [0, 0]
    assert channel.parked == [0]


@pytest.mark.parametrize(("committed", "number"), [(True, 1), (False, 1)], ids=["commit", "check"])
def test_a_change_keeps_the_state(attend: Attend, committed: bool, number: int) -> None:
    """The number tells the coordinator that uncommitted changes are newer than the commit before them."""
    channel = attend(World(), World(sync=False))
    channel.changes_at = 1
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if len(steps) == 1:
            state.step = 5
            with pytest.raises(elastic.HostsUpdatedInterrupt, match="the test says so") as raised:
                state.commit() if committed else state.check_host_updates()
            assert raised.value.flags == elastic.HostUpdateResult.added
            raise raised.value

    state = Recorded(step=0)
    train(state)
    assert steps == [0, 5]
    assert channel.parked == [number]
    assert state.calls == ["sync", "save", *(["save"] if committed else []), "reset"]
    if not committed:
        state.restore()
        assert state.step == 0  # what was not committed can be lost to a later failure


def test_the_state_of_a_change_is_broadcast_as_it_is(attend: Attend) -> None:
    """Horovod broadcasts the committed attributes with the current weights."""
    channel = attend(World(), World(sync=True))
    channel.changes_at = 1
    epochs = []

    @elastic.run
    def train(state: Any) -> None:
        epochs.append(state.epoch)
        if len(epochs) == 1:
            state.epoch = 5
            state.check_host_updates()

    state = elastic.ObjectState(epoch=0)
    train(state)
    assert epochs == [0, 5]
    # It is newer than the commit 0 and the state 1 that was kept.
    assert state._commit == 2


def test_an_error_waits_for_the_news_of_a_failure(attend: Attend) -> None:
    """Horovod's PR 1849: the error of a collective may come before the news."""
    channel = attend(World(), World())
    calls = []

    def failed_within(limit_s: float) -> bool:
        channel.asked_s.append(limit_s)
        channel.failed = channel.failed or limit_s > 0  # the news come while it waits
        return channel.failed

    channel.failed_within = failed_within  # type: ignore[method-assign]

    @elastic.run
    def train(_: elastic.State) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise GONE

    train(Recorded())
    assert len(calls) == 2
    assert channel.asked_s == [5.0]


def test_an_error_without_a_failure_is_raised(attend: Attend) -> None:
    channel = attend()

    @elastic.run
    def train(_: elastic.State) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train(Recorded())
    assert channel.asked_s == [0.0]
    assert channel.parked == []


@pytest.mark.parametrize("phase", ["sync", "callback", "reset"])
def test_a_failure_while_a_world_is_formed_forms_the_next(attend: Attend, phase: str) -> None:
    """Horovod's 2995: a failure in ``sync``, and in ``reset`` or ``on_reset``, was fatal."""
    channel = attend(World(), World(generation=2), World(generation=3))
    calls = []

    class Failing(Recorded):
        def fail(self, where: str) -> None:
            if where == phase and len(channel.parked) == 1:
                channel.failed = True
                raise GONE

        def sync(self) -> None:
            self.fail("sync")
            super().sync()

        def reset(self) -> None:
            self.fail("reset")

    @elastic.run
    def train(state: Any) -> None:
        calls.append(state.step)
        if len(calls) == 1:
            state.step = 1
            state.commit()
            channel.failed = True
            raise GONE

    state = Failing(step=0)
    state.register_reset_callbacks([lambda: state.fail("callback")])
    train(state)
    assert calls == [0, 1]
    assert channel.parked == [1, 1]


def test_a_group_that_cannot_be_made_forms_the_next_world(attend: Attend, free_port: Callable[[], int]) -> None:
    """A peer may die while the group is made. The next one must have the name that newcomers give to their first."""

    def on_park(channel: FakeChannel) -> None:
        channel.failed = len(channel.parked) == 1

    nobody = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    somebody = {**nobody, "MASTER_PORT": str(store.port)}
    channel = attend(World(), World(variables=nobody), World(variables=somebody), on_park=on_park)
    calls = []

    @elastic.run(timeout=timedelta(seconds=1))
    def train(_: elastic.State) -> None:
        calls.append(None)
        if len(calls) == 1:
            channel.failed = True
            raise GONE

    train(Recorded())
    assert len(calls) == 2
    assert channel.calls == ["mark", "guard", "release", "park", "mark", "release", "park", "mark", "guard"]
    assert dist.distributed_c10d._world.pg_names[dist.group.WORLD] == "0"  # type: ignore[index]


def test_the_first_group_too_may_fail(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = attend(World(), World())
    make = Group.make

    def fail_once(group: Group) -> None:
        if not channel.parked:
            channel.failed = True
            raise GONE
        make(group)

    monkeypatch.setattr(Group, "make", fail_once)
    assert elastic.run(lambda _: dist.get_world_size())(Recorded()) == 1
    assert channel.parked == [None]


def test_gradients_of_an_interrupted_step_are_dropped(attend: Attend) -> None:
    """Also if the state is kept: the function begins anew, and would add to them."""
    channel = attend(World(), World(sync=False))
    channel.changes_at = 1
    gradients = []

    @elastic.run
    def train(state: Any) -> None:
        gradients.append(state.model.weight.grad)
        state.model(torch.ones(1, 2)).sum().backward()
        state.check_host_updates()

    train(elastic.TorchState(model=nn.Linear(2, 1)))
    assert gradients == [None, None]


def test_a_world_that_nobody_has_synced_is_synced(attend: Attend) -> None:
    """The first world failed before its sync. In the next no worker is new, and no commit differs: there is none."""
    channel = attend(World(), World(sync=False))

    class Failing(Recorded):
        def sync(self) -> None:
            if not channel.parked:
                channel.failed = True
                raise GONE
            super().sync()

    state = Failing(step=0)
    elastic.run(lambda _: None)(state)
    assert channel.parked == [None]
    assert state.calls == ["restore", "reset", "sync", "save"]


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

    def refuse(_path: str, _limit_s: float) -> _channel.Channel:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(_channel, "connect", refuse)
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
    assert channel.calls == ["mark", "guard"]
    assert elastic.is_initialized()
    elastic.shutdown()
    elastic.shutdown()
    assert not elastic.is_initialized()


def test_listeners_are_told_of_changes(attend: Attend) -> None:
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
    aborter = _group._Aborter(channel)
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
