"""The flags of ``elastic-run``: torchrun's, with the same spellings, defaults, choices and ``PET_*`` variables.

Nothing of this package's or torch's is imported, so that ``--help`` and errors come at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UsageError", "parse"]

PROG = "elastic-run"

USAGE = f"{PROG} [flags] SCRIPT [the script's arguments]"

DESCRIPTION = """\
Start the workers of a PyTorch job on this node and keep them going. The command line is torchrun's; the agent does not
import torch."""

EPILOG = """\
examples:
  two workers on this machine
    elastic-run --standalone --nproc-per-node=2 train.py --lr 0.1
  one worker per GPU, on 2 to 4 nodes: the same command on every node, with the address of one of them
    elastic-run --nnodes=2:4 --nproc-per-node=gpu --max-restarts=3 \\
        --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job42 train.py
  fixed ranks, on the second of two nodes
    elastic-run --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 train.py
  check this node, and whether it finds the others
    elastic-run doctor
    elastic-run doctor --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint=node0:29400
  a program that is not a Python script, with its output on the console and in files
    elastic-run --standalone --nproc-per-node=8 --no-python --tee=3 --log-dir=logs ./train --steps 100

Each flag may be written with _ instead of -, and most may be set by a variable: PET_NNODES=2 for --nnodes=2. A flag on
the command line overrides its variable.

exit codes:
  0        all workers succeeded, or this node was a spare that was not needed
  1        the job failed, or this node could not join it; the message names the first failure
  2        the command line is not valid, or names a script that does not exist
  128 + n  ended by signal n: 143 for SIGTERM, 130 for SIGINT
"""


class UsageError(ValueError):
    """The command line is not valid. The message names the flag, the value that was given and what is allowed."""

    hint = f"{PROG} --help lists all flags"
    """The line that follows the message, if any."""


def parse(args: Sequence[str], made: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse the command line. ``--help`` and errors end the process, as argparse does it.

    Args:
        args: the command line.
        made: the parser, if not an unmodified :func:`parser`.

    Raises:
        UsageError: a ``PET_*`` variable of a switch is no number, or a flag is unknown.
    """
    made = made or parser()
    known, unknown = made.parse_known_args([_apart(arg) for arg in args])
    if unknown:
        raise UsageError(_unknown(_together(unknown[0]).partition("=")[0], made))
    known.training_script_args = [_together(arg) for arg in known.training_script_args]
    return known


def parser(usage: str = USAGE, description: str = DESCRIPTION, epilog: str = EPILOG) -> argparse.ArgumentParser:
    """Make the parser. Defaults come from the environment as it is now."""
    made = _Parser(
        prog=PROG,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=_Help,
    )
    _add_size(made.add_argument_group("size of the job"))
    _add_rendezvous(made.add_argument_group("how nodes find each other"))
    _add_static(made.add_argument_group("fixed ranks (--rdzv-backend=static, the default)"))
    _add_script(made.add_argument_group("what to run"))
    _add_endings(made.add_argument_group("failures, restarts and signals"))
    _add_logs(made.add_argument_group("output of workers"))
    _add_devices(made.add_argument_group("devices"))
    _add_others(made.add_argument_group("compatibility"))
    made.add_argument("training_script", metavar="SCRIPT", help="the script, module or program that every worker runs")
    made.add_argument("training_script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return made


def _add_size(group: Any) -> None:
    add = _adder(group)
    add("--nnodes", default="1:1", metavar="N|MIN:MAX", help="number of nodes, or its minimum and maximum (1)")
    add(
        "--nproc-per-node",
        default="1",
        metavar="N|gpu|auto|cpu|xpu",
        help="workers on this node: a number, or one per GPU, XPU or CPU; auto: one per accelerator if there is any, "
        "else one per CPU (1)",
    )


def _add_rendezvous(group: Any) -> None:
    add = _adder(group)
    switch = _adder(group, _CheckEnv)
    switch("--standalone", help="a job of one node, on any free port and with a random run id")
    add(
        "--rdzv-backend",
        default="static",
        help="c10d or static; c10d is what torchrun calls rust-c10d, and both names work here",
    )
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="address of the node that hosts the rendezvous (port 29400)",
    )
    add("--rdzv-id", default="none", metavar="ID", help="the job's name, the same on every node")
    add(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="join_timeout, last_call_timeout and other settings, listed below",
    )
    add(
        "--local-addr",
        default=None,
        metavar="ADDR",
        help="address at which other nodes reach this one, if not the one that its connection shows",
    )


