"""The command ``elastic-rs``. Does not import torch, so that it starts at once and runs where torch is missing."""

from __future__ import annotations

import argparse
import functools
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from elastic_rs import _bug_report, _elastic_rs, _token
from elastic_rs._command_parser import CommandParser
from elastic_rs._exit_codes import Serve, in_help
from elastic_rs._logging import show_logs
from elastic_rs._observe import _commands
from elastic_rs._terminal import error_line
from elastic_rs._version import ShowVersion
from elastic_rs.rendezvous._config import DEFAULT_PORT, config_of, parse_endpoints
from elastic_rs.rendezvous._protection import TLS_CERT, TOKEN_FILE, certificates, protection

LEVELS = ("debug", "info", "warning", "error")

SIGNALS = {signal.SIGTERM, signal.SIGINT}

EPILOG = """\
signals:
  SIGTERM, SIGINT    wait until all nodes and clients have gone, at most --drain-timeout, then end; serve meanwhile
  a second of these  end at once; within half a second of the first it is ignored

""" + in_help(Serve, **{"130, 143": "ended at once by a second SIGINT, SIGTERM"})

EXAMPLES = {
    "elastic-rs": "elastic-rs status node0:29400",
    "elastic-rs status": "elastic-rs status node0:29400",
    "elastic-rs why": "elastic-rs why node0:29400     # when the job has ended: elastic-rs why --events logs --list",
    "elastic-rs events": "elastic-rs events node0:29400 --follow",
    "elastic-rs stacks": "elastic-rs stacks node0:29400",
    "elastic-rs top": "elastic-rs top node0:29400",
    "elastic-rs page": "elastic-rs page node0:29400 -o job.html",
    "elastic-rs bug-report": "elastic-rs bug-report node0:29400",
    "elastic-rs token": "elastic-rs token new -o job.token",
    "elastic-rs token new": "elastic-rs token new -o job.token",
    "elastic-rs token run": "elastic-rs token run job42 --of master.token -o job42.token",
    "elastic-rs token observer": "elastic-rs token observer --of job.token -o observer.token",
    "elastic-rs token id": "elastic-rs token id --of job.token",
    "elastic-rs store": "elastic-rs store serve --port 29400",
    "elastic-rs store serve": "elastic-rs store serve --port 29400",
}
"""Of each command, for its ``--help``."""

METAVARS = {"number": "N", "bytes": "BYTES", "seconds": "SECONDS"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["doctor"]:
        from elastic_rs import run

        return run.main(words)
    args = _parser().parse_args(words)
    run_command: Callable[[argparse.Namespace], int] = args.run
    return run_command(args)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="elastic-rs", description="Look at jobs, serve a store, make tokens.")
    parser.add_argument("--version", action=ShowVersion, help="show the versions of elastic_rs and torch, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser(
        "doctor", help="check a node and its endpoint: the same as `elastic-run doctor`", add_help=False
    )
    _commands.add_parsers(commands)
    _token.add_parser(commands)
    _bug_report.add_parser(commands)
    stores = commands.add_parser("store", help="the TCP store", description="The TCP store.")
    serve = stores.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "serve",
        help="serve a store and a rendezvous in a separate process",
        description="Serve a TCP store and the rendezvous coordinator of the backend rust-c10d on one port until "
        "SIGTERM or SIGINT. Agents use it by --rdzv-endpoint=HOST:PORT with --rdzv-conf=is_host=0. One line on stdout, "
        "`listening on ADDRESS:PORT`, says that it is ready.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--host", help="name or address to listen on (default: all addresses of this machine)")
    serve.add_argument("--port", type=_port, help=f"0 lets the system choose (default: {DEFAULT_PORT})")
    serve.add_argument(
        "--rdzv-endpoint",
        metavar="LIST",
        help="be the process at one of the endpoints of this job's list, HOST:PORT,HOST:PORT,…: listen there, lead the "
        "job if it is the first of them, and vote on who does; with --run-id, without --host and --port",
    )
    serve.add_argument("--run-id", metavar="ID", help="the job of --rdzv-endpoint, which is its --rdzv-id")
    serve.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=25.0,
        metavar="SECONDS",
        help="how long to wait, after a stop was requested, for nodes and clients to go (default: %(default)g); with "
        "--rdzv-endpoint nobody has to go",
    )
    serve.add_argument(
        "--log-level",
        choices=LEVELS,
        default=_level_of_environment(),
        help="level of the log on stderr (default: ELASTIC_RS_LOG, or info)",
    )
    serve.add_argument(
        "--master-token-file",
        metavar="FILE",
        help="serve several jobs, each with a token of its own, which `elastic-rs token run` derives from the one in "
        f"this file (default: one token for all, in the file that {TOKEN_FILE} names, or none); {TLS_CERT} and the "
        "like name certificates that nodes and coordinator show each other, beside tokens or without",
    )
    serve.set_defaults(run=_serve)
    limits = serve.add_argument_group(
        "limits",
        "A client that exceeds one loses its connection; others are not affected. BYTES and N may end in K, M, G or T.",
    )
    for name, unit, default, what in _elastic_rs.StoreLimits.table():
        limits.add_argument(
            f"--{name[:-2]}".replace("_", "-") if unit == "seconds" else f"--max-{name}".replace("_", "-"),
            dest=name,
            type=functools.partial(_limit, name, _seconds if unit == "seconds" else _amount),
            metavar=METAVARS[unit],
            help=f"{what} (default: {_shown(unit, default)})",
        )
    _add_examples(parser, "elastic-rs")
    return parser


