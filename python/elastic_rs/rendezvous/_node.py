"""Joining a rendezvous, for every front end: become the coordinator's host, and open the session."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from elastic_rs import _elastic_rs

if TYPE_CHECKING:
    from elastic_rs._elastic_rs import Host, Session
    from elastic_rs.rendezvous._config import RendezvousConfig

__all__ = ["claim", "open_session", "why_not_host"]

logger = logging.getLogger("elastic_rs.rendezvous")


def claim(host: str, port: int, config: RendezvousConfig) -> tuple[Host | None, str]:
    """Become the coordinator's host, if this process is to be. The second value says why it is not.

    Raises:
        OSError: this process was told to be it (``is_host=1``), and cannot.
    """
    claimed = _elastic_rs.Host.claim(host, port, is_host=config.is_host)
    if isinstance(claimed, str):
        logger.info("the coordinator at %s:%d is hosted elsewhere: %s", host, port, claimed)
        return None, claimed
    logger.info("this process hosts the coordinator at %s:%d", host, claimed.port)
    return claimed, ""


def why_not_host(why: str, started: float) -> str:
    """Return why this process did not host the coordinator when it started, for an error that comes later.

    Args:
        why: what :func:`claim` said.
        started: when, as ``time.monotonic()`` tells it.
    """
    ago = time.monotonic() - started
    return f"this process did not host the coordinator itself; when it started, {ago:.0f} s ago, the reason was: {why}"


def open_session(
    config: RendezvousConfig,
    *,
    endpoint: tuple[str, int],
    run_id: str,
    name: str,
    local_addr: str | None,
    nodes: tuple[int, int],
    max_restarts: int | None,
    ranks_as_asked: bool = False,
    hosts: bool = False,
) -> Session:
    """Open a node's session with the coordinator at the endpoint; it connects in the background.

    Args:
        config: what ``--rdzv-conf`` says.
        endpoint: host and port.
        run_id: the job.
        name: how others call this node.
        local_addr: the address others use, if it is not the one that the coordinator sees.
        nodes: fewest and most.
        max_restarts: the job's budget; None if nodes count for themselves.
        ranks_as_asked: ranks are those of ``config.node_rank``, in every round.
        hosts: this process hosts the coordinator, which goes when this node does.
    """
    return _elastic_rs.Session(
        host=endpoint[0],
        port=endpoint[1],
        run_id=run_id,
        name=name,
        local_addr=local_addr,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        last_call_timeout_s=config.last_call_timeout,
        settle_timeout_s=config.settle_timeout,
        keep_alive_interval_s=config.keep_alive_interval,
        keep_alive_max_attempt=config.keep_alive_max_attempt,
        reconnect_grace_s=config.reconnect_grace,
        coordinator_timeout_s=config.coordinator_timeout,
        node_rank=config.node_rank,
        on_partition=config.on_partition,
        rejoin_limit=config.rejoin_limit,
        rejoin_window_s=config.rejoin_window,
        max_restarts=max_restarts,
        ranks_as_asked=ranks_as_asked,
        hosts=hosts,
    )
