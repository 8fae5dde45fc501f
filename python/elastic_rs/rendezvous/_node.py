"""Joining a rendezvous, for every front end: become the coordinator's host, and open the session."""

from __future__ import annotations

import os
import time

from elastic_rs import _elastic_rs
from elastic_rs._log import Log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_rs._elastic_rs import Host, Protection
    from elastic_rs.rendezvous._config import RendezvousConfig

__all__ = ["claim", "shares_store", "why_not_host"]

logger = Log("elastic_rs.rendezvous")


def claim(host: str, port: int, config: RendezvousConfig, protected: Protection | None) -> tuple[Host | None, str]:
    """Become the coordinator's host, if this process is to be. The second value says why it is not.

    Raises:
        OSError: this process was told to be it (``is_host=1``), and cannot.
    """
    claimed = _elastic_rs.Host.claim(host, port, is_host=config.is_host, protection=protected)
    if isinstance(claimed, str):
        logger.info("the coordinator at %s:%d is hosted elsewhere: %s", host, port, claimed)
        return None, claimed
    from elastic_rs.observe._served import serve_pages  # most nodes are not the host

    logger.info("this process hosts the coordinator at %s:%d", host, claimed.port)
    serve_pages(claimed)
    return claimed, ""


def shares_store() -> bool:
    """Whether workers share a store that already listens when they start, as PyTorch's ``c10d`` backend decides it."""
    return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def why_not_host(why: str, started: float) -> str:
    """Return why this process did not host the coordinator when it started, for an error that comes later.

    Args:
        why: what :func:`claim` said.
        started: when, as ``time.monotonic()`` tells it.
    """
    ago = time.monotonic() - started
    return f"this process did not host the coordinator itself; when it started, {ago:.0f} s ago, the reason was: {why}"
