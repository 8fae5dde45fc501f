"""The entry points that torchrun finds in the group ``torchrun.handlers``.

PyTorch loads entry points while ``torch.distributed.elastic.rendezvous`` is itself half imported
(``rendezvous/registry.py``, ``_register_out_of_tree_handlers``), so this module must not import torch: it returns a
creator that does, once a handler is asked for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from elastic_rs.rendezvous._launcher_handler import LauncherHandler


def rust_c10d() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator of handlers for the rendezvous backend ``rust-c10d``."""
    return create_rust_c10d


def rust_etcd() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator of handlers for the rendezvous backend ``rust-etcd``."""
    return create_rust_etcd


def create_rust_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler for the rendezvous backend ``rust-c10d``, as torchrun does."""
    _show_logs()
    check_torch()
    from elastic_rs.rendezvous import create_rust_c10d_handler

    return with_agent(create_rust_c10d_handler(params))


def create_rust_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler for the rendezvous backend ``rust-etcd``, as torchrun does."""
    _show_logs()
    check_torch()
    from elastic_rs.rendezvous import create_rust_etcd_handler

    return with_agent(create_rust_etcd_handler(params))


def _show_logs() -> None:
    from elastic_rs._logging import show_logs_if_asked

    show_logs_if_asked()


def check_torch() -> None:
    """Refuse a PyTorch whose launcher differs from what this package replaces.

    Raises:
        RuntimeError: it is older than 2.6.
    """
    import torch

    numbers = torch.__version__.split(".")[:2]
    if all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < (2, 6):
        raise RuntimeError(
            f"elastic_rs needs PyTorch 2.6 or later, and this is {torch.__version__}: pip install 'torch>=2.6'"
        )


def with_agent(handler: LauncherHandler) -> RendezvousHandler:
    """Have our agent run the workers of this handler, if it wants that."""
    from elastic_rs._integration._launcher import take_over

    if handler.wants_agent:
        take_over()
    else:
        _warn_of_log_folder(handler.get_run_id())
    return handler


def _warn_of_log_folder(run_id: str) -> None:
    """Warn that PyTorch's agent cannot make a log folder for this run id. Our agent shortens the folder's name."""
    if "/" in run_id or len(run_id.encode()) > 246:
        logging.getLogger("elastic_rs.rendezvous").warning(
            "PyTorch's agent (--rdzv-conf agent=torch) starts no worker with this run id: it names a log folder after "
            "it, which must have no slash and at most 246 bytes; this one has %d bytes. Give a shorter --rdzv-id, "
            "--log-dir=/dev/null, or leave out agent=torch",
            len(run_id.encode()),
        )
