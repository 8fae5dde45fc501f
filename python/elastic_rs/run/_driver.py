"""``elastic-run`` with hosts: hosts the coordinator, and has the core start an agent on each host."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rs import _elastic_rs, _python
from elastic_rs._elastic_rs import Driver, EndpointServer, Protection, RendezvousConfig, Signals
from elastic_rs._exit_codes import Run, of_end
from elastic_rs._hosted import command_line
from elastic_rs._logging import draw_run_id
from elastic_rs._observe._served import serve_pages
from elastic_rs._terminal import error_line, print_line
from elastic_rs.discovery._programs import DiscoveryError
from elastic_rs.discovery._sources import FileHosts, FixedHosts, HostDiscovery, HostDiscoveryScript
from elastic_rs.rendezvous._config import (
    DEFAULT_PORT,
    RUST_C10D,
    config_of,
    endpoint_of,
    parse_conf,
    parse_endpoint,
    parse_endpoints,
)
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._protection import certificates, decided, protection
from elastic_rs.run import _options, _script
from elastic_rs.run._flags import split
from elastic_rs.run._host_flags import DEFAULTS, FLAGS, VARIABLES
from elastic_rs.run._usage import PROG, UsageError

logger = logging.getLogger("elastic_rs.run")

GOODBYE_S = 15.0
"""Time that an agent may take to leave, beyond the grace of its workers."""
LISTED = 3
"""Of so many of the first hosts one leads a job without a driver. Each may die."""
NO_LIMIT = 2**31 - 1
MOST_NODES = 65535
LAST_CALL_S = 2
"""Agents start at the same time, so the last one joins soon after the first."""
JOIN_S = 600.0
"""Shortest ``join_timeout`` of agents. It is PyTorch's default."""
LONGER_S = 60.0
"""How much longer than ``--elastic-timeout`` agents wait for a world. The driver has ended them by then."""
LONGEST_S = 10 * 365 * 86400.0
"""Longest ``join_timeout`` that is allowed."""

