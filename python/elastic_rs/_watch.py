"""What a worker's thread ``elastic_rs-watch`` answers when its agent looks where ranks stand. Never imports torch."""

from __future__ import annotations

import os
import sys

from elastic_rs import _elastic_rs

WATCH = "ELASTIC_RS_WATCH"
"""Set by agents only: the address of the socket at which the agent asks."""


def start() -> None:
    """Start the thread, if an agent asks this process and it does not run yet, and count optimizers' steps."""
    if address := os.environ.get(WATCH):
        _elastic_rs.start_watch(address, report)
        if "torch.optim.optimizer" in sys.modules:
            from elastic_rs import _count  # noqa: F401 - it counts once it is imported


def report() -> tuple[bool, list[bytes], dict[str, list[int]]]:
    """Return whether an exception has ended the program, PyTorch's recorders as JSON, and the members of each group."""
    raised = getattr(sys, "last_value", None) is not None  # the interpreter sets it when it shows the traceback
    # A module that the main thread is importing has not all of its names yet, and waiting for it would be a hang.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if is_initialized is None:
        return raised, [], {}
    # A worker may wait for a collective of groups that it is destroying. If its world changes, this module is imported.
    if not is_initialized() and "elastic_rs._torch_private" not in sys.modules:
        return raised, [], {}
    from elastic_rs import _torch_private

    return raised, _torch_private.recorded_collectives(), _torch_private.members_of_groups()
