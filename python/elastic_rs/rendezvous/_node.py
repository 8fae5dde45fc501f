"""Joining a rendezvous, for every front end: become the coordinator's host, and open the session."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from elastic_rs import _elastic_rs
from elastic_rs._elastic_rs import EndpointServer, Protection, RendezvousConfig, StoreLimits
from elastic_rs.rendezvous._config import endpoint_of, means_all

logger = logging.getLogger("elastic_rs.rendezvous")


def claim(
    endpoints: Sequence[tuple[str, int]],
    run_id: str,
    config: RendezvousConfig,
    protected: Protection | None,
    *,
    uses_store: bool,
    limits: StoreLimits | None = None,
) -> tuple[EndpointServer | None, str]:
    """Become the coordinator's host, if this process is to be. The second value says why it is not.

    Of several endpoints it listens at the first that is its own, and may lead the job then. A driver says by which name
    others reach a host: that one's endpoint is its own, also if the host does not have the address itself.

    Raises:
        OSError: this process must be it (``is_host=1``, or by its name), and cannot.
    """
    names = [endpoint_of(*endpoint) for endpoint in endpoints]
    own_name = str(config.values().get("host_name") or "").rpartition("@")[2]
    is_named = len(names) > 1 and own_name in [host for host, _ in endpoints]
    why = []
    for place, (host, port) in enumerate(endpoints):
        if is_named and host != own_name:
            continue
        claimed = _elastic_rs.EndpointServer.claim(
            host,
            port,
            is_host=True if is_named else config.is_host,
            uses_store=uses_store,
            protection=protected,
            list=(run_id, names, place) if len(names) > 1 else None,
            limits=limits,
        )
        if isinstance(claimed, EndpointServer):
            _tell(claimed, host, protected, ",".join(names) if len(names) > 1 else None)
            return claimed, ""
        why.append(claimed)
    whys = "; ".join(dict.fromkeys(why))
    logger.info("the coordinator at %s is in another process, and this one connects to it: %s", ",".join(names), whys)
    return None, whys


def _tell(claimed: EndpointServer, host: str, protected: Protection | None, names: str | None) -> None:
    from elastic_rs._observe._served import serve_pages  # most nodes are not the host

    if names is None:
        logger.info("this process hosts the coordinator at %s:%d", host, claimed.port)
    else:
        logger.info("this process may lead the job: it listens at %s:%d, one of %s", host, claimed.port, names)
    if means_all(host):
        logger.warning(
            "the endpoint %s means all addresses of this node, which hosts the coordinator: the other nodes are to be "
            "given %s instead",
            host,
            " or ".join(claimed.public_addresses) or f"ADDRESS:{claimed.port}",
        )
    warn_if_open(claimed, protected)
    serve_pages(claimed)


def warn_if_open(host: EndpointServer, protected: Protection | None) -> None:
    """Log who can reach a coordinator that nothing protects, if others than processes of this machine can."""
    if protected is None and not host.on_loopback:
        logger.warning(
            "the coordinator at %s is not protected: anyone who can reach it can end the job, replace a node, and "
            "write data that PyTorch unpickles; protect it with a token: `elastic-rs token new` (docs/security.md)",
            ", ".join(host.addresses),
        )


def shares_store() -> bool:
    """Whether workers share a store that already listens when they start, as PyTorch's ``c10d`` backend decides it."""
    return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def why_not_host(why: str, started: float) -> str:
    """Return why this process did not host the coordinator when it started, for an error that comes later."""
    ago = time.monotonic() - started
    return f"this process did not host the coordinator itself; when it started, {ago:.0f} s ago, the reason was: {why}"
