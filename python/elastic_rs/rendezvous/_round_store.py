"""The store that agents share within one round."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from elastic_rs._torch_private import PrefixStore, Store

# Prefixes of the keys of `SimpleElasticAgent._assign_worker_ranks` in torch.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"

# Keys are polled, because PyTorch's client prints two lines for every wait that times out.
LOOK_FIRST_S, LOOK_LAST_S = 0.002, 0.1


class RoundStore(PrefixStore):
    """A prefix store that does not wait for members that are gone.

    Right after a round PyTorch's agents exchange their roles through the store and wait for all of them. A
    member that is lost in that moment would make all others wait for ``read_timeout`` and then fail. So once the world
    must re-form, a stand-in is returned for what is missing: the agent starts its workers, sees that they must be
    restarted at its next look, and joins the next round.

    Args:
        must_reform: whether the world must re-form; may raise what ends the agent.
        on_stand_in: called when a stand-in is returned: the agent must be made to join again, whatever happens.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        *,
        world_size: int,
        timeout: timedelta,
        must_reform: Callable[[], bool],
        on_stand_in: Callable[[], None],
    ) -> None:
        super().__init__(prefix, store)
        self._world_size = world_size
        self._limit_s = timeout.total_seconds()
        self._must_reform = must_reform
        self._on_stand_in = on_stand_in
        self._own: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        if key.startswith(ROLE_INFO):
            self._own = json.loads(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it to appear."""
        if key.startswith(ASSIGNED_RANKS) and self._own and not self._all_there([key]):
            self._on_stand_in()
            local = self._own["local_world_size"]
            base, total = self._own["rank"] * local, self._world_size * local
            return json.dumps([base, total, base, total]).encode()
        return bytes(super().get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, waiting for all to appear."""
        keys = list(keys)
        if keys and keys[0].startswith(ROLE_INFO) and self._own and not self._all_there(keys):
            self._on_stand_in()
            return [self._role_info(rank, key) for rank, key in enumerate(keys)]
        return [bytes(value) for value in super().multi_get(keys)]

    def _role_info(self, rank: int, key: str) -> bytes:
        return bytes(super().get(key)) if self.check([key]) else json.dumps(self._own | {"rank": rank}).encode()

    def _all_there(self, keys: list[str]) -> bool:
        """Wait until the keys are there; False if the world must re-form before."""
        deadline = time.monotonic() + self._limit_s
        pause = LOOK_FIRST_S
        while not self.check(keys):
            if pause >= LOOK_LAST_S and self._must_reform():
                return False
            if time.monotonic() >= deadline:
                self.wait(keys, timedelta(milliseconds=1))  # raises, naming the keys
            time.sleep(pause)
            pause = min(pause * 2, LOOK_LAST_S)
        return True
