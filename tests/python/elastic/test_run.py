"""``run`` in one process: with no launcher, and with an agent that the test plays."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from elastic_rs import elastic
from elastic_rs.elastic import _group, _membership, _wire
from elastic_rs.elastic._decisions import MOST_ROLL_BACKS
from elastic_rs.elastic._group import Group
from elastic_rs.elastic._membership import MEMBERSHIP
from helpers.elastic import GONE, FakeChannel, Recorded, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Attend = Callable[..., FakeChannel]
# The store may have to be waited for, and then gloo connects.
GROUP_MADE = ["mark", "mark", "guard", "guard"]


def world_at(port: int, *, size: int = 1) -> World:
    """Return the world of rank 0 whose workers meet in an agent's store at this port."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return World(variables=variables)


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


def test_without_an_agent_every_other_exception_is_raised_at_once() -> None:
    for error in (GONE, ValueError("x")):
        state = Recorded()

        @elastic.run
        def train(_: elastic.State, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            train(state)
        assert raised.value is error
        assert "restore" not in state.calls


def test_without_a_launcher_a_script_may_roll_back_on_nan() -> None:
    seen: list[tuple[int, int]] = []

    @elastic.run
    def train(state: Any) -> str:
        seen.append((state.step, dist.get_world_size()))
        if len(seen) == 3:
            return "done"
        state.step = 5
        if len(seen) == 1:
            raise elastic.HorovodInternalError("nan")
        raise elastic.HostsUpdatedInterrupt(skip_sync=True)

    state = Recorded(step=2)
    assert train(state) == "done"
    assert seen == [(2, 1), (2, 1), (5, 1)]
    assert state.calls == ["sync", "save", "restore", "reset", "reset"]


def roll_back(monkeypatch: pytest.MonkeyPatch, backends: str | None = None) -> str:
    """Roll back in a worker of another launcher's, whose process group may seem to have other backends.

    Returns:
        what elastic_rs adds to the exception.
    """
    for name, value in world_at(0).variables.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if backends is not None:
        monkeypatch.setattr(dist, "get_backend_config", lambda: backends)

    @elastic.run
    def train(_: elastic.State) -> None:
        raise elastic.HorovodInternalError("nan")

    with pytest.raises(elastic.PeerFailed, match="nan") as raised:
        train(Recorded())
    return raised.value.__notes__[0]


def test_under_pytorchs_agent_a_roll_back_fails_and_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    note = roll_back(monkeypatch)
    assert "no agent can give it another world" in note
    assert "--rdzv-backend=rust-c10d" in note


def test_on_gpus_a_roll_back_fails_and_names_the_setting(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    attend()
    note = roll_back(monkeypatch, backends="cpu:gloo,cuda:nccl")
    assert "process groups of backend nccl are not resized in place" in note
    assert "`--rdzv-conf in_place=nccl` allows it" in note
    assert "Start it with" not in note


@pytest.mark.parametrize(
    ("rank", "restarts", "backends", "says"),
    [
        ("0", "0", "cpu:gloo,cuda:nccl", True),
        ("0", "0", "nccl-legacy", True),
        ("1", "0", "cpu:gloo,cuda:nccl", False),
        ("0", "3", "cpu:gloo,cuda:nccl", False),
        ("0", "0", "gloo", False),
    ],
)
def test_rank_0_says_once_before_the_first_step_that_workers_with_nccl_are_restarted(  # noqa: PLR0917 - fixtures
    attend: Attend,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rank: str,
    restarts: str,
    backends: str,
    says: bool,
) -> None:
    attend()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    reported: list[bool] = []
    monkeypatch.setattr(_membership, "step", Mock(_restarts_for_nccl=reported.append))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    said = []

    @elastic.run
    def train(_: elastic.State) -> None:
        said.append(capfd.readouterr().err)

    train(Recorded())
    train(Recorded())
    text = (
        "elastic_rs: workers of this job are restarted, not kept, when the world changes: their process group uses "
        "NCCL, and `in_place` is gloo. `elastic-run --in-place=nccl` (torchrun: `--rdzv-conf in_place=nccl`) tries to "
        "keep them, which was run on one GPU, and never on several (docs/gpu.md)\n"
    )
    assert said == [text if says else "", ""]
    assert reported == [backends != "gloo"]


def test_a_script_that_rolls_back_on_nan_goes_on_from_the_last_commit(attend: Attend) -> None:
    channel = attend(World(variables={"WORLD_SIZE": "1"}), World(generation=2))
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if len(steps) == 1:
            state.step = 1
            state.commit()
            state.step = 2
            raise elastic.HorovodInternalError("loss is nan")

    state = Recorded(step=0)
    train(state)
    assert steps == [0, 1]
    assert channel.calls.count("raised HorovodInternalError: loss is nan") == 1
    assert channel.parked == [1]
    assert max(channel.asked_s) < 1, "nobody has failed, so no news are waited for"


def test_a_script_that_always_meets_the_same_nan_ends_with_one_error(attend: Attend) -> None:
    channel = attend(*(World(variables={"WORLD_SIZE": "1"}, generation=number) for number in range(1, 40)))
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if state.step == 0:
            if len(steps) < MOST_ROLL_BACKS:
                raise elastic.HorovodInternalError("a nan that goes away")
            state.step = 1
            state.commit()
        raise elastic.HorovodInternalError("loss is nan")

    with pytest.raises(RuntimeError, match=f"to the same commit {MOST_ROLL_BACKS} times before.*skip the") as caught:
        train(Recorded(step=0))
    assert str(caught.value.__cause__) == "loss is nan"
    assert not isinstance(caught.value, elastic.PeerFailed)
    assert steps == [0] * MOST_ROLL_BACKS + [1] * MOST_ROLL_BACKS, "a commit begins the count anew"
    assert sum("raised" in call for call in channel.calls) == len(steps) - 1, "the last one asks for nothing"


def test_failures_of_others_do_not_end_a_script_that_has_raised_nothing(attend: Attend) -> None:
    many = 3 * MOST_ROLL_BACKS
    channel = attend(*(World(generation=number) for number in range(1, many + 2)))
    calls = 0

    @elastic.run
    def train(state: elastic.State) -> None:
        nonlocal calls
        calls += 1
        if calls <= many:
            channel.failed = True
            state.check_host_updates()

    train(Recorded())
    assert calls == many + 1


def test_a_script_that_asks_for_a_new_world_keeps_its_state(attend: Attend) -> None:
    """All ranks may do so after different steps, so one of them is the source."""
    channel = attend(World(), World(generation=2))
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if len(steps) == 1:
            state.step = 1
            state.commit()
            state.step = 2
            raise elastic.HostsUpdatedInterrupt(skip_sync=False)

    train(Recorded(step=0))
    assert steps == [0, 2]
    assert "raised HostsUpdatedInterrupt: " in channel.calls
    assert channel.parked == [3]  # above the commit that others may have made meanwhile


def test_horovods_interrupt_takes_skip_sync() -> None:
    removed = elastic.HostUpdateResult.removed
    for interrupt, skips in (
        (elastic.HostsUpdatedInterrupt(), False),
        (elastic.HostsUpdatedInterrupt(True), True),
        (elastic.HostsUpdatedInterrupt(skip_sync=True), True),
        (elastic.HostsUpdatedInterrupt("why", removed), True),
        (elastic.HostsUpdatedInterrupt("why", removed, skip_sync=False), False),
    ):
        assert interrupt.skip_sync is skips
    assert str(elastic.HostsUpdatedInterrupt(True)) == ""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"func": 7}, "decorates a function whose first argument is the state, and was given a int"),
        ({"func": lambda: None}, "whose first argument is the state, and `.*lambda.*` takes none"),
        (
            {"backend": 7},
            "backend is a int, must be the name of a backend of torch.distributed, such as 'gloo', or None",
        ),
        ({"timeout": "7"}, "timeout is `'7'`, must be a timedelta, or a number of seconds"),
    ],
)
def test_what_run_cannot_take_is_refused_before_anything_starts(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        elastic.run(**given)
    if "func" not in given:
        with pytest.raises(TypeError, match=says):
            elastic.init(**given)
    assert not elastic.is_initialized()


def test_run_takes_callables_of_other_kinds() -> None:
    class Calls:
        def __call__(self, state: elastic.State, more: int = 1) -> int:
            del state
            return more

    assert elastic.run(Calls())(Recorded()) == 1
    assert elastic.run(backend="gloo")(Calls())(Recorded(), 2) == 2
    assert elastic.run(lambda *states: len(states))(Recorded()) == 1


def test_what_is_no_state_is_refused_in_one_sentence() -> None:
    class Trainer:
        @elastic.run  # type: ignore[type-var] # the mistake
        def train(self, state: elastic.State) -> None:
            del state

        def step(self, state: Any) -> int:
            return int(state.epoch)

    class Forgetful(elastic.State):
        def __init__(self) -> None:
            self.epoch = 0

    @elastic.run
    def train(_: elastic.State) -> None:
        raise AssertionError

    state = elastic.ObjectState(epoch=3)
    with pytest.raises(
        TypeError, match=r"Trainer\.train` is a .*Trainer, must be an elastic\.State, so decorate a function"
    ):
        Trainer().train(state)
    with pytest.raises(TypeError, match=r"train` is a dict, must be an elastic\.State, such as elastic\.TorchState"):
        train({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"__init__ of .*Forgetful` has not called super\(\)\.__init__\(\)"):
        train(Forgetful())
    with pytest.raises(TypeError, match="decorates a function whose first argument is the state"):
        elastic.run(3)  # type: ignore[call-overload]
    assert elastic.run(Trainer().step)(state) == 3
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_a_worker_that_begins_with_another_function_gets_an_error_with_both(attend: Attend) -> None:
    """It was started while the others run a later one."""
    channel = attend(World())

    def broadcast(value: Any, root_rank: int = 0) -> Any:
        del root_rank
        return value if not isinstance(value, tuple) else (value[0], ("finetune", ["head"]))

    @elastic.run
    def train(_: elastic.State) -> None:
        raise AssertionError("it has another function's state")

    with pytest.raises(
        ValueError, match=r"rank 0 runs `finetune` with a state of head; this worker runs `test_a_worker.*"
    ):
        train(elastic.ObjectState(bcast_object=broadcast, epoch=0))
    assert [call for call in channel.calls if call.startswith("unfit: rank 0 runs `finetune`")]


def test_unequal_numbers_of_checks_are_an_error_with_both(attend: Attend) -> None:
    """Only rank 0 commits. It leaves the world at its check, and the others' collectives end with an error."""
    attend(World(), changes_at=177)

    @elastic.run
    def train(_: elastic.State) -> None:
        raise GONE

    with pytest.raises(
        RuntimeError, match="at their check 177, this rank has made 0: all ranks must call commit"
    ) as it:
        train(Recorded())
    assert it.value.__cause__ is GONE


def test_a_workers_own_exception_stays_where_checks_are_unequal(attend: Attend) -> None:
    attend(World(), changes_at=177)

    @elastic.run
    def train(_: elastic.State) -> None:
        raise FileNotFoundError("data.bin")

    with pytest.raises(FileNotFoundError, match=r"data\.bin") as it:
        train(Recorded())
    [note] = it.value.__notes__
    assert "at their check 177, this rank has made 0" in note


class Ported(elastic.State):
    """A class that was written for Horovod, and knows nothing of this package's private names."""

    def __init__(self) -> None:
        super().__init__()
        self._names = self._commit = self._count = self._ahead = self._kept = "theirs"
        self._just_saved = self._restored = self._synced = self._broadcast = "theirs"
        self.saves = 0

    def save(self) -> None:
        self.saves += 1

    def restore(self) -> None:
        pass

    def sync(self) -> None:
        self.save()


def test_a_class_of_the_user_may_have_private_attributes(attend: Attend) -> None:
    attend(World(), World(generation=2))
    state, commits = Ported(), []

    @elastic.run
    def train(state: Ported) -> None:
        commits.append(state.saves)
        state.commit()
        if len(commits) == 1:
            raise elastic.HorovodInternalError("nan")

    train(state)
    assert len(commits) == 2
    assert {value for name, value in vars(state).items() if name in {"_names", "_commit", "_broadcast"}} == {"theirs"}


def test_a_worker_that_was_started_ahead_and_finds_no_agent_ends_at_once(
    attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend()

    def connect(path: str, limit_s: float) -> FakeChannel:
        raise ConnectionError(f"cannot connect to the agent at `{path}` after {limit_s:g} s")

    monkeypatch.setattr(_membership, "WorkerChannel", Mock(connect=connect))
    monkeypatch.setenv("ELASTIC_RS_AHEAD", "1")
    # Of the last world, where nobody answers.
    for name, value in world_at(1, size=2).variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="started ahead and has no rank yet; only its agent can give it one"):
        elastic.run(lambda _: None)(Recorded())


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
    assert channel.calls == ["guard loops", "until_quiet", "release", "park", *GROUP_MADE]


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


def test_a_world_whose_members_do_not_meet_is_left_by_all(attend: Attend) -> None:
    """One of them hangs, and collectives of the others time out. Nobody has failed."""
    channel = attend(World(), World(generation=2), World(generation=3))
    generations = []

    class State(Recorded):
        def sync(self) -> None:
            if channel.worlds[0].generation == 2:
                raise RuntimeError("[gloo] Timed out waiting 1800000ms for recv operation to complete")
            super().sync()

    @elastic.run
    def train(state: Any) -> None:
        generations.append(channel.worlds[0].generation)
        if len(generations) == 1:
            state.step = 1
            state.commit()
            state.step = 2
            channel.failed = True
            state.check_host_updates()
        assert state.step == 1

    train(State(step=0))
    assert generations == [1, 3]
    assert channel.calls.count("stuck") == 1
    assert channel.parked == [1, 1]


def test_a_step_towards_a_world_has_a_limit_until_the_function_is_called(attend: Attend) -> None:
    channel = attend(World())

    @elastic.run
    def train(state: Any) -> None:
        assert channel.limits_s[-1] is None
        state.sync()  # of the function's own: no world is being formed
        assert channel.limits_s[-1] is None

    large = nn.Linear(1500, 1500, bias=False)  # above what small tensors share
    train(elastic.TorchState(model=large, epoch=1))
    code, part = 300.0, 30.0
    # The description of the state, the parameters, and what is done afterwards.
    assert channel.limits_s == [code, part, part, code, None]


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
    assert state._elastic_commit == 2


def test_an_error_waits_for_the_news_of_a_failure(attend: Attend) -> None:
    """Horovod's PR 1849: the error of a collective may come before the news."""
    channel = attend(World(), World())
    calls: list[Any] = []

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
    assert [limit_s for limit_s in channel.asked_s if limit_s > 0] == [5.0]


def test_an_error_without_a_failure_is_raised(attend: Attend) -> None:
    channel = attend()

    @elastic.run
    def train(_: elastic.State) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train(Recorded())
    assert set(channel.asked_s) == {0.0}
    assert channel.parked == []


@pytest.mark.parametrize("phase", ["sync", "callback", "reset"])
def test_a_failure_while_a_world_is_formed_forms_the_next(attend: Attend, phase: str) -> None:
    """Horovod's 2995: a failure in ``sync``, and in ``reset`` or ``on_reset``, was fatal."""
    channel = attend(World(), World(generation=2), World(generation=3))
    calls: list[Any] = []

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

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    channel = attend(World(), world_at(free_port()), world_at(store.port), on_park=on_park)
    calls: list[Any] = []

    @elastic.run(timeout=timedelta(seconds=1))
    def train(_: elastic.State) -> None:
        calls.append(None)
        if len(calls) == 1:
            channel.failed = True
            raise GONE

    train(Recorded())
    assert len(calls) == 2
    later = ["until_quiet", "release", "park", "mark", "guard", "until_quiet", "release", "park", *GROUP_MADE]
    assert channel.calls == ["no_process_group", *GROUP_MADE, *later]
    assert dist.distributed_c10d._world.pg_names[dist.group.WORLD] == "0"  # type: ignore[index]


def test_a_store_whose_agent_has_gone_is_not_waited_for(attend: Attend, free_port: Callable[[], int]) -> None:
    """torch repeats refused connections for 30 minutes, and no socket can be shut down to end that."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    channel = attend(world_at(free_port(), size=2), world_at(store.port))
    asked = channel.failed_within

    def failed_within(limit_s: float) -> bool:
        channel.failed = len(channel.asked_s) >= 1 and not channel.parked  # known after the first try
        return asked(limit_s)

    channel.failed_within = failed_within  # type: ignore[method-assign]
    started = time.monotonic()
    assert elastic.run(lambda _: dist.get_world_size())(Recorded()) == 1
    assert channel.parked == [None]
    assert time.monotonic() - started < 30  # a try takes 2 s


def test_a_group_can_be_made_again_after_a_shutdown(attend: Attend) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    channel = attend(world_at(store.port))
    for end in (elastic.shutdown, dist.destroy_process_group, lambda: None):
        elastic.init()
        assert elastic.allreduce(torch.ones(1)).tolist() == [1]
        assert elastic.run(lambda _: dist.get_world_size())(Recorded()) == 1
        end()
    assert channel.calls == ["no_process_group", *(["mark", "guard"] * 3)]


@pytest.mark.parametrize(("size", "warnings"), [(2, 1), (1, 0)])
def test_a_group_whose_connections_are_not_found_is_warned_of(
    attend: Attend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int, warnings: int
) -> None:
    attend(World(variables={"RANK": "0", "WORLD_SIZE": str(size)}))
    monkeypatch.setattr(Group, "make", lambda *_: None)
    elastic.init("gloo")
    assert len([it for it in caplog.records if "no TCP connection of gloo" in it.getMessage()]) == warnings


def test_a_device_finishes_its_work_before_a_restore(attend: Attend) -> None:
    """Work that was interrupted may still write. What was aborted may end with an error."""
    channel = attend(World(), World(generation=2), World(generation=3))
    calls: list[Any] = []

    class OnDevice(Recorded):
        def _elastic_finish_device_work(self) -> None:
            self.calls.append(f"finish, group: {dist.is_initialized()}")
            if len(channel.parked) == 1:
                raise RuntimeError("NCCL communicator was aborted")

    @elastic.run
    def train(_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            MEMBERSHIP._group.backends = frozenset({"gloo", "nccl"})  # type: ignore[union-attr]
        if len(calls) <= 2:
            channel.failed = True
            raise GONE

    state = OnDevice()
    train(state)
    again = ["finish, group: False", "restore", "reset", "sync", "save"]
    assert state.calls == ["sync", "save", *again, *again]
    aborter = MEMBERSHIP._group._aborter  # type: ignore[union-attr]
    assert aborter is not None
    aborter._stop()  # it would ask this channel, which never waits, for as long as the tests run


def test_a_device_that_fails_without_an_abort_fails_the_worker(attend: Attend) -> None:
    channel = attend(World(), World(generation=2))

    class OnDevice(Recorded):
        def _elastic_finish_device_work(self) -> None:
            raise RuntimeError("illegal memory access")

    @elastic.run(backend="gloo")
    def train(_: Any) -> None:
        channel.failed = True
        raise GONE

    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(OnDevice())


def test_only_a_failure_of_the_present_world_aborts_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that aborts has its answer before it has the lock, and the next world may have begun meanwhile."""
    aborted: list[Any] = []
    answered, go_on = threading.Event(), threading.Event()
    answers = [True, False]

    class Channel(FakeChannel):
        def failed_within(self, limit_s: float) -> bool:
            if len(answers) == 1:
                assert limit_s == 0
                answered.set()
            elif not answers:
                go_on.wait(10)
                return False
            return answers.pop(0)

    monkeypatch.setattr(_group, "_abort", lambda: aborted.append(None))
    aborter = _group._Aborter(Channel([World()]))  # type: ignore[arg-type]
    aborter.arm()
    assert answered.wait(10)
    go_on.set()
    aborter._stop()
    assert aborted == []


def test_the_first_group_too_may_fail(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = attend(World(), World())
    make = Group.make

    def fail_once(group: Group, raise_if_failed: Callable[[], None]) -> None:
        if not channel.parked:
            channel.failed = True
            raise GONE
        make(group, raise_if_failed)

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


class Interrupted(elastic.ObjectState):
    """A state whose next sync a failure interrupts, if ``fails`` is set."""

    def __init__(self, channel: FakeChannel, numbers: list[int | None], **values: Any) -> None:
        # What the source sends as its number. None: this worker is the source.
        self.numbers, self.channel, self.fails = numbers, channel, False
        super().__init__(**values)

    def _elastic_broadcast(self, value: Any) -> Any:
        if isinstance(value, dict) or not self.numbers:
            return value
        _, identity = value
        return self.numbers.pop(0), identity

    def sync(self) -> None:
        if self.fails:
            self.step = 99  # half of it has been received
            self.fails, self.channel.failed = False, True
            raise GONE
        super().sync()


def test_a_new_worker_with_an_interrupted_first_sync_is_no_source(attend: Attend) -> None:
    """It has the source's number, but not its state. Another worker has both."""
    channel = attend(World(), World(generation=2))
    state: Any = Interrupted(channel, [5, 5], step=0)
    state.fails = True
    steps = []
    elastic.run(lambda state: steps.append(state.step))(state)
    assert channel.parked == [None]
    assert channel.synchronised_in == [2]
    assert steps == [0]
    assert state._elastic_commit == 6


def test_a_survivor_whose_sync_is_interrupted_parks_with_its_own_commit(attend: Attend) -> None:
    """It has kept a state that it had not committed. Part of that is overwritten, so it goes back to its last save."""
    channel = attend(World(), World(generation=2), World(generation=3))
    channel.changes_at = 1
    steps = []

    @elastic.run
    def train(state: Any) -> None:
        steps.append(state.step)
        if len(steps) == 1:
            state.step, state.numbers, state.fails = 3, [8, 8], True
            state.check_host_updates()

    state: Any = Interrupted(channel, [], step=0)
    train(state)
    assert channel.parked == [1, 0]  # newer than the first sync, which is 0; then that one
    assert channel.synchronised_in == [1, 3]
    assert steps == [0, 0]
    assert state._elastic_commit == 9


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


def test_nobody_makes_a_step_before_all_are_synchronised(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not synchronised can so tell that no step of its world is lost."""
    channel = attend(World(), World(generation=2))
    state = Recorded(step=0)
    waits: list[tuple[list[int], int | None]] = []

    def barrier() -> None:
        waits.append((list(channel.synchronised_in), state._elastic_commit))
        if len(waits) == 1:
            channel.failed = True
            raise GONE

    monkeypatch.setattr("elastic_rs.elastic._wire.barrier", barrier)
    steps = []
    elastic.run(lambda state: steps.append(state.step))(state)
    # It had the state when it waited for the others, and names it although one of them has failed.
    assert waits == [([1], 0), ([1, 2], 1)]
    assert channel.parked == [0]
    assert steps == [0]


def test_a_broadcast_that_was_aborted_without_an_error_is_no_state(
    attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's collectives end so. What they leave behind must be neither saved nor named as the state of the world."""
    channel = attend(World(), World(generation=2), World(generation=3))
    model = nn.Linear(1, 1, bias=False)
    send_tree = _wire.send_tree
    worlds: list[float] = []

    def aborted_in_world_2(live: Any, source: int, part_done: Callable[[], None]) -> Any:
        if len(channel.parked) == 1:
            channel.failed = True
            nn.init.constant_(model.weight, float("nan"))
            return live
        return send_tree(live, source, part_done)

    monkeypatch.setattr("elastic_rs.elastic._wire.send_tree", aborted_in_world_2)

    @elastic.run
    def train(state: Any) -> None:
        worlds.append(float(model.weight.detach()))
        if len(worlds) == 1:
            nn.init.constant_(model.weight, 7.0)
            state.commit()
            channel.failed = True
            raise GONE

    train(elastic.TorchState(model=model))
    assert channel.synchronised_in == [1, 3]
    assert channel.parked == [1, 1]
    assert worlds[1:] == [7.0]


def test_a_state_that_overrides_on_hosts_updated_is_called(attend: Attend) -> None:
    channel = attend(World())
    heard = threading.Event()
    caught = []

    class Listening(elastic.ObjectState):
        def on_hosts_updated(self, timestamp: int, update_res: elastic.HostUpdateResult) -> None:
            caught.append((timestamp, update_res))
            heard.set()

    @elastic.run
    def train(_: elastic.State) -> None:
        channel.announce(3, 2)
        assert heard.wait(60)

    train(Listening(epoch=0))
    assert caught == [(3, elastic.HostUpdateResult.added)]
    assert MEMBERSHIP.listeners._listeners == []
    channel.close()


# What `from horovod.torch import …` has, and what scripts take from horovod.torch.elastic.state and horovod.common.
NOT_OFFERED = (
    *("DistributedOptimizer", "Compression", "SyncBatchNorm", "Adasum", "join", "barrier", "poll", "synchronize"),
    *("allreduce_async", "allreduce_async_", "sparse_allreduce_async", "is_homogeneous", "mpi_built", "nccl_built"),
    *("grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"),
    *("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async", "allgather_object"),
    *("broadcast", "broadcast_async", "broadcast_", "broadcast_async_", "alltoall", "alltoall_async"),
    *("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"),
    *("start_timeline", "stop_timeline", "ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    *("ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "run_fn", "notification_manager"),
)


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_name_that_is_not_offered_says_what_to_use(name: str) -> None:
    said = rf"there is no {name}: .*\(docs/horovod\.md\)"
    with pytest.raises(AttributeError, match=said):
        getattr(elastic, name)
    assert not hasattr(elastic, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from elastic_rs.elastic import {name}")


def test_a_name_that_horovod_does_not_have_either_is_an_import_error_as_always() -> None:
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from elastic_rs.elastic import no_such_name")