def _add_static(group: Any) -> None:
    add = _adder(group)
    add("--node-rank", type=_whole, default=0, metavar="RANK", help="rank of this node, from 0 (0)")
    add("--master-addr", default="127.0.0.1", metavar="ADDR", help="address of node 0 (127.0.0.1)")
    add("--master-port", type=_whole, default=None, metavar="PORT", help="a free port on node 0 (29500)")


def _add_script(group: Any) -> None:
    switch = _adder(group, _CheckEnv)
    switch("--module", short="-m", help="SCRIPT is a module, run as by python -m")
    switch("--no-python", help="SCRIPT is a program, run as it is")
    switch("--run-path", help="SCRIPT is an absolute path, run by runpy.run_path; overrides --no-python")


def _add_endings(group: Any) -> None:
    add = _adder(group)
    add(
        "--max-restarts",
        type=_whole,
        default=0,
        metavar="N",
        help="restarts after failures, on all nodes together (0)",
    )
    add(
        "--shutdown-timeout",
        type=_whole,
        default=None,
        metavar="SECONDS",
        help="time between the signal that stops workers and SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30)",
    )
    add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIGNAL,...",
        help="signals that end this node's agent, which passes them on to its workers (%(default)s)",
    )
    _add_warm(group)


def _add_warm(group: Any) -> None:
    """Add a flag that takes a value only after `=`: in `--warm-start train.py` the script is not a module to import."""
    names = ["--warm-start", "--warm_start"]
    group.add_argument(
        *names,
        action="store_const",
        const="torch",
        default=os.environ.get("PET_WARM_START"),
        help="fork workers from a process that has imported torch, or the modules of --warm-start=MODULE,...",
    )
    group.add_argument(
        *[f"{name}{MARK}" for name in names], dest="warm_start", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


MARK = "\0"
"""No argument contains it."""


def _apart(arg: str) -> str:
    """Mark `--warm-start=…` as another flag. If it is the script's argument, :func:`_together` removes the mark."""
    name, separator, value = arg.partition("=")
    return f"{name}{MARK}={value}" if separator and name in {"--warm-start", "--warm_start"} else arg


def _together(arg: str) -> str:
    return arg.replace(f"{MARK}=", "=", 1)


def _add_logs(group: Any) -> None:
    add = _adder(group)
    add(
        "--log-dir",
        default=None,
        metavar="FOLDER",
        help="folder of log files (a temporary folder; /dev/null: no files)",
    )
    add(
        "--redirects",
        short="-r",
        default="0",
        metavar="STREAMS",
        help="streams that go to files: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:1 (0)",
    )
    add(
        "--tee",
        short="-t",
        default="0",
        metavar="STREAMS",
        help="streams that go to files and the console, as --redirects (0)",
    )
    add("--local-ranks-filter", default="", metavar="RANK,...", help="local ranks that the console shows (all)")
    for stream in ("stdout", "stderr"):
        add(
            f"--duplicate-{stream}-filters",
            type=_comma_separated,
            default=[],
            metavar="TEXT,...",
            help=f"copy teed lines of {stream} that contain one of these texts to filtered_{stream}.log; ,, is a comma",
        )
    add(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="prefix of each teed line, with ${role_name}, ${rank}, ${local_rank} and ${hostname} "
        "([${role_name}${local_rank}]:)",
    )


def _add_devices(group: Any) -> None:
    _adder(group, _CheckEnv)(
        "--virtual-local-rank", help="each worker sees only its own GPU, as device 0, and has LOCAL_RANK 0"
    )
    _adder(group, None)(
        "--numa-binding",
        type=str,
        choices=["node", "socket", "exclusive", "core-complex"],
        default=None,
        help="bind each worker to CPUs near its GPU; requires torch",
    )


def _add_others(group: Any) -> None:
    add = _adder(group)
    add("--role", default="default", help="the workers' role, shown in prefixes and ROLE_NAME (default)")
    add("--monitor-interval", type=seconds, default=0.1, metavar="SECONDS", help="no effect: nothing polls")
    add(
        "--start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="no effect: workers are programs",
    )
    add("--event-log-handler", default="null", metavar="NAME", help="event handler (null; any other requires torch)")
    plain = _adder(group, None)
    plain("--logs-specs", type=str, default=None, metavar="NAME", help="plug-in of torchrun.logs_specs; requires torch")
    shtab = _shtab()
    shells = shtab.SUPPORTED_SHELLS if shtab else ["bash", "zsh", "tcsh"]
    plain(
        "--print-completion", action=_PrintCompletion, choices=shells, help="print a completion script; requires shtab"
    )


class _Env(argparse.Action):
    """Its default is the value of ``PET_<DEST>``, as ``torch.distributed.argparse_util.env``."""

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        super().__init__(dest=dest, default=os.environ.get(f"PET_{dest.upper()}", default), **kwargs)

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class _CheckEnv(argparse.Action):
    """A switch, on if ``PET_<DEST>`` is a number other than 0, as ``torch.distributed.argparse_util.check_env``."""

    def __init__(self, dest: str, **kwargs: Any) -> None:
        name = f"PET_{dest.upper()}"
        given = os.environ.get(name, "0")
        try:
            default = bool(int(given))
        except ValueError:
            flag = next(flag for flag in kwargs["option_strings"] if flag.startswith("--"))
            raise UsageError(f"{name} is `{given}`, must be 0 or 1: it sets {flag}") from None
        super().__init__(dest=dest, const=True, default=default, nargs=0, **kwargs)

    def __call__(self, _: Any, namespace: argparse.Namespace, __: Any, ___: str | None = None) -> None:
        setattr(namespace, self.dest, self.const)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None) -> None:
        shtab = _shtab()
        if shtab is None:
            parser.exit(1, f"{option_string} requires the 'shtab' package: pip install shtab\n")
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _shtab() -> Any:
    """Return the package that makes shell completions, if it is installed."""
    try:
        import shtab  # type: ignore[import-not-found]
    except ImportError:
        return None
    return shtab


