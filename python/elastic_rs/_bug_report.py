"""``elastic-rs bug-report``: one file with what a maintainer asks for first, and without secrets.

Events are reduced to what is on a list. Other texts are cleaned of environment values, addresses, names and keys.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs
from elastic_rs._exit_codes import BugReport, in_help
from elastic_rs._observe import _commands, _source
from elastic_rs._terminal import error_line, plain, print_line

if TYPE_CHECKING:
    from elastic_rs._observe._events import Event

LAST_EVENTS = 200

DESCRIPTION = f"""\
Write one file for a bug report: versions, what `elastic-rs doctor` finds, which variables are set, and the last
{LAST_EVENTS} events of a job. It has no values of variables, tokens, keys, host names, addresses, or texts that workers
wrote. Read it before you publish it."""

EPILOG = """\
examples:
  about this node alone
    elastic-rs bug-report
  with the events of a job that runs, or that has ended
    elastic-rs bug-report node0:29400
    elastic-rs bug-report --events logs

""" + in_help(BugReport)

_VARIABLES = ("ELASTIC_RS_", "PET_", "TORCH", "NCCL_", "GLOO_", "MASTER_", "OMP_", "CUDA_", "PYTHON", "SLURM_JOB_ID")
"""What names of variables begin with that are shown, without values."""
_SHORTEST_VALUE = 4
"""A shorter value of a variable, such as ``1``, says nothing, and would be found everywhere."""
_FACTS = {"exit", "how", "kind", "why", "verdict", "phase", "signal", "in_place"}
"""Texts among the data of an event that the core chooses."""
_CHOSEN = re.compile(r"[\w .,()-]{1,40}")
_GROUPS = "[0-9a-f]{1,4}(?::[0-9a-f]{1,4})"
_SECRETS = (
    (re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|\Z)", re.DOTALL), "KEY"),
    (re.compile(r"\b(ssh-\w+|ecdsa-\S+|sk-\S+)\s+\S+"), r"\1 KEY"),
    (re.compile(r"\bAAAA[\w+/]{16,}=*"), "KEY"),
    (re.compile(r"\b(SHA256|MD5):[\w+/:=]{16,}"), r"\1:KEY"),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "HEX"),
    (re.compile(r"(://)[^/\s@]+@"), r"\1USER@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}"), r"\1 HIDDEN"),
    (re.compile(r"(?i)\b(token|password|passwd|secret|api_?key|authorization)\s*[=:]\s*\S+"), r"\1 HIDDEN"),
    (re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])"), "ADDRESS"),
    (re.compile(rf"(?i)(?<![\w:])(?:{_GROUPS}{{7}}|(?:{_GROUPS}*)?::(?:{_GROUPS}*)?)(?![\w:])"), "ADDRESS"),
)


def add_parser(commands: Any) -> None:
    """Add the command to those of ``elastic-rs``."""
    parser = commands.add_parser(
        "bug-report",
        help="one file for a bug report, without secrets",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _commands.add_origin(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="elastic-rs-bug-report.txt",
        help="a new file, or - for standard output (default: %(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.endpoint is not None and args.events is not None:
        print(error_line("elastic-rs", "give an endpoint (HOST[:PORT]) or --events FILE, not both"), file=sys.stderr)
        return BugReport.NOT_VALID
    text = "\n".join(_parts(args)) + "\n"
    if args.output == "-":
        print_line(text.rstrip("\n"))
        return BugReport.WRITTEN
    try:
        with os.fdopen(
            os.open(args.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError as error:
        hint = (
            "remove it, or name another file with -o" if isinstance(error, FileExistsError) else "name a file with -o"
        )
        said = f"cannot write `{plain(args.output)}`: {error.strerror}; {hint}"
        print(error_line("elastic-rs", said), file=sys.stderr)
        return BugReport.CANNOT_WRITE
    print_line(f"wrote {args.output}; read it before you publish it")
    return BugReport.WRITTEN


def _parts(args: argparse.Namespace) -> Iterator[str]:
    import socket

    clean = Cleaner(os.environ, [args.endpoint or "", args.run_id or "", socket.gethostname()])
    yield from ("# elastic_rs bug report", "", "## versions", "", *_versions(), "", "## variables", "")
    names = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    yield clean.names(f"set, without their values: {', '.join(names) or 'none'}")
    yield from ("", "## doctor", "")
    yield from (clean.text(found) for found in _doctor(args.endpoint))
    yield from ("", f"## the last {LAST_EVENTS} events", "")
    yield from (clean.text(line) for line in _events(args))


def _versions() -> Iterator[str]:
    import platform

    from elastic_rs import _version

    yield _version.line("elastic_rs")
    yield f"protocol {_elastic_rs.PROTOCOL_VERSION}"
    libc = " ".join(filter(None, platform.libc_ver())) or "no glibc"
    yield f"Linux {platform.release()} {platform.machine()}, {libc}"


def _doctor(endpoint: str | None) -> Iterator[str]:
    from elastic_rs import _doctor
    from elastic_rs.run._usage import UsageError

    meeting = [] if endpoint is None else ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    try:
        yield from map(str, _doctor.look(meeting))
    except UsageError as error:
        yield f"the doctor did not run: {error}"


def _events(args: argparse.Namespace) -> Iterator[str]:
    if args.endpoint is None and args.events is None:
        yield "none: no endpoint and no --events was given"
        return
    try:
        if args.events is not None:
            events: Sequence[Event] = _source.from_files(args.events, args.run_id)
        else:
            events, _ = _commands.live(args).read()
    except (_source.AnswerError, ValueError, OSError) as error:
        yield f"none: {error}"
        return
    yield from event_lines(events)


def event_lines(events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each of the last events: numbers, and texts that the core chose. Nodes are numbered."""
    nodes: dict[str, str] = {}
    for event in events:
        if event.node is not None:
            nodes.setdefault(event.node, f"node{len(nodes) + 1}")
    for event in events[-LAST_EVENTS:]:
        facts = " ".join(f"{name}={value}" for name, value in _facts(event))
        causes = ",".join(cause.rpartition(".")[2] for cause in event.cause if _CHOSEN.fullmatch(cause))
        kind = event.type if _CHOSEN.fullmatch(event.type) else "?"
        node = nodes.get(event.node or "", "-")
        yield f"{event.order} {event.mono_us / 1e6:.3f} r{event.round} {kind} {node} {facts} <- {causes or '-'}"


