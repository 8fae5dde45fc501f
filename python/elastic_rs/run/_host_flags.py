"""The flags of ``elastic-run`` for jobs whose hosts it starts itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from elastic_rs.run._command_line import Section, seconds, whole
from elastic_rs.run._usage import UsageError

SOURCES = ("hosts", "hostfile", "host_discovery_script", "host_discovery")
"""The flags that name hosts, as attributes. One of them makes the command a driver."""

DEFAULTS = {
    "start_timeout": 30.0,
    "elastic_timeout": 600.0,
    "discovery_interval": 1.0,
    "discovery_timeout": 30.0,
    "ssh": "ssh",
}
"""Defaults of flags. The parsed value of a flag that is not given is None."""


NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("min_np", "max_np", "slots_per_host", "reset_limit", "host_failures"), whole),
    **dict.fromkeys(
        ("start_timeout", "elastic_timeout", "blacklist_cooldown_range", "discovery_interval", "discovery_timeout"),
        seconds,
    ),
}
"""How each number is read."""


def add_host_flags(section: Section) -> None:

    def add(name: str, **kwargs: Any) -> None:
        section.flag(name, own=True, type=NUMBERS.get(name[2:].replace("-", "_")), **kwargs)

    add("--hosts", short="-H", metavar="HOST[:SLOTS],...", help="hosts, and how many workers each takes")
    add("--hostfile", metavar="FILE", help="a file with HOST slots=N in each line")
    add(
        "--host-discovery-script",
        metavar="PROGRAM",
        help="a program that prints HOST[:SLOTS] lines, run again and again while the job runs",
    )
    add(
        "--host-discovery",
        metavar="slurm|dns:NAME|file:PATH|MODULE:CLASS",
        help="other ways to find hosts, or a class of yours (elastic_rs.discovery.HostDiscovery)",
    )
    add("--min-np", metavar="N", help="fewest workers (all slots of fixed hosts, else 1)")
    add("--max-np", metavar="N", help="most workers; further hosts are spares (no limit)")
    add("--slots-per-host", metavar="N", help="slots of a host without a number (--nproc-per-node, or 1)")
    add("--start-timeout", metavar="SECONDS", help="limit for an agent's start on a host (30)")
    add("--elastic-timeout", metavar="SECONDS", help="limit for having fewer than --min-np slots (600)")
    add("--reset-limit", metavar="N", help="restarts and changes of the world, together (no limit)")
    add("--host-failures", metavar="N", help="failures within an hour that put a host out; 0: none do (3)")
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds that a host is out: the first time, and at most (for the whole job)",
    )
    add("--discovery-interval", metavar="SECONDS", help="time between two discoveries (1)")
    add("--discovery-timeout", metavar="SECONDS", help="limit for a discovery (30)")
    add("--ssh", metavar="COMMAND", help='ssh, with options: "ssh -F config -p 2222" (ssh)')
    add("--remote-python", metavar="PATH", help="Python with elastic_rs on the hosts (the path of this one)")
    section.switch("--detach", own=True, help="end once all agents run; one of the first three leads the job")
    section.switch("--dry-run", own=True, help="print what would be run where, and start nothing")


FLAGS = (
    *SOURCES,
    "min_np",
    "max_np",
    "slots_per_host",
    "start_timeout",
    "elastic_timeout",
    "reset_limit",
    "host_failures",
    "blacklist_cooldown_range",
    "discovery_interval",
    "discovery_timeout",
    "ssh",
    "remote_python",
    "detach",
    "dry_run",
)
"""All flags of this module, as attributes."""

MAY_BE_0 = {"reset_limit", "host_failures"}
"""Limits that may be 0, as their keys of ``--rdzv-conf``: the world never changes, and no host is put out."""

VARIABLES = tuple(f"PET_{dest.upper()}" for dest in FLAGS)
"""Variables that agents must not see: they would become drivers."""


def is_driver(args: argparse.Namespace, *, discovers: bool = False) -> bool:
    """Whether the command line names hosts, or the caller has a discovery that does.

    Raises:
        UsageError: it names them in two ways, or has flags that mean nothing without hosts.
    """
    given = [dest for dest in FLAGS if getattr(args, dest) is not None and getattr(args, dest) is not False]
    sources = [dest for dest in given if dest in SOURCES]
    ways = [*map(_flag, sources), *(["discovery"] if discovers else [])]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} are given, must be one of them")
    if given and not ways:
        raise UsageError(
            f"{_flag(given[0])} is given without hosts, which {', '.join(map(_flag, SOURCES[:-1]))} or "
            f"{_flag(SOURCES[-1])} names"
        )
    for dest in given:
        value = getattr(args, dest)
        setattr(args, dest, _number(dest, value) if dest not in {*SOURCES, "ssh", "remote_python"} else value)
    return bool(ways)


def _flag(dest: str) -> str:
    return "-H" if dest == "hosts" else f"--{dest.replace('_', '-')}"


def _number(dest: str, value: Any) -> Any:
    """Check a number, which is a text if it comes from a variable."""
    kind = NUMBERS.get(dest)
    if kind is None:
        return value
    try:
        if dest == "blacklist_cooldown_range":
            low, high = map(kind, value)
            if not 0 < low <= high <= 86400:
                raise ValueError
            return low, high
        number = kind(value)
        if not 0 <= number < 2**31 or (number == 0 and dest not in MAY_BE_0):
            raise ValueError
    except (ValueError, argparse.ArgumentTypeError):
        allowed = "0 or more" if dest in MAY_BE_0 else "above 0"
        if dest == "blacklist_cooldown_range":
            allowed = "LOW and HIGH with 0 < LOW <= HIGH <= 86400"
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        raise UsageError(f"{_flag(dest)} is `{shown}`, must be {allowed}") from None
    return number
