"""``elastic-run``: torchrun's command line, without torch. Also ``python -m elastic_rs.run``.

The core runs the agent (``src/launcher/launch``); this module reads the command line for it and says how it ended.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import contextlib
    import logging
    import os
    import time
    from collections.abc import Callable, Sequence
    from typing import TYPE_CHECKING

    from elastic_rs import _elastic_rs
    from elastic_rs._elastic_rs import Launched, LaunchOptions, Protection, Signals
    from elastic_rs._logging import show_logs_if_asked
    from elastic_rs._terminal import error_line, shows_colours
    from elastic_rs.rendezvous import _protection
    from elastic_rs.rendezvous._config import warn_of_loopback, warn_of_no_endpoint
    from elastic_rs.rendezvous._etcd import own_address
    from elastic_rs.rendezvous._node import claim, shares_store, why_not_host
    from elastic_rs.run import _cpus, _options, _script
    from elastic_rs.run._flags import misplaced, parse, warn_of_variables
    from elastic_rs.run._host_flags import is_driver
    from elastic_rs.run._options import Rendezvous
    from elastic_rs.run._path import record
    from elastic_rs.run._script import NoScriptError, other_environment
    from elastic_rs.run._usage import PROG, UsageError, fail
except KeyboardInterrupt:
    # As in `main`, which is not defined yet.
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from elastic_rs.discovery import HostDiscovery

__all__ = ["main"]

logger = logging.getLogger("elastic_rs.run")

FAILED = 1
INTERRUPTED = 130


def _report_to_nobody(_: str) -> None:
    """No driver has started this agent: there is nobody to report to."""


def main(
    args: Sequence[str] | None = None,
    *,
    discovery: HostDiscovery | None = None,
    report: Callable[[str], None] = _report_to_nobody,
) -> int:
    """Run the workers of one node until the job has ended, or check the node (``doctor``), and return the exit code.

    With hosts (``-H`` and the like) agents on those do that, which are started here.

    It handles signals in whichever thread it is called, for one job at a time, and what they did before is what they do
    afterwards. A command line that is not understood ends the process with 2.

    Args:
        args: the command line; that of this process if None.
        discovery: finds the hosts, instead of ``-H`` and the like.
        report: for an agent that a driver has started. If this node gets so far, it is called with ``accepted``, and
            then with :attr:`elastic_rs._elastic_rs.Launched.outcome`; or with ``refused`` if this command line fails on
            every node, or ``lacks_script`` if this node does not have the script. Such an agent ends with 0 if it joins
            after the job has succeeded. For any other node that is an error, as for torchrun.
    """
    argv = sys.argv[1:] if args is None else list(args)
    try:
        return _run(argv, discovery, report)
    except UsageError as error:
        if error.everywhere:
            report("refused")
        elif isinstance(error, NoScriptError):
            report("lacks_script")
        fail(str(error), hint=error.hint)
    except KeyboardInterrupt:
        # Before the core has taken the signals, or after it has given them back.
        return INTERRUPTED


def _run(argv: Sequence[str], discovery: HostDiscovery | None, report: Callable[[str], None]) -> int:
    if argv[:1] == ["doctor"]:
        from elastic_rs import _doctor

        return _doctor.main(argv[1:])
    args = parse(argv)
    show_logs_if_asked()
    is_driven = report is not _report_to_nobody
    if not is_driven:  # else the driver has warned
        warn_of_variables()
        if text := misplaced(args):
            logger.warning("%s", text)
    try:
        return _start(argv, args, discovery, report, is_driven=is_driven)
    except UsageError as error:
        error.name_variables(args.variables)
        raise


def _start(
    argv: Sequence[str],
    args: argparse.Namespace,
    discovery: HostDiscovery | None,
    report: Callable[[str], None],
    *,
    is_driven: bool,
) -> int:
    """Do what a command line says that has been parsed."""
    _cpus.check_omp_threads(args.omp_threads)
    if not is_driven and is_driver(args, discovers=discovery is not None):
        from elastic_rs.run._driver import drive

        if text := other_environment(no_python=args.no_python):
            logger.warning("%s", text)
        return drive(argv, args, discovery)
    if why := _options.why_torch(args):
        from elastic_rs.run._torch import hand_over

        hand_over(argv, args, why)
        return 0
    meeting, local_addr = _options.rendezvous_of(args), _options.local_addr_of(args)
    options = _options.launch_options_of(args)
    handled = _elastic_rs.Signals(
        _options.signals_of(args.signals_to_handle),
        named=args.signals_named,
        driven=is_driven,
    )
    _script.check(args)
    if not is_driven and (text := other_environment(no_python=args.no_python)):
        logger.warning("%s", text)
    protected = _protected(meeting, alone=_options.is_alone(args, meeting.nodes))
    if not meeting.fixed and meeting.etcd is None and not args.rdzv_endpoint:
        warn_of_no_endpoint(meeting.nodes[1], meeting.port)
    elif meeting.etcd is None:
        flag = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr"
        warn_of_loopback(meeting.host, meeting.port, meeting.config, meeting.nodes[1], flag)
    _prepare_environment(args)
    _cpus.set_omp_threads(args.omp_threads, options.workers.local_world_size)
    return _take_part(meeting, local_addr, options, handled, report, protected=protected)


def _protected(meeting: Rendezvous, *, alone: bool) -> Protection | None:
    """Return how sessions with the coordinator are protected. Decides the ``store_tunnel`` of ``meeting``."""
    try:
        if alone or (meeting.port == 0 and meeting.nodes[1] == 1 and meeting.etcd is None):
            # Only other users of this machine could reach the coordinator.
            meeting.config.check_workers_store(is_protected=True, own_store=shares_store())
            return _elastic_rs.Protection.by_token(_elastic_rs.new_token())
        if meeting.fixed:
            _protection.refuse_c10d("--rdzv-backend=static")
        own_store = not meeting.fixed and shares_store()
        meeting.config = _protection.decided(meeting.config, own_store=own_store)
        tunnel = _protection.tunnel_protection(meeting.config, own_store=own_store)
        protection = tunnel or _protection.protection()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if protection is not None and meeting.etcd is not None and tunnel is None:
        logger.warning(
            "%s has no effect over etcd, where a job has no coordinator: only etcd's own users and TLS protect it",
            _protection.TLS_CERT if protection.key_ids is None else _protection.TOKEN_FILE,
        )
    return protection


def _take_part(
    meeting: Rendezvous,
    local_addr: str | None,
    options: LaunchOptions,
    handled: Signals,
    report: Callable[[str], None],
    *,
    protected: Protection | None,
) -> int:
    """Meet the other nodes, run the workers, and return the exit code."""
    config, etcd, where = meeting.config, meeting.etcd, f"{meeting.host}:{meeting.port}"
    started = time.monotonic()
    host, why = None, ""
    try:
        if etcd is None:
            host, why = claim(meeting.host, meeting.port, config, protected, uses_store=meeting.fixed)
        else:
            local_addr = own_address(local_addr, meeting.nodes[1], etcd)
    except OSError as error:
        hint = ""
        if meeting.fixed and meeting.nodes[1] > 1 and config.node_rank == 0:
            hint = "; node rank 0 hosts it, and this is node rank 0: give each other node a --node-rank of its own"
        return _cannot(
            "RendezvousConnectionError", f"cannot host the coordinator at {where}: {error.strerror or error}{hint}"
        )
    except RuntimeError as error:
        return _cannot("RuntimeError", str(error))
    port = meeting.port if host is None else host.port
    try:
        # Until the coordinator has ended and what it recorded is written: a signal then, or one that is delivered
        # twice, must not end this process.
        with handled as signals:
            try:
                node = _elastic_rs.NodeOptions(
                    run_id=meeting.run_id,
                    name=f"{os.uname().nodename}:{os.getpid()}",
                    local_addr=local_addr,
                    nodes=meeting.nodes,
                    config=config,
                    max_restarts=options.workers.max_restarts if config.job_counts else None,
                    ranks_as_asked=meeting.fixed,
                    # As PyTorch's `static` and `c10d` do.
                    use_agent_store=meeting.fixed or shares_store(),
                )
                if etcd is None:
                    session = _elastic_rs.Session(meeting.host, port, node, coordinator=host, protection=protected)
                else:
                    session = _elastic_rs.Session.over_etcd(etcd, node, protection=protected)
                fixed_master = (meeting.host, port) if meeting.fixed else None
                report("accepted")
                launched = _elastic_rs.launch(
                    session,
                    options,
                    signals=signals,
                    fixed_master=fixed_master,
                    # A driver puts the host's name before each line.
                    whole_lines=report is not _report_to_nobody,
                )
            finally:
                if host is not None:
                    host.stop()
    except OSError as error:
        return _cannot("OSError", f"cannot start the agent: {error}")
    except RuntimeError as error:
        return _cannot("RuntimeError", str(error))
    # A driver names the host.
    is_first = launched.failure is not None and f"({node.name})" in launched.failure.node
    report("failed_here" if launched.outcome == "failed" and is_first else launched.outcome)
    hint = why_not_host(why, started) if why and not session.was_welcomed else ""
    if host is not None and (launched.reason or "").startswith("could not reach the coordinator"):
        hint = f"this process hosts it, so `{meeting.host}` must be an address of this machine"
        hint += ", which has node rank 0" if meeting.fixed and config.node_rank == 0 else ""
    return _report_end(launched, options.workers.entrypoint, hint, driven=report is not _report_to_nobody)


def _prepare_environment(args: argparse.Namespace) -> None:
    """Set the variables that torchrun sets in its own environment and that workers inherit."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = args.signals_to_handle
    if args.node_rank != 0 and args.rdzv_backend != "static":
        logger.warning(
            "--node-rank is `%d` and has no effect with --rdzv-backend=%s; --rdzv-conf node_rank=%d asks for a rank",
            args.node_rank,
            args.rdzv_backend,
            args.node_rank,
        )


