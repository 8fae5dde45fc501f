"""The token and the certificates by which sessions are protected. ``docs/security.md`` is for users."""

from __future__ import annotations

import logging
import os

from elastic_rs import _elastic_rs
from elastic_rs._elastic_rs import Certificates, Protection, RendezvousConfig

TOKEN_FILE = "ELASTIC_RS_TOKEN_FILE"  # noqa: S105 - a name
"""Names the file with the job's token."""
TLS_CERT = "ELASTIC_RS_TLS_CERT"
"""Names the file with this node's certificate."""
TLS_KEY = "ELASTIC_RS_TLS_KEY"
TLS_CA = "ELASTIC_RS_TLS_CA"
TLS_VARIABLES = (TLS_CERT, TLS_KEY, TLS_CA)
"""All that say which certificates there are."""

logger = logging.getLogger("elastic_rs.rendezvous")

_given: str | None = None


def give(token: str) -> None:
    """Use this token in this process, whatever the environment says: a driver has sent it, or the job has one node."""
    global _given  # noqa: PLW0603 - one token for the process
    _given = token


def certificates() -> Certificates | None:
    """Return where this node's certificate is. None: nothing says that there is one.

    Raises:
        ValueError: a variable is missing, or is one that is not used any more.
    """
    if "ELASTIC_RS_TLS_SPIFFE_ID" in os.environ:
        raise ValueError(
            "ELASTIC_RS_TLS_SPIFFE_ID is not supported: certificates are checked by the host's DNS name or IP address; "
            "unset it, and give each certificate its host's name as a subjectAltName (docs/security.md, Certificates)"
        )
    cert, key, ca = (os.environ.get(name) for name in TLS_VARIABLES)
    if cert is None and key is None and ca is None:
        return None
    if not cert or not key or not ca:
        missing = [name for name, value in ((TLS_CERT, cert), (TLS_KEY, key), (TLS_CA, ca)) if not value]
        text = (
            f"{' and '.join(missing)} must name a file: {TLS_CERT}, {TLS_KEY} and {TLS_CA} are given together, or none"
        )
        raise ValueError(text)
    return _elastic_rs.Certificates(cert=cert, key=key, ca=ca)


def protection() -> Protection | None:
    """Return how this process's sessions are protected. None: they are not.

    Raises:
        ValueError: a file that ``ELASTIC_RS_TOKEN_FILE``, or ``ELASTIC_RS_TLS_CERT`` and the like, name cannot be used;
            the message says why.
    """
    own, path = certificates(), os.environ.get(TOKEN_FILE)
    try:
        if _given is not None:
            return _elastic_rs.Protection.by_token(_given, certificates=own)
        if path is not None:
            return _elastic_rs.Protection.by_file(path, certificates=own)
        return None if own is None else _elastic_rs.Protection.by_certificates(own)
    except ValueError as error:
        raise ValueError(named(error)) from None


def named(error: ValueError) -> str:
    """Return what is wrong with a file, after the variable that names it."""
    variables = {"token": TOKEN_FILE, "certificate": TLS_CERT, "key": TLS_KEY, "CA": TLS_CA}
    text = str(error)
    return next((f"{name}: {text}" for what, name in variables.items() if text.startswith(f"the {what} file `")), text)


def is_named() -> bool:
    """Whether the user has named a token or certificates. A token that a driver or a job of one node draws is not."""
    return (_given is None and TOKEN_FILE in os.environ) or any(name in os.environ for name in TLS_VARIABLES)


def decided(config: RendezvousConfig, *, own_store: bool) -> RendezvousConfig:
    """Return the configuration with ``store_tunnel`` decided. Not given, it is on if the user has named a secret.

    All nodes of a job have the same secret, so they decide alike. Logs a warning if it cannot protect the store.

    With an ``own_store`` each round has a store, which the agent of rank 0's node serves.
    """
    if config.store_tunnel is not None:
        return config
    if is_named() and not own_store:
        logger.warning(
            "the token or certificates of this job do not protect the workers' store: it is PyTorch's "
            "(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), and serves every connection, unencrypted; leave the variable out, "
            "or give --rdzv-conf store_tunnel=0 if that is meant (docs/security.md, Store tunnel)"
        )
    return config.replace(store_tunnel=is_named() and own_store)


def tunnel_protection(config: RendezvousConfig, *, own_store: bool) -> Protection | None:
    """Return by what agents know each other that tunnel their workers' connections. None: they do not.

    Raises:
        ValueError: the store cannot be protected as ``config`` wants it; the message says why.
    """
    found = protection() if config.store_tunnel else None
    config.check_workers_store(is_protected=found is not None, own_store=own_store)
    return found


def refuse_c10d(what: str) -> None:
    """Refuse what needs the endpoint's store, if sessions are protected: such an endpoint has none.

    Raises:
        ValueError: they are.
    """
    if _given is not None or TOKEN_FILE in os.environ:
        raise ValueError(
            f"{what} must not be used with a token ({TOKEN_FILE}): it needs the endpoint's store, and c10d's clients "
            "cannot show a token"
        )
    if any(name in os.environ for name in TLS_VARIABLES):
        raise ValueError(
            f"{what} must not be used with certificates ({TLS_CERT}): it needs the endpoint's store, and c10d's "
            "clients cannot show one"
        )