def _add_examples(parser: argparse.ArgumentParser, name: str) -> None:
    if example := EXAMPLES.get(name):
        parser.epilog = f"{parser.epilog or ''}\nexample:\n  {example}\n".lstrip("\n")
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for word, command in action.choices.items():
                _add_examples(command, f"{name} {word}")


def _serve(args: argparse.Namespace) -> int:
    from elastic_rs._observe._served import serve_pages
    from elastic_rs.rendezvous._node import warn_if_open

    try:
        if args.master_token_file is not None:
            protected: _elastic_rs.Protection | None = _elastic_rs.Protection.by_master_file(
                args.master_token_file, certificates=certificates()
            )
        else:
            protected = protection()
    except ValueError as error:
        print(error_line("elastic-rs", str(error)), file=sys.stderr)
        return Serve.NOT_VALID
    # Before any thread exists, so that all inherit the mask: signals stay pending until `_first_signal`.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    show_logs(args.log_level.upper())
    limits = _elastic_rs.StoreLimits(**{name: getattr(args, name) for name, *_ in _elastic_rs.StoreLimits.table()})
    try:
        if args.rdzv_endpoint is None:
            port = DEFAULT_PORT if args.port is None else args.port
            host = _elastic_rs.EndpointServer.listen(args.host, port, limits=limits, protection=protected)
            serve_pages(host)
            warn_if_open(host, protected)
        else:
            host = _listed(args, protected, limits)
    except ValueError as error:
        print(error_line("elastic-rs", str(error)), file=sys.stderr)
        return Serve.NOT_VALID
    except OSError as error:
        print(error_line("elastic-rs", error.strerror or str(error)), file=sys.stderr)
        return Serve.CANNOT_LISTEN
    if protected is not None:
        _say(f"sessions are protected by {protected.text}; there is no store for c10d clients")
    print(f"listening on {', '.join(host.addresses)}", flush=True)
    received = _first_signal(host)
    if received is None:
        print(error_line("elastic-rs", "the server has ended by itself: this is a bug"), file=sys.stderr)
        return Serve.ENDED_BY_ITSELF
    if args.rdzv_endpoint is not None:
        host.stop()  # another process of the list leads, if this one did: nobody has to go
        _say(f"{received.name}: ended")
        return Serve.ENDED_AS_ASKED
    sessions, clients = host.users
    _say(f"{received.name}: waiting for {sessions} nodes and {clients} clients to go")
    since = time.monotonic()

    def end_at_once(number: int, _: FrameType | None) -> None:
        if time.monotonic() - since > _elastic_rs.SAME_SIGNAL_S:
            # The interpreter restores default handlers when it exits: a third signal would change the exit code.
            for later in SIGNALS:
                signal.signal(later, signal.SIG_IGN)
            raise SystemExit(128 + number)

    for number in SIGNALS:
        signal.signal(number, end_at_once)
    if not host.wait_for_users(timeout_s=args.drain_timeout):
        sessions, clients = host.users
        _say(f"{sessions} nodes and {clients} clients are left after {args.drain_timeout:g} s")
    host.stop()
    _say("ended")
    return Serve.ENDED_AS_ASKED