def _adder(group: Any, action: Any = _Env) -> Callable[..., None]:
    def add(flag: str, *, short: str | None = None, **kwargs: Any) -> None:
        names = [name for name in (short, flag) if name]
        underscored = f"--{flag[2:].replace('-', '_')}"
        if underscored != flag:
            names.append(underscored)
        group.add_argument(*names, **({"action": action} if action else {}) | kwargs)

    return add


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        import textwrap

        from elastic_rs.rendezvous._config import shown_defaults  # which nothing else here needs

        keys = textwrap.fill(shown_defaults(), 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return f"{super().format_help()}\nkeys of --rdzv-conf and their defaults, times in seconds:\n{keys}\n"

    def error(self, message: str) -> NoReturn:
        # argparse names all spellings of a flag: `argument --max-restarts/--max_restarts: …`.
        if message.startswith("ambiguous option: "):
            given, _, matches = message.partition(" could match ")
            fail(f"{given} could match {', '.join(name for name in matches.split(', ') if not _is_other(name))}")
        what, separator, why = message.removeprefix("argument ").partition(": ")
        if separator and message.startswith("argument "):
            names = what.split("/")
            message = f"{next((name for name in names if name.startswith('--')), names[0])}: {why}"
        elif "SCRIPT" in message:
            message = f"no script is given; it comes after the flags: {self.usage}"
        fail(message)


def fail(message: str, hint: str = UsageError.hint) -> NoReturn:
    """End the process with exit code 2: the command line is not valid."""
    try:
        sys.stderr.write("".join(f"{line}\n" for line in (f"{PROG}: error: {message}", hint) if line))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # stderr is closed or full. Python would flush it again at its end, and exit with another code.
        sys.stderr = None
    raise SystemExit(2)


def _is_other(name: str) -> bool:
    """Whether this is a spelling of a flag that help does not show."""
    return "_" in name or MARK in name


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not _is_other(name)]
        if not names:
            return super()._format_action_invocation(action)
        if action.nargs == 0:
            return ", ".join(names)
        value = self._format_args(action, str(action.metavar or action.dest.upper()))
        if action.choices is not None:
            value = "|".join(map(str, action.choices))
        return f"{', '.join(names)} {value}"


def _unknown(flag: str, made: argparse.ArgumentParser) -> str:
    import difflib

    actions = made._actions  # noqa: SLF001 - no other way
    names = [name for action in actions for name in action.option_strings if name.startswith("--") and MARK not in name]
    # Short names resemble too many others: a script's `--lr` is near `--role`.
    near = difflib.get_close_matches(flag, names, n=1, cutoff=0.7)
    hint = f"did you mean `{near[0]}`?" if near else "flags of the script come after it"
    return f"unknown flag `{flag}`: {hint}"


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds") from None


def _comma_separated(text: str) -> list[str]:
    # Two commas are a literal comma.
    placeholder = "\0"
    return [item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(",")]