def _facts(event: Event) -> Iterator[tuple[str, Any]]:
    for name, value in event.data.items():
        if not _CHOSEN.fullmatch(name):
            continue
        if isinstance(value, bool | int | float) or (
            name in _FACTS and isinstance(value, str) and _CHOSEN.fullmatch(value)
        ):
            yield name, value


class Cleaner:
    """Takes out of texts what must not leave this machine."""

    def __init__(self, variables: Mapping[str, str], hosts: Iterable[str]) -> None:
        parts = {value: name for name, value in variables.items()}
        for name, value in variables.items():
            if name != "PATH":  # its folders are the system's, or below the home
                parts |= dict.fromkeys(value.split(os.pathsep), name)
        # Longer ones first: one may contain another.
        self._values = sorted(
            ((part, name) for part, name in parts.items() if len(part) >= _SHORTEST_VALUE), key=lambda one: -len(one[0])
        )
        self._hosts = [re.escape(host.rpartition(":")[0] or host) for host in hosts if len(host) > 1]

    def text(self, line: str) -> str:
        """Return the line without values of variables, keys, host names and addresses."""
        for value, name in self._values:
            line = line.replace(value, f"${name}")
        return self.names(line)

    def names(self, line: str) -> str:
        """Return the line without keys, host names and addresses."""
        for pattern, instead in _SECRETS:
            line = pattern.sub(instead, line)
        for host in self._hosts:
            line = re.sub(rf"(?<![\w.-]){host}(?![\w.-])", "HOST", line)
        return line
