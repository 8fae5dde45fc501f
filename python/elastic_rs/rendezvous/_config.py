"""What ``--rdzv-conf`` may say: one table of keys, their defaults and limits."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("elastic_rs.rendezvous")


@dataclass(frozen=True)
class RendezvousConfig:
    """Checked settings of the backend ``rust-c10d``. Times are in seconds.

    The first group has the names and defaults of PyTorch's ``c10d`` backend.
    """

    join_timeout: float = 600.0
    """How long a node waits for a round to complete before it fails."""
    last_call_timeout: float = 30.0
    """How long a growing round waits for further nodes once ``min_nodes`` are in."""
    close_timeout: float = 30.0
    """How long telling the others that the job is over may take."""
    keep_alive_interval: float = 5.0
    """How often a silent node is heard of."""
    keep_alive_max_attempt: int = 3
    """After how many missed keep-alives a silent node is lost."""
    read_timeout: float = 60.0
    """Time limit of each operation of the store that the agents share."""
    is_host: bool | None = None
    """Whether this process hosts the coordinator; None: it does if the endpoint is this machine's and its port free."""

    settle_timeout: float = 1.0
    """How long a round that lost members waits for a replacement once all survivors are back."""
    reconnect_grace: float = 0.5
    """How long a node whose connection ended without a goodbye may take to come back and keep its place."""
    coordinator_timeout: float = 300.0
    """How long nodes carry on without the coordinator before they fail."""
    drain_timeout: float = 5.0
    """How long the process that hosts the coordinator stays at the end for the others to say goodbye."""
    node_rank: int | None = None
    """Rank this node asks for in the first round."""
    on_partition: str = "stop"
    """What this node does when it has heard nothing for its whole lease: ``stop`` its workers, or ``continue``."""
    rejoin_limit: int = 20
    """How often nodes of one address may interrupt the job by going, within ``rejoin_window``; 0: no limit."""
    rejoin_window: float = 3600.0
    """See ``rejoin_limit``."""
    agent: str = "rust"
    """Which agent runs the workers under ``torchrun``: ``rust``, or PyTorch's own (``torch``)."""
    exit_barrier_timeout: float | None = None
    """How long a node whose workers have succeeded waits for the other nodes'; None: for as long as they run."""
    restart_budget: str = "job"
    """What ``--max-restarts`` counts with our agent: the ``job``'s restarts, or each ``node``'s own (PyTorch's way)."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> RendezvousConfig:
        """Check what the user gave.

        Raises:
            ValueError: a key is unknown (the nearest known one is named) or a value is not allowed.
        """
        values: dict[str, Any] = {}
        for key, value in given.items():
            if value is None:
                continue
            if key == "timeout":
                # LaunchConfig puts `timeout=900` (an int) into every configuration; what a user writes is a string.
                if isinstance(value, str):
                    logger.warning("--rdzv-conf timeout=%s is taken for join_timeout, its name in this backend", value)
                    values.setdefault("join_timeout", _positive(key, value))
            elif key in _WITHOUT_EFFECT:
                _WITHOUT_EFFECT[key](key, value)
            elif key in _KEYS:
                values[key] = _KEYS[key](key, value)
            else:
                raise ValueError(_unknown(key))
        config = cls(**values)
        lease = config.keep_alive_interval * config.keep_alive_max_attempt
        if lease > LONGEST_LEASE_S:
            raise ValueError(
                f"--rdzv-conf keep_alive_interval * keep_alive_max_attempt is `{lease:g}` seconds, must be at most "
                f"{LONGEST_LEASE_S}"
            )
        return config


def parse_conf(text: str) -> dict[str, str]:
    """Read ``KEY=VALUE,...``, as ``_parse_rendezvous_config`` in torch's ``elastic/rendezvous/utils.py`` does.

    Raises:
        ValueError: an entry has no key or no value; the message names it.
    """
    conf = {}
    for entry in text.split(",") if text.strip() else []:
        key, _, value = (part.strip() for part in entry.partition("="))
        if not key or not value:
            raise ValueError(f"--rdzv-conf has the entry `{entry.strip()}`, must be KEY=VALUE,KEY=VALUE,...")
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
    found = re.fullmatch(r"(?:\[([\w.:-]+)\]|([\w.-]+|[\w.:-]+(?=:[^:]*$)))(?::([0-9]{1,5}))?", text or "localhost")
    port = found and (int(found[3]) if found[3] else default_port)
    if found is None or (port is not None and port >= 65536):
        raise ValueError(
            f"the rendezvous endpoint is `{text}`, must be HOST, HOST:PORT or [IPV6]:PORT with a port from 0 to 65535"
        )
    if port is None:
        raise ValueError(f"the rendezvous endpoint is `{text}`, must name a port: {text}:PORT")
    return found[1] or found[2], port


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
    import ipaddress  # few need it

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


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


def shown_defaults() -> str:
    """Return all keys with their defaults, as ``--rdzv-conf`` would be given them."""
    defaults = RendezvousConfig()
    pairs = ((key, getattr(defaults, key)) for key in vars(defaults))
    return ", ".join(
        key if value is None else f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in pairs
    )


def _unknown(key: str) -> str:
    import difflib  # costs more than all else here, and errors alone need it

    known = sorted([*_KEYS, *_WITHOUT_EFFECT, "timeout"])
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
    return f"--rdzv-conf has the unknown key `{key}`: {hint}"


def _seconds(allowed: str, holds: Callable[[float], bool], *, most: float = 315_360_000) -> Callable[[str, Any], float]:
    # Without `most`, ten years. Limits that other nodes have to wait for have the core's bound.
    if most < 315_360_000:
        allowed += f", at most {most:g}"

    def check(key: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        # No comparison holds for what is not a number.
        if isinstance(value, bool) or not number <= most or not holds(number):
            raise ValueError(f"--rdzv-conf {key} is `{value}`, must be a number of seconds{allowed}")
        return number

    return check


def _above_zero(number: float) -> bool:
    return number > 0


def _not_negative(number: float) -> bool:
    return number >= 0


_positive = _seconds(" above zero", _above_zero)
_zero_or_more = _seconds(", zero or more", _not_negative)
# What a silent or absent node may cost the others: the bounds of Settings::validate (src/rendezvous/protocol).
LONGEST_LEASE_S, _LONGEST_GRACE_S, _LONGEST_WAIT_S = 3600, 60, 86_400
_keep_alive = _seconds(", 0.01 or more", lambda number: number >= 0.01, most=LONGEST_LEASE_S)


def _integer(lowest: int, highest: int) -> Callable[[str, Any], int]:
    def check(key: str, value: Any) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = lowest - 1
        if isinstance(value, bool) or not lowest <= number <= highest:
            raise ValueError(f"--rdzv-conf {key} is `{value}`, must be a whole number from {lowest} to {highest}")
        return number

    return check


def _boolean(key: str, value: Any) -> bool:
    # The words that torch's RendezvousParameters.get_as_bool accepts.
    text = str(value).lower()
    if text in {"1", "true", "t", "yes", "y"}:
        return True
    if text in {"0", "false", "f", "no", "n"}:
        return False
    raise ValueError(f"--rdzv-conf {key} is `{value}`, must be one of 1, true, t, yes, y, 0, false, f, no, n")


def _tcp_only(key: str, value: Any) -> str:
    if str(value).strip().lower() != "tcp":
        raise ValueError(f"--rdzv-conf {key} is `{value}`, must be `tcp`: this backend has its own store")
    return "tcp"


def _one_of(first: str, second: str) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        text = str(value).strip().lower()
        if text not in {first, second}:
            raise ValueError(f"--rdzv-conf {key} is `{value}`, must be `{first}` or `{second}`")
        return text

    return check


_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "join_timeout": _positive,
    "last_call_timeout": _seconds(" above zero", _above_zero, most=_LONGEST_WAIT_S),
    "close_timeout": _positive,
    "keep_alive_interval": _keep_alive,
    "keep_alive_max_attempt": _integer(1, 1000),
    "read_timeout": _positive,
    "is_host": _boolean,
    "settle_timeout": _seconds(", zero or more", _not_negative, most=_LONGEST_WAIT_S),
    "reconnect_grace": _seconds(", zero or more", _not_negative, most=_LONGEST_GRACE_S),
    "coordinator_timeout": _positive,
    "drain_timeout": _zero_or_more,
    "exit_barrier_timeout": _zero_or_more,
    "node_rank": _integer(0, 2**31 - 1),
    "on_partition": _one_of("stop", "continue"),
    "agent": _one_of("rust", "torch"),
    "restart_budget": _one_of("job", "node"),
    "rejoin_limit": _integer(0, 1000),
    "rejoin_window": _seconds(" above zero", _above_zero, most=_LONGEST_WAIT_S),
}

# PyTorch's keys that have nothing to act on here: checked, then dropped.
_WITHOUT_EFFECT: dict[str, Callable[[str, Any], Any]] = {
    "heartbeat": _positive,  # what PyTorch's documentation calls the next one
    "heartbeat_timeout": _positive,
    "cas_backoff_max_seconds": _zero_or_more,
    "store_type": _tcp_only,
}
