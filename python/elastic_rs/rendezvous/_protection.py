"""The token by which sessions with the coordinator are protected. ``docs/security.md`` is for users."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic_rs import _elastic_rs

if TYPE_CHECKING:
    from elastic_rs._elastic_rs import Protection, RendezvousConfig

__all__ = ["TOKEN_FILE", "give", "protection", "refuse_c10d", "tunnel_protection"]

TOKEN_FILE = "ELASTIC_RS_TOKEN_FILE"  # noqa: S105 - a name
"""Names the file with the job's token."""

_given: str | None = None


def give(token: str) -> None:
    """Use this token in this process, whatever the environment says: a driver has sent it, or the job has one node."""
    global _given  # noqa: PLW0603 - one token for the process
    _given = token


def protection() -> Protection | None:
    """Return how this process's sessions are protected. None: they are not.

    Raises:
        ValueError: the file that ``ELASTIC_RS_TOKEN_FILE`` names cannot be used; the message says why.
    """
    if _given is not None:
        return _elastic_rs.Protection.by_token(_given)
    path = os.environ.get(TOKEN_FILE)
    if path is None:
        return None
    try:
        return _elastic_rs.Protection.by_file(path)
    except ValueError as error:
        raise ValueError(f"{TOKEN_FILE}: {error}") from None


def tunnel_protection(config: RendezvousConfig, *, own_store: bool) -> Protection | None:
    """Return the token by which agents know each other that tunnel their workers' connections. None: they do not.

    Args:
        config: whether they are to.
        own_store: each round has a store, which the agent of rank 0's node serves.

    Raises:
        ValueError: they are to and cannot; the message says why.
    """
    if not config.store_tunnel:
        return None
    found = protection()
    config.check_tunnel(has_token=found is not None, own_store=own_store)
    return found


def refuse_c10d(what: str) -> None:
    """Refuse what needs the endpoint's store, if there is a token: such an endpoint has none.

    Args:
        what: what the user has asked for.

    Raises:
        ValueError: there is a token.
    """
    if _given is not None or TOKEN_FILE in os.environ:
        raise ValueError(
            f"{what} must not be used with a token ({TOKEN_FILE}): it needs the endpoint's store, and c10d's clients "
            "cannot show a token"
        )
