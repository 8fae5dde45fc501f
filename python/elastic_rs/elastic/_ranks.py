"""This worker's ranks and the size of its world, by Horovod's names. Needs no torch."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank() -> int:
    """Return this worker's rank in the present world: 0 without a launcher."""
    group = _distributed()
    return int(group.get_rank()) if group else _variable("RANK", 0)


def size() -> int:
    """Return the number of workers in the present world: 1 without a launcher."""
    group = _distributed()
    return int(group.get_world_size()) if group else _variable("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this worker's rank on its node, which also selects its device."""
    return _variable("LOCAL_RANK", 0)


def local_size() -> int:
    """Return the number of workers on this node."""
    return _variable("LOCAL_WORLD_SIZE", 1)


def cross_rank() -> int:
    """Return the rank of this worker's node. In Horovod only nodes that have this local rank count."""
    return _variable("GROUP_RANK", 0)


def cross_size() -> int:
    """Return the number of nodes. In Horovod only nodes that have this local rank count."""
    return _variable("GROUP_WORLD_SIZE", 1)


def is_initialized() -> bool:
    """Return whether there is a process group."""
    return _distributed() is not None


def _distributed() -> Any:
    """Return ``torch.distributed`` if there is a process group. Torch is not imported to find out."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name)
    return default if value is None else int(value)
