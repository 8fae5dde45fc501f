"""What the user says of a rendezvous: ``--rdzv-conf``, by the core's table of keys, and the endpoint.

The table is in ``src/rendezvous/conf.rs``.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_rs._elastic_rs import RendezvousConfig, only_on_loopback

logger = logging.getLogger("elastic_rs.rendezvous")


DEFAULT_PORT = 29400
"""Port of an endpoint without one, as in PyTorch's ``c10d`` backend. A job of one node needs no endpoint at all."""

RUST_C10D, RUST_ETCD = "rust-c10d", "rust-etcd"

ETCD_NAMES = (RUST_ETCD, "etcd", "etcd-v2")
"""What means ``rust-etcd``. The last two are PyTorch's: after ``install()``, and with ``elastic-run``."""

PYTORCHS_NAMES = ("c10d", "etcd", "etcd-v2", "static")
"""PyTorch's own backends. What ``install()`` puts in their place ignores the keys that PyTorch ignores."""

MAX_NODES = 2**32 - 1
"""The core counts nodes in 32 bits."""


def config_of(given: Mapping[str, Any], backend: str = RUST_C10D, name: str | None = None) -> RendezvousConfig:
    """Check what the user gave for a backend, ``rust-c10d`` or ``rust-etcd``, under the ``name`` that the user gave it.

    Under one of PyTorch's names keys that the backend does not have are ignored with a warning.

    Raises:
        ValueError: a key is unknown (the nearest known one is named) or has no meaning for the backend, or a value is
            not allowed.
    """
    if name in PYTORCHS_NAMES:
        given = known_of(given, RendezvousConfig.known(backend), name)
    given = dict(given)
    # LaunchConfig puts `timeout=900` (an int) into every configuration; what a user writes is a string.
    if not isinstance(timeout := given.pop("timeout", None), str):
        return RendezvousConfig.from_mapping(given, backend=backend)
    if backend == RUST_C10D:  # PyTorch's `etcd` calls it so
        logger.warning("--rdzv-conf timeout=%s is taken for join_timeout, its name in this backend", timeout)
    return RendezvousConfig.from_mapping({"timeout": timeout, **given}, backend=backend)


def known_of(given: Mapping[str, Any], known: Collection[str], name: str) -> dict[str, Any]:
    """Return the entries with known keys. One warning names the others, but not their values: one may be a password."""
    # The int is LaunchConfig's own `timeout=900`, as in `config_of`.
    ignored = sorted(
        key
        for key, value in given.items()
        if key not in known and value is not None and (key != "timeout" or isinstance(value, str))
    )
    if ignored:
        logger.warning(
            "--rdzv-conf has keys without an effect with --rdzv-backend=%s, ignored as by PyTorch: %s",
            name,
            ", ".join(ignored),
        )
    return {key: value for key, value in given.items() if key in known}


def parse_conf(text: str) -> dict[str, str]:
    """Read ``KEY=VALUE,...``, as ``_parse_rendezvous_config`` in torch's ``elastic/rendezvous/utils.py`` does.

    Raises:
        ValueError: an entry has no key or no value; the message names it.
    """
    conf = {}
    for entry in text.split(",") if text.strip() else []:
        key, _, value = (part.strip() for part in entry.partition("="))
        if not key or not value:
            # It may be a part of a password with a comma.
            shown = "an entry" if "password" in conf else f"the entry `{entry.strip()}`"
            raise ValueError(f"--rdzv-conf has {shown}, must be KEY=VALUE,KEY=VALUE,...")
        conf[key] = value
    return conf


def parse_endpoint(text: str, default_port: int | None) -> tuple[str, int]:
    """Read ``HOST[:PORT]``, as ``parse_rendezvous_endpoint`` in torch's ``elastic/rendezvous/utils.py`` does.

    That takes what follows the last colon for the port, also of an IPv6 address without brackets: ``::1`` is port 1 of
    the host ``:``. Here such a text is refused.

    Raises:
        ValueError: it is not that, or has no port although there is no default.
    """
    text = text.strip()
    if text.count(":") > 1 and not text.startswith("["):
        _check_bare_ipv6(text, default_port)
    found = _ENDPOINT.fullmatch(text or "localhost")
    port = int(found["port"]) if found and found["port"] else default_port
    if not found or (port is not None and port >= 65536):
        raise ValueError(
            f"the rendezvous endpoint is `{text}`, must be HOST, HOST:PORT or [IPV6]:PORT with a port from 0 to 65535"
        )
    if port is None:
        raise ValueError(f"the rendezvous endpoint is `{text}`, must name a port: {text}:PORT")
    return found["bracketed"] or found["host"], port


