"""``ElasticSampler``: who reads what, and that nothing is read twice or left out when the world changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from elastic_rs import elastic
from elastic_rs.elastic import _partition
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader


def read_by(indices: range | list[int], done: int, size: int) -> list[list[int]]:
    return [list(_partition.indices_of_rank(indices, done, rank, size)) for rank in range(size)]


@given(length=st.integers(0, 60), done=st.integers(0, 70), size=st.integers(1, 12))
def test_all_ranks_read_equally_much_and_together_everything(length: int, done: int, size: int) -> None:
    parts = read_by(range(length), done, size)
    assert {len(part) for part in parts} == {_partition.samples_per_rank(length, done, size)}
    left = list(range(done, length))
    read = Counter(index for part in parts for index in part)
    assert set(read) == set(left)
    # Padding repeats the front of what is left, each as often as the others, or once more.
    assert not left or max(read.values()) - min(read.values()) <= 1
    assert sum(read.values()) - len(left) < size
    assert [read[index] for index in left] == sorted(read.values(), reverse=True)


@given(length=st.integers(1, 60), size=st.integers(1, 6), steps=st.integers(0, 20))
def test_equal_steps_of_all_ranks_are_the_front_of_the_order(length: int, size: int, steps: int) -> None:
    """So one number says what is done, also for ranks that have died."""
    parts = read_by(range(length), 0, size)
    done = {index for part in parts for index in part[:steps]}
    assert done == set(range(min(length, steps * size)))


def test_fewer_indices_than_ranks_are_repeated() -> None:
    """Horovod's sampler asserts here, if it has to repeat more than there are."""
    assert read_by(range(10), 8, 5) == [[8], [9], [8], [9], [8]]


@given(length=st.integers(0, 200), seed=st.integers(0, 5))
def test_the_order_is_horovods(length: int, seed: int) -> None:
    expected = list(range(length))
    random.Random(seed).shuffle(expected)
    assert list(_partition.order(length, shuffle=True, seed=seed)) == expected
    assert list(_partition.order(length, shuffle=False, seed=seed)) == list(range(length))


@given(
    length=st.integers(1, 80),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), max_size=8),
    batch=st.integers(1, 4),
)
def test_each_index_is_in_one_committed_step_of_its_epoch(
    length: int, worlds: list[tuple[int, int, bool]], batch: int
) -> None:
    """Worlds of any size, some of which lose their last steps: what is committed is the order, from its front."""
    order = list(_partition.order(length, shuffle=True, seed=1))
    committed: list[int] = []
    done = 0
    for size, steps, lost in [*worlds, (2, length, False)]:
        parts = read_by(order, done, size)
        taken = min(steps, -(-len(parts[0]) // batch))
        if lost:
            taken = max(0, taken - 1)
        read = {index for part in parts for index in part[: taken * batch]}
        assert not read & set(committed)
        committed += read
        done += taken * batch * size
    assert sorted(committed) == list(range(length))


BATCH = 2
SAMPLES = 8


@pytest.fixture
def sampler() -> elastic.ElasticSampler:
    return elastic.ElasticSampler(range(SAMPLES), shuffle=True)


def batches_of(sampler: elastic.ElasticSampler) -> list[list[int]]:
    return [batch.tolist() for batch in DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler)]  # type: ignore[arg-type]


def test_counts_and_repeats(sampler: elastic.ElasticSampler) -> None:
    """``test_elastic_sampler`` of Horovod's test_torch_elastic.py."""
    assert (sampler.epoch, sampler.processed_num) == (0, 0)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = batches_of(sampler)
        orders.append([index for batch in batches for index in batch])
        for number in range(len(batches)):
            sampler.record_batch(number, BATCH)
            assert sampler.processed_num == BATCH * (number + 1)
        assert len(batches) == SAMPLES // BATCH
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(SAMPLES))
    # The epoch is not set: the loader repeats what it had.
    assert sampler.processed_num == len(sampler)
    assert [index for batch in batches_of(sampler) for index in batch] == orders[1]


def test_a_partial_epoch_is_restored(sampler: elastic.ElasticSampler) -> None:
    state = elastic.TorchState(sampler=sampler)
    sampler.set_epoch(2)
    order = [index for batch in batches_of(sampler) for index in batch]
    for number in range(2):
        sampler.record_batch(number, BATCH)
    state.commit()
    for number in range(2, 4):
        sampler.record_batch(number, BATCH)
    assert sampler.processed_num == 4 * BATCH
    state.restore()
    assert sampler.processed_num == 2 * BATCH
    assert [index for batch in batches_of(sampler) for index in batch] == order[2 * BATCH :]
    # A sync distributes what is left, on the source too.
    sampler.record_batch(2, BATCH)
    assert len(sampler) == SAMPLES - 2 * BATCH
    state.commit()
    state.sync()
    assert len(sampler) == BATCH
    assert [index for batch in batches_of(sampler) for index in batch] == order[3 * BATCH :]
    # The next epoch begins with everything.
    sampler.set_epoch(3)
    assert len(sampler) == SAMPLES
    assert sampler.processed_num == 0


def test_a_reset_distributes_what_is_left(sampler: elastic.ElasticSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    order = list(sampler)
    sampler.record_batch(0, BATCH)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(sampler) == SAMPLES  # nothing changes before the reset
    sampler.reset()
    assert list(sampler) == order[BATCH:][1::3]
    assert (sampler.num_samples, sampler.total_size) == (2, 6)
    sampler.record_batch(0, 1)
    assert sampler.processed_num == BATCH + 3


def test_an_epoch_that_is_done_has_no_batches(sampler: elastic.ElasticSampler) -> None:
    """A worker that comes back between the last batch and ``set_epoch`` finds nothing to do."""
    sampler.load_state_dict({"epoch": 0, "processed_num": SAMPLES + 4})
    assert len(sampler) == 0
    assert batches_of(sampler) == []


def test_horovods_lists_of_indices_are_there() -> None:
    sampler = elastic.ElasticSampler(range(10), shuffle=True, seed=4)
    order = list(sampler)
    assert (sampler.remaining_indices, sampler.processed_indices) == (order, set())
    sampler.record_batch(0, 4)
    assert (sampler.remaining_indices, sampler.processed_indices) == (order, set(order[:4]))
    sampler.reset()
    assert (sampler.remaining_indices, sampler.processed_indices) == (order[4:], set(order[:4]))