def _report_end(launched: Launched, entrypoint: str, hint: str, *, driven: bool) -> int:
    """Report how the job ended, and return the exit code."""
    match launched.outcome:
        case "succeeded":
            return 0
        case "not_needed":
            logger.info("this node was a spare, and the job ended without needing it")
            return 0
        case "too_late" | "succeeded_before" if driven:
            logger.info("the job had succeeded before this node could join it")
            return 0
        case "succeeded_before":
            logger.warning("%s; this node has nothing to do, and ends with 0", launched.reason)
            return 0
        case "signal":
            return 128 + (launched.signal or 0)
        case "failed" | "unfit":
            from elastic_rs.run import _report

            found = _report.failures(launched)
            text = _report.report(entrypoint, found, colours=shows_colours(sys.stderr))
            sys.stderr.write(f"{text}\n")
            _report.hand_up(found[_report.root_cause(found)])
            return FAILED
        case _:
            text = launched.reason or "this node could not join the job"
            if launched.error == "RendezvousConnectionError" and hint:
                text += f"; {hint}"
            return _cannot(launched.error or "RuntimeError", text)


def _cannot(kind: str, text: str) -> int:
    """Report why this node cannot go on, with the name of torchrun's exception."""
    sys.stderr.write(error_line(PROG, f"{kind}: {text}\n"))
    with contextlib.suppress(OSError):  # if no descriptor is left, imports fail too
        record(f"{kind}: {text}", "")
    return FAILED


def __dir__() -> list[str]:
    return list(__all__)