OF_A_LOGIN = {
    *("_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "HOST", "HOME", "USER", "LOGNAME", "SHELL", "MAIL"),
    *("DISPLAY", "XAUTHORITY"),
}
"""Variables of this host's login. The other hosts have their own."""
OF_A_SESSION = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")


def drive(argv: Sequence[str], args: argparse.Namespace, given: HostDiscovery | None = None) -> int:
    """Run a job on hosts until it has ended, and return the exit code.

    Raises:
        UsageError: the command line is not valid.
    """
    _check(args)
    slots = _default_slots(args)
    discovery, fixed = _discovery_of(args, slots) if given is None else (given, _fixed(given))
    least, most = _bounds(args, fixed)
    endpoint, port = _endpoint_of(args)
    signals, passed_on = _options.ending_signals_of(args), _options.meanings_of(args).passed_on
    handled = _elastic_rs.Signals(signals, passed_on=passed_on, named=args.signals_named)
    flags = [*split(argv).words(without=FLAGS), f"--nnodes=1:{MOST_NODES}"]
    protected = _protected()
    run_id = draw_run_id() if args.rdzv_id in {"", "none"} else args.rdzv_id
    conf, config = _conf_of(args, (least, most))
    listed = None
    if args.detach:
        endpoint, listed = _endpoint_of_detached(args, fixed, config)
    job = _job(args, flags, conf, endpoint, (signals, passed_on), run_id=run_id, protected=protected)
    if args.dry_run:
        options = _options_of(args, least, fixed is not None, job, port, run_id=run_id, passed_on=passed_on)
        return _show(_elastic_rs.Driver(options), discovery, job, port)
    if args.detach:
        options = _options_of(args, least, True, job, port, run_id=run_id, passed_on=passed_on, listed=listed)
        driver = _elastic_rs.Driver(options)
        return _run(driver, None, discovery, None, handled, config=config)
    try:
        host = _elastic_rs.EndpointServer.listen(None, port, protection=protected)
    except OSError as error:
        return _cannot(f"cannot host the coordinator at port {port}: {error.strerror or error}")
    serve_pages(host)
    try:
        driver = _elastic_rs.Driver(
            _options_of(args, least, fixed is not None, job, host.port, run_id=run_id, passed_on=passed_on)
        )
        logger.info("this process hosts the coordinator at port %d", host.port)
        interval_s = None if fixed else _of(args, "discovery_interval")
        return _run(driver, host, discovery, interval_s, handled, config=config)
    finally:
        host.stop()


def _run(
    driver: Driver,
    host: EndpointServer | None,
    discovery: HostDiscovery,
    interval_s: float | None,
    handled: Signals,
    *,
    config: RendezvousConfig,
) -> int:
    from elastic_rs.discovery._poll import Poll

    poll = Poll(discovery, driver, interval_s)
    poll.start()
    try:
        with handled as signals:
            verdict, number, reason = driver.run(signals, host=host)
    except OSError as error:
        return _cannot(f"cannot start the driver: {error}")
    finally:
        poll.stop()
    match verdict:
        case "succeeded":
            logger.info("%s", reason)
            return 0
        case "signal":
            number = number or 0
            end_class = "preempted" if number == signal.SIGTERM else None
            return of_end(config.values(), end_class, otherwise=128 + number)
        case "failed":
            sys.stderr.write(f"{PROG}: {reason}\n")
            return number or Run.FAILED
        case "refused":
            return _cannot(reason, Run.NOT_VALID)
        case _:
            return _cannot(reason, of_end(config.values(), "machine"))


def _cannot(text: str, code: int = Run.FAILED) -> int:
    sys.stderr.write(error_line(PROG, f"{text}\n"))
    return code


def _check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for a flag that must not be given with hosts."""
    if args.nnodes != "1:1":
        raise UsageError(
            f"--nnodes is `{args.nnodes}`, must not be given with hosts: --min-np and --max-np count workers"
        )
    if args.standalone:
        raise UsageError("--standalone must not be given with hosts: agents on other hosts could not join")
    if args.rdzv_backend not in {"static", "c10d", RUST_C10D}:
        raise UsageError(f"--rdzv-backend is `{args.rdzv_backend}`, must be c10d with hosts: the driver hosts it")
    if args.node_rank or args.master_port is not None:
        raise UsageError("--node-rank and --master-port must not be given with hosts: they have ranks by age")
    if args.local_addr:
        raise UsageError("--local-addr must not be given with hosts: each has its own")
    if why := _options.why_torch(args):
        raise UsageError(f"{why} must not be given with hosts: it needs PyTorch's launcher")
    _options.check_output(args)
    _options.command_of(args)
    _script.refuse_python(args)


def _of(args: argparse.Namespace, name: str) -> Any:
    given = getattr(args, name)
    return DEFAULTS[name] if given is None else given


def _default_slots(args: argparse.Namespace) -> int:
    """Return the slots of a host without a number."""
    if args.slots_per_host is not None:
        slots: int = args.slots_per_host
    elif args.nproc_per_node.isdecimal():
        slots = int(args.nproc_per_node)
    else:
        raise UsageError(
            f"--nproc-per-node is `{args.nproc_per_node}`, must be a number with hosts: the driver does not know what "
            "they have; HOST:SLOTS or --slots-per-host says it"
        )
    if not 0 < slots <= _options.MAX_WORKERS:
        raise UsageError(f"--slots-per-host is `{slots}`, must be from 1 to {_options.MAX_WORKERS}")
    return slots


def _discovery_of(args: argparse.Namespace, slots: int) -> tuple[HostDiscovery, dict[str, int] | None]:
    """Return where hosts come from, and which they are if they never change."""
    try:
        if args.hosts is not None:
            fixed = dict(_elastic_rs.parse_hosts(args.hosts, form="list", default_slots=slots))
            return FixedHosts(fixed), fixed
        if args.hostfile is not None:
            fixed = FileHosts(args.hostfile, slots).find_available_hosts_and_slots()
            if not fixed:
                raise DiscoveryError(f"`{args.hostfile}` names no host")
            return FixedHosts(fixed), fixed
        if args.host_discovery_script is not None:
            return HostDiscoveryScript(
                args.host_discovery_script, slots, timeout_s=_of(args, "discovery_timeout")
            ), None
    except (ValueError, DiscoveryError) as error:
        flag = (
            "-H" if args.hosts is not None else "--hostfile" if args.hostfile is not None else "--host-discovery-script"
        )
        raise UsageError(f"{flag}: {error}") from None
    # Slurm knows how many workers a node takes, if no flag says it.
    is_given = args.slots_per_host is not None or args.nproc_per_node != "1"
    return _named(args.host_discovery, slots, slots if is_given else None), None


def _fixed(discovery: HostDiscovery) -> dict[str, int] | None:
    return discovery.find_available_hosts_and_slots() if isinstance(discovery, FixedHosts) else None


def _named(text: str, slots: int, given: int | None) -> HostDiscovery:
    """Read ``--host-discovery``. A host without a number has so many slots, which a flag may have given."""
    from elastic_rs.discovery import DnsHosts, SlurmHosts

    kind, colon, rest = text.partition(":")
    try:
        if text == "slurm":
            return SlurmHosts(given)
        if kind == "dns" and colon:
            return DnsHosts(rest, slots)
        if kind == "file" and colon:
            return FileHosts(rest, slots)
    except ValueError as error:
        raise UsageError(f"--host-discovery is `{text}`: {error}") from None
    if not colon or not kind or not rest:
        raise UsageError(f"--host-discovery is `{text}`, must be slurm, dns:NAME, file:PATH or MODULE:CLASS")
    sys.path.insert(0, "")  # the current folder
    try:
        made = getattr(importlib.import_module(kind), rest)()
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises
        raise UsageError(f"--host-discovery is `{text}`, which fails: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove("")
    if not hasattr(made, "find_available_hosts_and_slots"):
        raise UsageError(f"--host-discovery is `{text}`, which has no method find_available_hosts_and_slots")
    found: HostDiscovery = made
    return found


def _bounds(args: argparse.Namespace, fixed: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the fewest and the most workers."""
    total = sum(fixed.values()) if fixed is not None else None
    if total == 0:
        raise UsageError("the list of hosts is empty, must name a host")
    least = args.min_np if args.min_np is not None else min(total or 1, args.max_np or total or 1)
    most = args.max_np if args.max_np is not None else total or NO_LIMIT
    if least > most:
        raise UsageError(
            f"--min-np is `{least}`, must not be above --max-np or the slots of all hosts, which is {most}"
        )
    if total is not None and least > total:
        raise UsageError(f"--min-np is `{least}`, must not be above the {total} slots of all hosts")
    return least, most


def _protected() -> Protection:
    """Return the job's protection: by the user's token as it is now, or by one that only driver and agents know.

    With certificates, driver and agents also show these. The driver's variables name the files, on each host its own.
    """
    try:
        given = protection()
        token = None if given is None else given.reveal()
        return _elastic_rs.Protection.by_token(token or _elastic_rs.new_token(), certificates=certificates())
    except ValueError as error:
        raise UsageError(str(error)) from None


def _endpoint_of(args: argparse.Namespace) -> tuple[str | None, int]:
    """Read ``--rdzv-endpoint``: what agents are given, if there is one, and the coordinator's port."""
    if not args.rdzv_endpoint or args.detach:
        return None, 0
    if "," in args.rdzv_endpoint:
        raise UsageError(
            f"--rdzv-endpoint is `{args.rdzv_endpoint}`, must be one endpoint with hosts unless --detach is given: the "
            "driver hosts the rendezvous"
        )
    try:
        _, port = parse_endpoint(args.rdzv_endpoint, None)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    if port == 0:
        raise UsageError("--rdzv-endpoint: the port is `0`, must be one that the agents can know")
    return args.rdzv_endpoint, port


def _endpoint_of_detached(
    args: argparse.Namespace, fixed: Mapping[str, int] | None, config: RendezvousConfig
) -> tuple[str, list[str] | None]:
    """Return where agents meet that run on without the driver: at the first three hosts, or at the first one.

    At one alone if there is no other, or if the endpoints of these hosts cannot be a list (docs/takeover.md).

    Returns:
        The endpoints, and the hosts at which they are if it is a list.
    """
    if args.rdzv_endpoint:
        given: str = args.rdzv_endpoint
        try:
            endpoints = parse_endpoints(given, None, config)
        except ValueError as error:
            raise UsageError(f"--rdzv-endpoint: {error}") from None
        if any(port == 0 for _, port in endpoints):
            raise UsageError("--rdzv-endpoint: the port is `0`, must be one that the agents can know")
        named = {host for host, _ in endpoints}
        return given, [host for host in fixed or () if _name(host) in named] if len(endpoints) > 1 else None
    if fixed is None:
        raise UsageError(
            "--detach without -H or --hostfile needs --rdzv-endpoint=HOST:PORT, where all agents meet: the first host"
        )
    names = [_name(host) for host in fixed]
    if names[0] == "localhost" and len(names) > 1:
        raise UsageError("--detach needs --rdzv-endpoint=HOST:PORT if `localhost` is the first of several hosts")
    first, *others = (endpoint_of(name, DEFAULT_PORT) for name in names[:LISTED])
    listed = ",".join([first, *others])
    try:
        if len({name.lower() for name in names[:LISTED]}) < min(len(names), LISTED):
            raise ValueError("two of the first hosts have one name")
        parse_endpoints(listed, None, config)
    except ValueError as error:
        logger.warning("the job depends on the first host, where all agents meet (%s): %s", first, error)
        return first, None
    return listed, [*fixed][:LISTED] if others else None


def _name(host: str) -> str:
    """Return the name of a host, which may be ``user@host``."""
    return host.rpartition("@")[2]


def _conf_of(args: argparse.Namespace, bounds: tuple[int, int]) -> tuple[str, RendezvousConfig]:
    """Return ``--rdzv-conf`` of the agents, and what it means."""
    try:
        given = parse_conf(args.rdzv_conf)
        _options.take_flags(given, args)
        ours = {} if "last_call_timeout" in given else {"last_call_timeout": str(LAST_CALL_S)}
        if not given.keys() & {"join_timeout", "timeout"}:
            waits_s = min(max(_of(args, "elastic_timeout") + LONGER_S, JOIN_S), LONGEST_S)
            ours["join_timeout"] = str(math.ceil(waits_s))
        ours |= {"min_workers": str(bounds[0]), "max_workers": str(bounds[1])} | _judging(args)
        if doubled := sorted(given.keys() & (ours.keys() | {"host_name", "is_host", "node_rank"})):
            raise UsageError(f"--rdzv-conf has {doubled[0]}, which the driver gives the agents itself")
        # Agents do not know whether the token that they get is one that the user has named.
        config = decided(config_of(given | ours), own_store=shares_store())
        ours["store_tunnel"] = str(int(bool(config.store_tunnel)))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return ",".join(f"{key}={value}" for key, value in (given | ours).items()), config


def _judging(args: argparse.Namespace) -> dict[str, str]:
    """Return the keys that say which hosts the coordinator keeps out, and how often the world may change."""
    keys = {}
    if args.reset_limit is not None:
        keys["reset_limit"] = str(args.reset_limit)
    if args.blacklist_cooldown_range is not None:
        low, high = args.blacklist_cooldown_range
        keys |= {"blacklist_cooldown_min": f"{low:g}", "blacklist_cooldown_max": f"{high:g}"}
    if args.host_failures is not None or args.blacklist_cooldown_range is None:
        keys["host_failures"] = str(3 if args.host_failures is None else args.host_failures)
    return keys


def _job(
    args: argparse.Namespace,
    flags: list[str],
    conf: str,
    endpoint: str | None,
    signals: tuple[list[int], list[int]],
    *,
    run_id: str,
    protected: Protection,
) -> str:
    """Return the job as every agent gets it: one line of JSON."""
    left_out = {*OF_A_LOGIN, *VARIABLES}
    env = {
        name: value for name, value in os.environ.items() if name not in left_out and not name.startswith(OF_A_SESSION)
    }
    script = [args.training_script, *args.training_script_args]
    ending, passed_on = signals
    flags = [*flags, "--rdzv-backend=c10d", f"--rdzv-id={run_id}"]
    return json.dumps(
        {
            "cwd": os.getcwd(),  # noqa: PTH109 - as the shell has it
            "env": env,
            "flags": flags,
            "lacks_script": bool(_script.why_not(args)),
            "conf": conf,
            "endpoint": endpoint,
            "detach": args.detach,
            "token": protected.reveal(),
            "log": f"elastic-run-{run_id.replace('/', '_')[:100]}" if args.detach else None,
            "script": script,
            "leave": int(signal.SIGTERM) if signal.SIGTERM in ending else ending[0],
            "passed_on": passed_on,
        }
    )


def _options_of(
    args: argparse.Namespace,
    least: int,
    fixed: bool,
    job: str,
    port: int,
    *,
    run_id: str,
    passed_on: list[int],
    listed: list[str] | None = None,
) -> _elastic_rs.DriverOptions:
    ssh = shlex.split(_of(args, "ssh"))
    if not ssh:
        raise UsageError("--ssh is empty, must be a program")
    cooldown = args.blacklist_cooldown_range
    timeout_s, interval_s = _of(args, "discovery_timeout"), _of(args, "discovery_interval")
    return _elastic_rs.DriverOptions(
        min_slots=least,
        fixed=fixed,
        detach=args.detach,
        listed=listed,
        start_timeout_s=_of(args, "start_timeout"),
        elastic_timeout_s=_of(args, "elastic_timeout"),
        # A script is killed at its own limit, which its discovery reports as an error. A class of the user's cannot be
        # killed. The driver only notices that no list comes, and waits a little longer for that.
        discovery_timeout_s=timeout_s + interval_s + 1,
        grace_s=_options.grace_of(args) + GOODBYE_S,
        passed_on=passed_on,
        host_failures=(3 if cooldown is None else 1) if args.host_failures is None else args.host_failures,
        window_s=3600.0,
        cooldown_s=cooldown,
        ssh=ssh,
        remote_python=args.remote_python or sys.executable,
        python=sys.executable,
        program=_python.arguments(_python.AGENT),
        job=job,
        port=port,
        run_id=run_id,
    )


def _show(driver: Driver, discovery: HostDiscovery, job: str, port: int) -> int:
    """Print what would be run where."""
    try:
        hosts = discovery.find_available_hosts_and_slots()
        commands = {host: driver.command(host) for host in hosts}
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises
        return _cannot(f"host discovery fails: {error}")
    settings = json.loads(job)
    first = next(iter(hosts), None)
    is_list = "," in (settings["endpoint"] or "")
    if is_list:
        print_line(f"coordinator  on one of these hosts, at {settings['endpoint']}")
    elif settings["detach"]:
        print_line(f"coordinator  on {first}, at {settings['endpoint']}")
    else:
        print_line(f"coordinator  here, at {f'port {port}' if port else 'any free port'}")
    for age, (host, slots) in enumerate(hosts.items()):
        hosts_coordinator = settings["detach"] and host == first and not is_list
        own = {"host": host, "slots": slots, "age": age, "hosts_coordinator": hosts_coordinator}
        # An agent finds out at which address its host sees the driver.
        address = "127.0.0.1" if commands[host][0] == sys.executable else "DRIVER"
        line = command_line(own, settings, settings["endpoint"] or f"{address}:{port or 'PORT'}")
        print_line(f"host         {host}, {slots} slots: {shlex.join(commands[host])}")
        print_line(f"  there      elastic-run {shlex.join(line)}")
    print_line(f"  in         {settings['cwd']}")
    print_line(f"  variables  {' '.join(sorted(settings['env']))}")
    return 0