def _listed(
    args: argparse.Namespace, protected: _elastic_rs.Protection | None, limits: _elastic_rs.StoreLimits
) -> _elastic_rs.EndpointServer:
    """Become the process at one of the endpoints of a list.

    Raises:
        OSError: none of them is this machine's, or another process listens there.
        ValueError: it is no list, or other flags have no meaning with it.
    """
    if args.run_id is None:
        raise ValueError("--rdzv-endpoint needs --run-id: a list of endpoints is one job's")
    for flag in ("host", "port", "master_token_file"):
        if getattr(args, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')} must not be given with --rdzv-endpoint: the list is one job's"
            )
    from elastic_rs.rendezvous._node import claim

    config = config_of({})
    endpoints = parse_endpoints(args.rdzv_endpoint, None, config)
    if len(endpoints) == 1:
        raise ValueError(f"--rdzv-endpoint is `{args.rdzv_endpoint}`, must be a list: for one endpoint, give --port")
    host, why = claim(endpoints, args.run_id, config, protected, uses_store=False, limits=limits)
    if host is None:
        raise OSError(0, f"no endpoint of the list can be listened on: {why}")
    return host


def _first_signal(host: _elastic_rs.EndpointServer) -> signal.Signals | None:
    """Unblock the signals and wait for the first one. None: the server has ended.

    This does not use ``signal.sigtimedwait``: if SIGCONT interrupts that when its time is over, CPython 3.11 returns a
    result that nothing has filled in.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # both open until the process ends
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # only signals with a handler are written to the pipe
    signal.set_wakeup_fd(writer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while not select.select([reader], [], [], _LOOK_INTERVAL_S)[0]:
        if host.stopped:
            return None
    signal.set_wakeup_fd(-1)
    return signal.Signals(os.read(reader, 1)[0])


# How often to check that the server still runs. Signals are noticed at once.
_LOOK_INTERVAL_S = 5.0


def _say(text: str) -> None:
    print(f"elastic-rs: {text}", file=sys.stderr)


def _level_of_environment() -> str:
    level = os.environ.get("ELASTIC_RS_LOG", "").lower()
    return level if level in LEVELS else "info"


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"`{text}` is not a port, must be from 0 to 65535")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 315_360_000:  # ten years; false for what is not a number
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds, zero or more")
    return value


def _limit(name: str, parse: Callable[[str], float], text: str) -> float:
    """Read a limit, and check it by the core's table."""
    value = parse(text)
    try:
        _elastic_rs.StoreLimits(**{name: value})
    except ValueError as error:
        allowed = str(error).partition(", ")[2]
        raise argparse.ArgumentTypeError(f"`{text}` {allowed}") from None
    return value


def _amount(text: str) -> int:
    found = re.fullmatch(r"(\d{1,18})(?:([KMGT])(?:i?B)?)?", text, re.ASCII)
    value = int(found[1]) << (10 * " KMGT".index(found[2] or " ")) if found else 0
    if not 0 < value < 1 << 63:
        raise argparse.ArgumentTypeError(f"`{text}` must be a whole number above zero, such as 4096, 64K or 8M")
    return value


def _shown(unit: str, value: float | None) -> str:
    if value is None:
        return "no limit"
    if unit == "seconds":
        return f"{value:g}"
    number = int(value)
    power = next((power for power in (4, 3, 2, 1) if number >> 10 * power and number % (1 << 10 * power) == 0), 0)
    return f"{number >> 10 * power}{' KMGT'[power].strip()}"
