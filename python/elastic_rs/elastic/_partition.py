"""Which indices of a data set a rank reads, and in which order. Pure; needs no torch."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence


def order(length: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """Return the indices of a data set in the order in which the ranks together read them: Horovod's for this seed."""
    if not shuffle:
        return range(length)
    indices = array("q", range(length))
    random.Random(seed).shuffle(indices)  # noqa: S311 # an order, not a secret
    return indices


def samples_per_rank(length: int, done: int, size: int) -> int:
    """Return how many of the indices after the first ``done`` each rank reads: the same number on every rank."""
    return -(-max(0, length - done) // size)


def indices_of_rank(indices: Sequence[int], done: int, rank: int, size: int) -> Iterator[int]:
    """Yield every ``size``-th index after the first ``done``, from the rank's on.

    So when each rank has read k of them, the ranks together have read the first k * size. Ranks that would have one
    index fewer begin again at the front of what was not done, as often as it takes: there may be fewer indices left
    than ranks.
    """
    left = len(indices) - done
    return (indices[done + (rank + step * size) % left] for step in range(samples_per_rank(len(indices), done, size)))
