"""The flags of ``elastic-run`` for jobs whose hosts it starts itself, and how they are told from the agents' flags."""

from __future__ import annotations

import argparse
import os

from elastic_rs.run._command_line import CheckEnv, Help, adder, seconds, whole
from elastic_rs.run._usage import PROG, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["DEFAULTS", "FLAGS", "VARIABLES", "add_host_flags", "is_driver", "rest_of"]

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


class Given(argparse.Action):
    """A flag of this module: ``PET_`` and its name is its variable, and it cannot be abbreviated."""

    exact = True

    def __init__(self, dest: str, **kwargs: Any) -> None:
        given = os.environ.get(f"PET_{dest.upper()}")
        # argparse converts a text at once.
        two = given is not None and kwargs.get("nargs") == 2
        super().__init__(dest=dest, default=given.replace(",", " ").split() if given and two else given, **kwargs)

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class Switch(CheckEnv):
    """A switch of this module."""

    exact = True


def add_host_flags(group: Any) -> None:
    """Add the flags to a parser or a group."""
    add, switch = adder(group, Given), adder(group, Switch)
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
    add("--min-np", type=whole, metavar="N", help="fewest workers (all slots of fixed hosts, else 1)")
    add("--max-np", type=whole, metavar="N", help="most workers; further hosts are spares (no limit)")
    add("--slots-per-host", type=whole, metavar="N", help="slots of a host without a number (--nproc-per-node, or 1)")
    add("--start-timeout", type=seconds, metavar="SECONDS", help="limit for an agent's start on a host (30)")
    add("--elastic-timeout", type=seconds, metavar="SECONDS", help="limit for having fewer than --min-np slots (600)")
    add("--reset-limit", type=whole, metavar="N", help="restarts and changes of the world, together (no limit)")
    add("--host-failures", type=whole, metavar="N", help="failures within an hour that put a host out; 0: none do (3)")
    add(
        "--blacklist-cooldown-range",
        type=seconds,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="seconds that a host is out: the first time, and at most (for the whole job)",
    )
    add("--discovery-interval", type=seconds, metavar="SECONDS", help="time between two discoveries (1)")
    add("--discovery-timeout", type=seconds, metavar="SECONDS", help="limit for a discovery (30)")
    add("--ssh", metavar="COMMAND", help='ssh, with options: "ssh -F config -p 2222" (ssh)')
    add("--remote-python", metavar="PATH", help="Python with elastic_rs on the hosts (the path of this one)")
    switch("--detach", help="end once all agents run; the first host's hosts the rendezvous")
    switch("--dry-run", help="print what would be run where, and start nothing")


def _only() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False, formatter_class=Help)
    add_host_flags(parser)
    return parser


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
    kinds = {action.dest: action.type for action in _only()._actions}  # noqa: SLF001
    kind: Any = kinds[dest]
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


def rest_of(argv: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the flags of a command line that are not of this module, in their order: those of the agents."""
    end = len(argv) - len(args.training_script_args) - 1
    if argv[end] == "--" != args.training_script:
        end -= 1  # argparse drops a `--` that follows the script at once
    head = list(argv[:end])
    _, rest = _only().parse_known_args([word for word in head if word != "--"])
    return rest