def parse_endpoints(text: str, default_port: int | None, config: RendezvousConfig) -> list[tuple[str, int]]:
    """Read ``HOST[:PORT]``, or a list of them with commas: the nodes of which one leads the job.

    Raises:
        ValueError: one of them is not that, or not one to connect to, or the list has one twice, or a key of
            ``config`` has no meaning with it.
    """
    names = text.split(",")
    if len(names) > 1 and not all(name.strip() for name in names):
        raise ValueError(f"the list is `{text}`, must have an endpoint before and after each comma")
    endpoints = [parse_endpoint(name, default_port) for name in names]
    for host, _ in endpoints:
        check_host(host, config)
    if len(endpoints) == 1:
        return endpoints
    if len(endpoints) > MAX_ENDPOINTS:
        raise ValueError(f"the list has {len(endpoints)} endpoints, must have at most {MAX_ENDPOINTS}")
    for place, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:place]:
            raise ValueError(f"the list has the endpoint `{endpoint_of(*endpoint)}` twice, must have each once")
        if endpoint[1] == 0:
            raise ValueError(f"the port of `{endpoint_of(*endpoint)}` is 0, must be one that the other nodes can know")
    local = [host for host, _ in endpoints if host == "localhost" or _is_loopback(host)]
    if local and len(local) < len(endpoints):
        raise ValueError(
            f"the list has `{local[0]}`, which is another machine on each machine, and others: name each node by an "
            "address that all reach"
        )
    for key, allowed in {"is_host": (None, False), "proof": (None, True), "on_partition": (None, "stop")}.items():
        if (given := config.values().get(key)) not in allowed:
            shown = ", ".join(str(value) for value in allowed if value is not None)
            raise ValueError(
                f"--rdzv-conf {key} is `{given}`, must be `{shown}` or left out with a list of endpoints "
                "(docs/takeover.md)"
            )
    return endpoints


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


MAX_ENDPOINTS = 7
"""Of a list. The core's ``MOST_ENDPOINTS``."""


def endpoint_of(host: str, port: int) -> str:
    """Return an endpoint as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[\w.:-]+)\]|(?P<host>[\w.-]+|[\w.:-]+(?=:)))(?::(?P<port>[0-9]{1,5}))?")


def _check_bare_ipv6(text: str, default_port: int | None) -> None:
    host, _, port = text.rpartition(":")
    if not _is_ipv6(text):
        return
    if "%" in text:
        raise ValueError(f"the rendezvous endpoint is `{text}`, must be an address without a zone (`%...`)")
    if not (_is_ipv6(host) and port.isdecimal()):
        ways = f"[{text}]:PORT" if default_port is None else f"[{text}] or [{text}]:PORT"
        raise ValueError(f"the rendezvous endpoint is `{text}`, must have brackets around an IPv6 address: {ways}")
    logger.warning(
        "the rendezvous endpoint `%s` is read as port %s of `%s`; brackets make it clear: [%s]:%s, or [%s] for the "
        "address",
        text,
        port,
        host,
        host,
        port,
        text,
    )


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def check_host(host: str, config: RendezvousConfig) -> None:
    """Check that the host of an endpoint is one to connect to.

    Raises:
        ValueError: it is ``0.0.0.0`` or ``::``, and this node is not set to host the coordinator.
    """
    if means_all(host) and config.is_host is not True:
        raise ValueError(
            f"the rendezvous endpoint is `{host}`, which means all addresses of a machine; it must be an address by "
            "which all nodes reach the one that hosts the rendezvous; --rdzv-conf is_host=1 on that node alone makes "
            "it listen on all of its addresses"
        )


def means_all(host: str) -> bool:
    """Whether an endpoint's host is `0.0.0.0` or `::`, in whichever spelling: all addresses of a machine."""
    return bool(host) and not host.lower().removeprefix("::ffff:").strip("0.:")


def warn_of_loopback(
    endpoints: Sequence[tuple[str, int]], config: RendezvousConfig, most_nodes: int, flag: str
) -> None:
    """Warn that a job of several nodes meets at an address that means another machine on each machine.

    It is not refused: agents of one machine find each other there.
    """
    if most_nodes < 2 or config.values().get("host_name") is not None:  # a driver has chosen the endpoint
        return
    on_loopback = []
    for host, port in endpoints:
        found = only_on_loopback(host)
        if host in {"localhost", *found}:
            on_loopback.append(endpoint_of(host, port))
        elif found:
            logger.warning(
                "the endpoint %s is %s here, on loopback: this node takes it for its own. Other nodes must resolve "
                "`%s` to another address of this machine; where it is each machine's own name, each meets itself",
                endpoint_of(host, port),
                ", ".join(found),
                host,
            )
    if on_loopback:
        logger.warning(
            "the endpoint %s is on loopback: only agents of this machine meet there, and a node on another machine "
            "meets itself; for several machines give all nodes %s with an address of one node",
            ",".join(on_loopback),
            flag,
        )


def warn_of_no_endpoint(most_nodes: int, port: int) -> None:
    """Warn that a job of several nodes was given no endpoint.

    It is not refused: agents of one machine find each other at the default endpoint.
    """
    if most_nodes > 1:
        logger.warning(
            "no --rdzv-endpoint is given: this node meets others at localhost:%d, where only agents of this machine "
            "find it; for nodes on several machines give all of them --rdzv-endpoint=HOST:PORT, an address of one node",
            port,
        )


def shown_defaults(backend: str | None = None) -> str:
    """Return the keys that all backends have, or this one alone, with their defaults, as ``--rdzv-conf`` has them."""
    return ", ".join(
        (f"{key.name} or {key.other}" if key.other else key.name) + ("" if key.default is None else f"={key.default}")
        for key in RendezvousConfig.table()
        if key.backend == backend
    )
