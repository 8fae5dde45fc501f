"""``ElasticSampler``: a sampler that goes on in the middle of an epoch with another number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler

from elastic_rs.elastic import _partition, _ranks


class ElasticSampler(Sampler[int]):
    """Distributes the indices of a data set among the workers, and remembers how many of them are done.

    Put it into the ``TorchState``. When workers come or go, what is left of the epoch is distributed anew::

        for epoch in range(state.epoch, epochs):
            for number, (images, labels) in enumerate(DataLoader(data, batch_size, sampler=state.sampler)):
                ...
                state.sampler.record_batch(number, batch_size)
                state.commit()
            state.epoch = epoch + 1
            state.sampler.set_epoch(epoch + 1)

    All ranks read the same number of indices. If they do not divide evenly, some are read twice. ``state_dict`` and
    ``load_state_dict`` also serve checkpoints.

    Args:
        dataset: anything with a length, which stays the same.
        shuffle: whether each epoch has a different order.
        seed: of the order. The same on all ranks.

    The interface is that of ``horovod.torch.elastic.ElasticSampler``.

    >>> from elastic_rs import elastic
    >>> sampler = elastic.ElasticSampler(range(5), shuffle=False)
    >>> list(sampler)
    [0, 1, 2, 3, 4]
    >>> sampler.record_batch(0, 2)
    >>> sampler.reset()
    >>> list(sampler)
    [2, 3, 4]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """How many indices of this epoch all ranks together have recorded."""
        self._order: Sequence[int] = ()
        self._order_of: tuple[int, int] | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it is done.

        Call this at the *end* of an epoch with the number of the next one. At the beginning it would also be called
        when a worker comes back into the middle of an epoch, and that would begin again.

        Args:
            epoch: its number, from 0.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 # Horovod's signature
        """Record that each rank has processed a batch. All ranks must call it equally often.

        Args:
            batch_idx: not used. It is there because Horovod's method has it.
            batch_size: how many indices of this rank were in the batch.
        """
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Distribute what is left of the epoch among the present workers."""
        self.num_replicas = _ranks.size()
        self.rank = _ranks.rank()
        key = (self.epoch, len(self.dataset))
        if self._order_of != key:  # a million indices take half a second to shuffle
            self._order = _partition.order(len(self.dataset), shuffle=self.shuffle, seed=self.seed + self.epoch)
            self._order_of = key
        self._begun_at = self.processed_num

    @property
    def num_samples(self) -> int:
        """How many indices each rank reads."""
        return _partition.samples_per_rank(len(self._order), self._begun_at, self.num_replicas)

    @property
    def total_size(self) -> int:
        """How many indices all ranks read together, repeated ones included."""
        return self.num_samples * self.num_replicas

    @property
    def remaining_indices(self) -> list[int]:
        """What the ranks together read after the last :meth:`reset`, in order, without repeated ones."""
        return list(self._order[self._begun_at :])

    @property
    def processed_indices(self) -> set[int]:
        """What all ranks together have recorded of this epoch."""
        return set(self._order[: self.processed_num])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the epoch, and how many indices of it all ranks have recorded."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler was, which may have had another number of ranks.

        Args:
            state_dict: what its :meth:`state_dict` has returned.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return _partition.indices_of_rank(self._order, self._begun_at, self.rank, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
