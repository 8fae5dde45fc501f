"""One node of a job, from a parsed command line until its part has ended: of ``elastic-run``, and of ``launch``.

Nothing here prints, ends the process, or changes its environment.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_rs import _elastic_rs, _signal_options
from elastic_rs._elastic_rs import Launched, LaunchOptions, Protection, Signals
from elastic_rs.rendezvous import _protection
from elastic_rs.rendezvous._config import endpoint_of, warn_of_loopback, warn_of_no_endpoint
from elastic_rs.rendezvous._etcd import own_address
from elastic_rs.rendezvous._node import claim, shares_store, why_not_host
from elastic_rs.run import _cpus, _options, _script
from elastic_rs.run._options import Rendezvous
from elastic_rs.run._script import other_environment
from elastic_rs.run._usage import UsageError

logger = logging.getLogger("elastic_rs.run")

SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""The variable by which workers get the names of the signals, as from torchrun."""


class CannotError(Exception):
    """This node cannot go on, for a reason that concerns no other.

    Attributes:
        kind: the name of the exception that torchrun raises.
        text: the reason.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


@dataclass(frozen=True)
class End:
    """How this node's part in a job ended.

    Attributes:
        launched: the core's words for it.
        entrypoint: what the workers ran, for a report.
        conf: the values of ``--rdzv-conf``.
        hint: a probable reason for a coordinator that cannot be reached.
    """

    launched: Launched
    entrypoint: str
    conf: Mapping[str, object]
    hint: str = ""

    @property
    def why_no_placement(self) -> CannotError:
        """Why this node could not join."""
        text = self.launched.reason or "this node could not join the job"
        if self.launched.error == "RendezvousConnectionError" and self.hint:
            text += f"; {self.hint}"
        return CannotError(self.launched.error or "RuntimeError", text)


def run(
    args: argparse.Namespace, report: Callable[[str], None], *, is_driven: bool = False, takes_signals: bool = True
) -> End:
    """Meet the other nodes, run the workers, and return how it ended. No process of them is left then.

    Args:
        args: the parsed command line.
        report: as of :func:`elastic_rs.run.main`.
        is_driven: a driver has started this process.
        takes_signals: this process's signals are the agent's meanwhile. If not, none ends the workers.

    Raises:
        UsageError: the command line is not valid. Nothing has been started.
        CannotError: this node cannot go on.
    """
    meeting, local_addr = _options.rendezvous_of(args), _options.local_addr_of(args)
    options = _options.launch_options_of(args, meeting.config)
    handled = None
    if takes_signals:
        handled = _elastic_rs.Signals(
            _options.ending_signals_of(args),
            passed_on=_signal_options.passed_on(options.workers.forwarded_signals, options.workers.preempt),
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
        warn_of_loopback(meeting.endpoints, meeting.config, meeting.nodes[1], flag)
    warn_of_node_rank(args)
    # The variables that torchrun sets in its own environment, which workers inherit.
    variables = {SIGNALS: args.signals_to_handle}
    variables |= _cpus.omp_threads(args.omp_threads, options.workers.local_world_size)
    return _take_part(
        meeting, local_addr, options, handled, report, protected=protected, variables=variables, is_driven=is_driven
    )


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
    handled: Signals | None,
    report: Callable[[str], None],
    *,
    protected: Protection | None,
    variables: dict[str, str],
    is_driven: bool,
) -> End:
    config, etcd = meeting.config, meeting.etcd
    where = ",".join(endpoint_of(*endpoint) for endpoint in meeting.endpoints)
    started = time.monotonic()
    host, why = None, ""
    try:
        if etcd is None:
            host, why = claim(meeting.endpoints, meeting.run_id, config, protected, uses_store=meeting.fixed)
        else:
            local_addr = own_address(local_addr, meeting.nodes[1], etcd)
    except OSError as error:
        hint = ""
        if meeting.fixed and meeting.nodes[1] > 1 and config.node_rank == 0:
            hint = "; node rank 0 hosts it, and this is node rank 0: give each other node a --node-rank of its own"
        raise CannotError(
            "RendezvousConnectionError", f"cannot host the coordinator at {where}: {error.strerror or error}{hint}"
        ) from None
    except RuntimeError as error:
        raise CannotError("RuntimeError", str(error)) from None
    endpoints = meeting.endpoints
    if host is not None and not meeting.others:
        endpoints = [(meeting.host, host.port)]
    try:
        # Until the coordinator has ended and what it recorded is written: a signal then, or one that is delivered
        # twice, must not end this process.
        with handled or contextlib.nullcontext() as signals:
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
                    session = _elastic_rs.Session(endpoints, node, coordinator=host, protection=protected)
                else:
                    session = _elastic_rs.Session.over_etcd(etcd, node, protection=protected)
                fixed_master = endpoints[0] if meeting.fixed else None
                report("accepted")
                launched = _elastic_rs.launch(
                    session,
                    options,
                    signals=signals,
                    fixed_master=fixed_master,
                    # A driver puts the host's name before each line.
                    whole_lines=is_driven,
                    variables=variables,
                )
            finally:
                if host is not None:
                    host.stop()
    except OSError as error:
        raise CannotError("OSError", f"cannot start the agent: {error}") from None
    except RuntimeError as error:
        raise CannotError("RuntimeError", str(error)) from None
    # A driver names the host.
    is_first = launched.failure is not None and f"({node.name})" in launched.failure.node
    report("failed_here" if launched.outcome == "failed" and is_first else launched.outcome)
    hint = why_not_host(why, started) if why and not session.was_welcomed else ""
    if host is not None and (launched.reason or "").startswith("could not reach the coordinator"):
        hint = f"this process hosts it, so `{meeting.host}` must be an address of this machine"
        hint += ", which has node rank 0" if meeting.fixed and config.node_rank == 0 else ""
    return End(launched, options.workers.entrypoint, config.values(), hint)


def warn_of_node_rank(args: argparse.Namespace) -> None:
    """Warn of a rank that has no effect."""
    if args.node_rank != 0 and args.rdzv_backend != "static":
        logger.warning(
            "--node-rank is `%d` and has no effect with --rdzv-backend=%s; --rdzv-conf node_rank=%d asks for a rank",
            args.node_rank,
            args.rdzv_backend,
            args.node_rank,
        )
