"""Write the pages of ``docs/reference`` from the program itself. ``reference_tables`` has those that are tables.

    build/venv/bin/python tools/reference.py [--check]    # `make reference`; --check: say what is not up to date

It runs with the built package. The pages are committed, so that they can be read without it; a test has them compared.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reference_tables
from reference_tables import GENERATED, cell

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"


def main(words: list[str]) -> int:
    for name in [name for name in os.environ if name.startswith(("PET_", "ELASTIC_RS_"))]:
        del os.environ[name]  # it would be shown as a default
    old = {name: text for name, text in pages().items() if not is_current(name, text)}
    if words == ["--check"]:
        for name in old:
            print(f"docs/reference/{name} is not what the program says: run `make reference`", file=sys.stderr)
        return len(old) > 0
    REFERENCE.mkdir(exist_ok=True)
    for name, text in old.items():
        (REFERENCE / name).write_text(text)
        print(f"    wrote docs/reference/{name}")
    return 0


def is_current(name: str, text: str) -> bool:
    file = REFERENCE / name
    return file.exists() and file.read_text() == text


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "elastic-run.md": elastic_run(),
        "elastic-rs.md": elastic_rs(),
        "environment.md": environment(),
        "python.md": python(),
        "rdzv-conf.md": reference_tables.rdzv_conf(),
        "metrics.md": reference_tables.metrics(),
        "events.md": reference_tables.events(),
        "exit-codes.md": reference_tables.exit_codes(),
        "time-limits.md": reference_tables.time_limits(limiting_flags(), limiting_variables(), list(public_names())),
        "log-messages.md": reference_tables.log_messages(),
    }


MODULES = ("elastic_rs", "elastic_rs.elastic", "elastic_rs.discovery", "elastic_rs.aio", "elastic_rs.errors")


def public_names() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of the public modules, each under its first name."""
    shown: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if not inspect.ismodule(value) and callable(value) and id(value) not in shown:
                shown.add(id(value))
                yield f"{module_name}.{name}", value


def python() -> str:
    """Return the page of the Python names: each with its signature and its docstring."""
    rows = [
        "# Python",
        GENERATED,
        "`import elastic_rs` imports no torch; names are loaded on first use. A duration is a `timedelta`, or a number "
        "of seconds. All public names with their members' signatures: [api.txt](../api.txt).",
    ]
    names = list(public_names())
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        rows += [f"## `{module_name}`", document(module)] if module_name != "elastic_rs" else ["## `elastic_rs`"]
        for full, value in names:
            home, _, name = full.rpartition(".")
            if home == module_name:
                short = full.removeprefix("elastic_rs.")
                rows += [f"### `{short}`", f"```python\n{name}{signature(value)}\n```", document(value)]
    return "\n\n".join(row for row in rows if row) + "\n"


def signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, (BaseException, enum.Enum)):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def document(value: Any) -> str:
    """Return a docstring as Markdown: its sections as lists, its examples as blocks of code."""
    lines: list[str] = []
    section = example = False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if example and not line.strip():
            lines.append("```")
            example = False
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines += [f"**{line}**", ""]
            section = True
        elif section and (item := re.fullmatch(r"    ([\w*., ]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif line.startswith((">>> ", "... ")) and not example:
            lines += ["```pycon", line]
            example = True
        else:
            section = section and (line.startswith("    ") or not line)
            lines.append(line if example or not line.startswith("    ") or not section else f"  {line.strip()}")
    text = "\n".join([*lines, "```"] if example else lines)
    text = re.sub(
        r"::\n\n((?:(?:    .*)?\n)*(?:    .*))", lambda block: f":\n\n```python\n{textwrap.dedent(block[1])}\n```", text
    )
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def elastic_run() -> str:
    from elastic_rs.run._flags import parser

    made = parser()
    rows = ["# Flags of `elastic-run`", GENERATED, made.description or "", f"```\n{made.usage}\n```"]
    rows += [
        "A flag with a variable can be set by it; the command line has precedence. Flags that torchrun does not have "
        "are marked *own*. What differs from torchrun's: [elastic-run](../elastic-run.md#what-differs-from-torchrun)."
    ]
    for group in made._action_groups:  # noqa: SLF001 - argparse has no public way
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]  # noqa: SLF001
        if not actions or group.title in {"positional arguments", "optional arguments"}:
            continue
        rows.append(f"## {str(group.title).capitalize()}")
        table = ["| flag | variable | what it does |", "|---|---|---|"]
        for action in actions:
            flag = made.flags.get(action.option_strings[0]) if action.option_strings else None
            variable = f"`{flag.variable}`" if flag and flag.variable else ""
            own = " *own*" if flag and flag.own else ""
            table.append(f"| {spelled(action)} | {variable} | {cell(filled(action, made))}{own} |")
        rows.append("\n".join(table))
    rows.append(f"## Examples and exit codes\n\n```text\n{(made.epilog or '').strip()}\n```")
    return "\n\n".join(rows) + "\n"


def elastic_rs() -> str:
    from elastic_rs._cli import _parser

    rows = [
        "# Commands of `elastic-rs`",
        GENERATED,
        "`elastic-rs COMMAND --help` says the same. `elastic-rs doctor` is [`elastic-run doctor`]"
        "(../elastic-run.md#the-doctor).",
    ]
    for name, command in commands(_parser(), "elastic-rs"):
        actions = [action for action in command._actions if action.help is not argparse.SUPPRESS]  # noqa: SLF001
        rows += [f"## `{name}`", cell(command.description or "")]
        table = ["| argument | what it does |", "|---|---|"]
        table += [
            f"| {spelled(action)} | {cell(filled(action, command))} |" for action in actions if action.dest != "help"
        ]
        rows.append("\n".join(table))
        if command.epilog:
            rows.append(f"```text\n{command.epilog.strip()}\n```")
    return "\n\n".join(rows) + "\n"


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands that can be run, with their full names."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    if not below:
        yield name, parser
    for action in below:
        for word, command in action.choices.items():
            if word != "doctor":  # its flags are elastic-run's
                yield from commands(command, f"{name} {word}")


def limiting_flags() -> list[tuple[str, str, str]]:
    """Return the flags that are durations: the command, the flag, and its help."""
    from elastic_rs._cli import _parser
    from elastic_rs._doctor import _parser as doctor
    from elastic_rs.run._flags import parser

    found: dict[str, tuple[str, str, str]] = {}
    for name, command in [
        ("elastic-run", parser()),
        ("elastic-run doctor", doctor()),
        *commands(_parser(), "elastic-rs"),
    ]:
        for action in command._actions:  # noqa: SLF001
            is_duration = action.metavar == "SECONDS" or action.dest.endswith(("timeout", "cooldown_range"))
            if is_duration and action.help != argparse.SUPPRESS and not str(action.help).startswith("no effect"):
                flag = action.option_strings[-1]
                found.setdefault(flag, (name, flag, filled(action, command)))
    return list(found.values())


def limiting_variables() -> list[tuple[str, str]]:
    return [(known.name, known.what) for known in VARIABLES if known.name.endswith("_TIMEOUT")]


def spelled(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper()))
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{name}`" for name in action.option_strings) + (
        f" `{value}`".replace("|", r"\|") if value else ""
    )


def filled(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return an argument's help, with its default."""
    values: dict[str, Any] = {**vars(action), "prog": parser.prog}
    return str(action.help or "") % values


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        who: who reads it, or for whom it is set.
        what: what it does.
    """

    name: str
    who: str
    what: str


USER, WORKER, INSIDE = "you set it", "set for workers", "set by agents for their own processes"

VARIABLES = (
    Variable("ELASTIC_RS_LOG", USER, "level of this package's log on stderr: `debug`, `info`, `warning` or `error`"),
    Variable("ELASTIC_RS_TOKEN_FILE", USER, "file with the job's [token](../security.md#a-token)"),
    Variable("ELASTIC_RS_TLS_CERT", USER, "file with this node's [certificate](../security.md#certificates)"),
    Variable("ELASTIC_RS_TLS_KEY", USER, "file with the certificate's private key"),
    Variable("ELASTIC_RS_TLS_CA", USER, "file with the authorities that may vouch for the other end"),
    Variable("ELASTIC_RS_TLS_SPIFFE_ID", USER, "refused: certificates name hosts, not SPIFFE ids"),
    Variable(
        "ELASTIC_RS_ETCD_PASSWORD", USER, "password of etcd's user, if no `password_file` is given. Workers inherit it"
    ),
    Variable(
        "ELASTIC_RS_HTTP",
        USER,
        "on the coordinator's node, who may read its HTTP: `members` (default), `loopback`, `metrics`, `all` or `off` "
        "([health, metrics and the page](../events.md#health-metrics-and-the-page))",
    ),
    Variable(
        "ELASTIC_RS_ON_HANG",
        USER,
        "what a shell runs once a hang is found ([tell somebody](../hang.md#tell-somebody)); `--on-hang` overrides it",
    ),
    Variable(
        "ELASTIC_RS_PROGRESS_LOG",
        USER,
        "regular expression of lines that show progress ([a script without steps](../hang.md#a-script-without-steps)); "
        "`--progress-log` overrides it",
    ),
    Variable(
        "ELASTIC_RS_FORWARD_SIGNALS",
        USER,
        "signals that the agent passes on to its workers "
        "([signals that end nothing](../agent.md#signals-that-end-nothing)); `--forward-signals` overrides it",
    ),
    Variable(
        "ELASTIC_RS_HEALTH_CHECK",
        USER,
        "what is checked before a machine joins ([health](../health.md)); `--health-check` overrides it",
    ),
    Variable(
        "ELASTIC_RS_PREEMPT_NOTICE",
        USER,
        "what says that this machine is taken away ([notices](../preemption.md)); `--preempt-notice` overrides it",
    ),
    Variable(
        "ELASTIC_RS_PREEMPT_DEADLINE",
        USER,
        "seconds that a notice leaves which does not say it (30); `--preempt-deadline` overrides it",
    ),
    Variable(
        "ELASTIC_RS_PREEMPT_SIGNAL",
        USER,
        "signal that the workers of all nodes get at a notice, to save; `--preempt-signal` overrides it",
    ),
    Variable(
        "ELASTIC_RS_AZURE_METADATA",
        USER,
        "Azure's metadata server (`http://169.254.169.254`), for [`--preempt-notice=azure`](../preemption.md)",
    ),
    Variable(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        USER,
        "EC2's metadata server (`http://169.254.169.254`), for [`--preempt-notice=aws`](../preemption.md)",
    ),
    Variable(
        "GCE_METADATA_HOST",
        USER,
        "Google's metadata server (`metadata.google.internal`), for [`--preempt-notice=gcp`](../preemption.md)",
    ),
    Variable(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", USER, "`1`: the worker of rank 0 hosts the workers' store, as in PyTorch"
    ),
    Variable(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        USER,
        "seconds from the signal that stops workers to SIGKILL (30), as in PyTorch",
    ),
    Variable(
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        USER,
        "signals that end the agent, as in PyTorch; `--signals-to-handle` sets it",
    ),
    Variable(
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        USER,
        "seconds after which a worker that sleeps uninterruptibly ends the job (never), as in PyTorch",
    ),
    Variable(
        "TORCHELASTIC_ENABLE_FILE_TIMER", USER, "`1`: PyTorch's watchdog of expired timers; needs PyTorch's launcher"
    ),
    Variable("TORCHELASTIC_TIMER_FILE", WORKER, "where PyTorch's watchdog listens, with PyTorch's launcher"),
    Variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", USER, "prefix of teed lines, as `--log-line-prefix-template`"),
    Variable(
        "TORCHELASTIC_ERROR_FILE",
        WORKER,
        "file into which a worker's `@record` writes its exception; a launcher above this one sets it too",
    ),
    Variable("TORCHELASTIC_RESTART_COUNT", WORKER, "number of restarts that were counted so far"),
    Variable("TORCHELASTIC_MAX_RESTARTS", WORKER, "`--max-restarts`"),
    Variable("TORCHELASTIC_RUN_ID", WORKER, "the run id"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", WORKER, "`True`: the agent of rank 0's node hosts the workers' store"),
    Variable("TORCHELASTIC_GENERATION", WORKER, "number of the round, from 1: it also grows when nodes join or leave"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        WORKER,
        "`1` unless it is set, as in PyTorch; with `in_place=nccl` `elastic.run` sets it",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        WORKER,
        "how many collectives torch records for [looks](../hang.md): `2000` unless it or "
        "`TORCH_NCCL_TRACE_BUFFER_SIZE` is set; `0` records none",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING", WORKER, "with `in_place=nccl`, `elastic.run` sets it to `0` in the worker"
    ),
    Variable(
        "TORCH_GLOO_LAZY_INIT",
        WORKER,
        "refused with `in_place`: gloo would connect in collectives, which nothing could end",
    ),
    Variable("ELASTIC_RS_HOST", WORKER, "the host's name as the driver has it (as Horovod's `HOROVOD_HOSTNAME`)"),
    Variable(
        "ELASTIC_RS_AGENT", INSIDE, "address of the agent's socket for [workers that survive](../elastic-in-place.md)"
    ),
    Variable("ELASTIC_RS_IN_PLACE", INSIDE, "which process groups change in place: `--rdzv-conf in_place`"),
    Variable("ELASTIC_RS_AHEAD", INSIDE, "the worker was started before its node has a rank for it"),
    Variable("ELASTIC_RS_STANDBY", INSIDE, "the process is a standby, and the place in its environment is nobody's"),
    Variable("ELASTIC_RS_STEPS", INSIDE, "the memory in which the worker counts its steps"),
    Variable(
        "ELASTIC_RS_WATCH", INSIDE, "address of the socket at which the agent asks the worker for its collectives"
    ),
    Variable("ELASTIC_RS_HANG_KIND", INSIDE, "for `--on-hang`: the [kind](../hang.md#tell-somebody) of the hang"),
    Variable("ELASTIC_RS_HANG_RANKS", INSIDE, "for `--on-hang`: the ranks that hold the others up, as `3` or `0-2,5`"),
    Variable("ELASTIC_RS_TEMPLATE_ROOM", INSIDE, "folder of a fork server of warm starts"),
)
"""All that are read or set under these families of names, but `PET_*`, which the flags' table has."""


def environment() -> str:
    rows = [
        "# Environment variables",
        GENERATED,
        "Flags' variables (`PET_NNODES` for `--nnodes`) are in [the flags' table](elastic-run.md). Workers also get "
        "torch's own: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `GROUP_WORLD_SIZE`, "
        "`ROLE_RANK`, `ROLE_NAME`, `ROLE_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.",
    ]
    for who, title in (
        (USER, "What you may set"),
        (WORKER, "What workers have"),
        (INSIDE, "What agents and their workers use between them"),
    ):
        table = ["| variable | what it does |", "|---|---|"]
        table += [f"| `{known.name}` | {known.what} |" for known in VARIABLES if known.who == who]
        rows += [f"## {title}", "\n".join(table)]
    return "\n\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
