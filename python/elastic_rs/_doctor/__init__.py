"""``elastic-run doctor``: checks whether a node lacks anything, and prints what to mend. Does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from elastic_rs._doctor import _net, _node
from elastic_rs._doctor._findings import Finding
from elastic_rs._exit_codes import Doctor, in_help
from elastic_rs._health_options import BUILT_IN
from elastic_rs._terminal import print_line
from elastic_rs.rendezvous._node import shares_store
from elastic_rs.rendezvous._protection import decided, protection, refuse_c10d
from elastic_rs.run import _flags, _options, _script
from elastic_rs.run._command_line import Parser, seconds
from elastic_rs.run._usage import PROG, UsageError

DESCRIPTION = """\
Check whether this node lacks anything that the job would need, and print what to mend. Nothing of the job is started.
The flags are those of elastic-run and mean the same, so `doctor` may be put before a whole command line."""

EPILOG = """\
Flags of elastic-run that are not listed are accepted, and so are its PET_* variables. An endpoint without
--rdzv-backend, on a job of one node, is taken for c10d's.

examples:
  check this machine alone
    elastic-run doctor
  check also whether this node finds the others
    elastic-run doctor --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29400
  check also whether this machine is well, as before a join
    elastic-run doctor --join --health-check=/opt/check-node.sh
  check the etcd cluster over which the nodes meet
    elastic-run doctor --nnodes=4 --rdzv-backend=rust-etcd --rdzv-endpoint=h1:2379,h2:2379,h3:2379

Each line begins with ok, with note (which matters to some jobs), or with mend. The line after mend says what to do.
A script named doctor is run by `elastic-run ./doctor` or `elastic-run -- doctor`.

""" + in_help(Doctor)

SHOWN = {
    "help", "nnodes", "nproc_per_node", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
    "local_addr", "node_rank", "master_addr", "master_port", "log_dir", "health_check", "network_timeout", "join",
}  # fmt: skip
"""Flags that change the answers. ``--help`` lists no others."""

LONGEST_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Check this node, print the findings, and return the exit code.

    Raises:
        UsageError: the command line is not valid.
    """
    args = _flags.parse(argv, _parser(), needs_script=False)
    try:
        to_mend = _print(_look(args))
    except UsageError as error:
        error.name_variables(args.variables)
        raise
    print_line(f"{to_mend} to mend" if to_mend else "nothing has to be mended")
    return Doctor.TO_MEND if to_mend else Doctor.HEALTHY


def look(argv: Sequence[str]) -> Iterator[Finding]:
    """Check this node with these flags, and yield the findings.

    Raises:
        UsageError: the command line, or a variable that stands for a flag, is not valid.
    """
    yield from _look(_flags.parse(argv, _parser(), needs_script=False))


def _print(findings: Iterator[Finding]) -> int:
    """Print findings, and return how many have to be mended."""
    to_mend = 0
    for finding in findings:
        # Each as soon as it is known, because some questions take seconds.
        print_line(str(finding))
        to_mend += finding.verdict == "mend"
    return to_mend


def _look(args: argparse.Namespace) -> Iterator[Finding]:
    limit_s = args.network_timeout
    if not 0 < limit_s <= LONGEST_S:
        raise UsageError(f"--network-timeout is `{limit_s:g}`, must be above 0 s and at most {LONGEST_S:g}")
    nodes = _options.nodes_of(args.nnodes)
    if args.rdzv_endpoint and args.rdzv_backend == "static" and nodes[1] == 1:
        # Fixed ranks for one node, with an endpoint: nobody asks the doctor about that.
        args.rdzv_backend = "c10d"
    # Everything that may be wrong with the command line, before anything is printed.
    meeting = _options.rendezvous_of(args)
    workers = _workers(args.nproc_per_node)
    health_check = _options.health_check_of(args)
    try:
        if meeting.fixed:
            refuse_c10d("--rdzv-backend=static")
        secured = protection()
        if not _options.is_alone(args, nodes) and not meeting.fixed:
            meeting.config = decided(meeting.config, own_store=shares_store())
    except ValueError as error:
        raise UsageError(str(error)) from None
    tunnel = bool(meeting.config.store_tunnel)
    yield from _node.findings(
        args.nproc_per_node,
        workers,
        nodes[1],
        args.log_dir,
        limit_s,
        tunnel=tunnel,
        protected=secured is not None,
        peers=str(meeting.config.values()["store_peers"]),
    )
    if args.join:
        yield _node.joins(None if health_check in {None, BUILT_IN} else health_check)
    if args.training_script:
        yield _node.script(args.training_script, _script.why_not(args))
    if meeting.etcd is not None:
        yield from _net.findings_over_etcd(meeting, meeting.etcd, args.local_addr, limit_s)
        return
    alone = _options.is_alone(args, nodes)
    given = bool(args.rdzv_endpoint or (meeting.fixed and args.master_addr != "127.0.0.1"))
    yield from _net.findings(meeting, args.local_addr, limit_s, alone=alone, given=given)


def _workers(text: str) -> int | None:
    """Read ``--nproc-per-node``. None for kinds of devices, which may need PyTorch to count them."""
    if text != "cpu" and text.isidentifier():
        return None
    return _options.workers_of(text)


def _parser() -> Parser:
    made = _flags.parser(f"{PROG} doctor [flags] [SCRIPT ...]", DESCRIPTION, EPILOG, SHOWN)
    flags = made.section("flags of doctor")
    flags.plain(
        "--network-timeout",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long each question to the network, a name server or a driver may take (5)",
    )
    flags.plain(
        "--join",
        action="store_true",
        help="check also what --health-check has each node check before it joins: builtin, and its command, if one is "
        "given; that takes 30 s at most",
    )
    return made
