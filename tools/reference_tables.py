"""Pages of ``docs/reference`` that are tables of the program: keys, metrics, events, exit codes, limits, messages."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from log_messages import Message, messages

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "docs" / "reference" / "events.schema.json"
GENERATED = "<!-- Written by `make reference` from the program. Do not edit. -->"


def cell(text: str) -> str:
    """Return a text for a cell of a table, where it is not Markdown."""
    return re.sub(r"\s+", " ", text).strip().replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def table(*rows: tuple[str, ...]) -> str:
    """Return a table. The first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def page(*parts: str) -> str:
    title, *rest = parts
    return "\n\n".join([f"# {title}", GENERATED, *(part for part in rest if part)]) + "\n"


SEE = {
    "is_host": "../rendezvous.md#the-node-that-hosts-the-coordinator",
    "in_place": "../elastic-in-place.md",
    "store_peers": "../security.md#worker-stores",
    "store_members": "../security.md#worker-stores",
    "store_tunnel": "../security.md#store-tunnel",
    "min_workers": "../rendezvous.md#worlds-that-count-workers",
    "host_failures": "../rendezvous.md#hosts-that-are-kept-out",
    "restart_budget": "../agent.md",
    "exit_code": "../exit-codes.md",
    "first_signal": "../agent.md#the-first-signal",
    "no_restart_on": "../exit-codes.md",
}
"""Where more is said of a key."""


def rdzv_conf() -> str:
    from elastic_rs._elastic_rs import RendezvousConfig

    keys = RendezvousConfig.table()

    def rows(backend: str | None) -> Iterator[tuple[str, ...]]:
        yield "key", "default", "allowed", "what it does"
        for key in keys:
            if key.backend == backend:
                name = f"`{key.name}`" + (f", `{key.other}`" if key.other else "")
                unit = " s" if key.is_duration else ""
                default = "" if key.default is None else f"`{key.default}`{unit}"
                what = key.help + (f" [More]({SEE[key.name]})." if key.name in SEE else "")
                yield name, default, cell(key.allowed), what.replace("|", r"\|")

    reasons: dict[str, list[str]] = {}
    for key in keys:
        if key.backend == "rust-c10d":
            reasons.setdefault(re.sub(r"\s+", " ", key.why or ""), []).append(f"`{key.name}`")
    dropped = [("key", "allowed")]
    dropped += [
        (f"`{key.name}`", cell(key.allowed) + (f" (`{key.backend}` alone)" if key.backend else ""))
        for key in RendezvousConfig.without_effect()
    ]
    return page(
        "Keys of `--rdzv-conf`",
        "Keys are separated by commas: `--rdzv-conf=last_call_timeout=5,is_host=0`. Times are in seconds, and may be "
        "fractions. An unknown key is an error that names the nearest one. `timeout` is taken for `join_timeout`, with "
        "a warning. Which keys must be the same on all nodes: [rendezvous](../rendezvous.md#--rdzv-conf).",
        "## For both backends",
        table(*rows(None)),
        "## For `rust-c10d`",
        table(*rows("rust-c10d")),
        "`rust-etcd` refuses these:\n\n"
        + "\n".join(f"- {', '.join(names)}: {cell(why)}." for why, names in reasons.items()),
        "## For `rust-etcd`",
        "Keys of the connection to etcd, in the spellings of PyTorch's `etcd` and `etcd-v2`.",
        table(*rows("rust-etcd")),
        "## Without effect",
        "PyTorch has these keys. They are checked, and then dropped.",
        table(*dropped),
    )


def metrics() -> str:
    from elastic_rs._elastic_rs import metric_families

    families = metric_families()

    def rows(begin: str, *, others: bool = False) -> Iterator[tuple[str, ...]]:
        yield "series", "type", "labels", "meaning"
        for series, kind, labels, text in families:
            if series.startswith(("elastic_rs_store_", "elastic_rs_auth_")) == others and begin in ("", *labels):
                if begin == "" and "run" in labels:
                    continue
                yield f"`{series}`", kind, ", ".join(f"`{label}`" for label in labels), cell(text)

    return page(
        "Metrics",
        "The endpoint serves them at `/metrics`, as OpenMetrics 1.0, to whom "
        "[`ELASTIC_RS_HTTP`](environment.md) allows it: [monitor and alert](../monitor.md). No label is a node, a rank "
        "or a process. The first 64 runs have a label of their own; of later ones only counts are kept, as `other`. "
        "A histogram has the series `…_bucket` (label `le`), `…_count` and `…_sum`.",
        "## Of each run",
        table(*rows("run")),
        "`phase` is one of [these](../events.md#how-to-read-why).",
        "## Of the coordinator",
        table(*rows("")),
        "## Of the endpoint's store, and of refused connections",
        table(*rows("", others=True)),
        "Causes of `elastic_rs_store_rejects_total`: [the store's log](../store.md#log-and-counters).",
    )


OF_NODES = ("worker.started", "worker.ended", "received.", "line.", "node.fenced", "dropped")
"""Types of events that nodes record themselves. ``phase`` is recorded by both."""


def events() -> str:
    schema = json.loads(SCHEMA.read_text())
    kinds = [(kind["properties"]["type"]["const"], kind) for kind in schema["oneOf"]]
    fields = [("field", "meaning")]
    fields += [(f"`{name}`", described(value, schema)) for name, value in ordered(schema)]
    fields.append(("`type`, `data`", "what happened: see below"))
    of_nodes = [(name, kind) for name, kind in kinds if name.startswith(OF_NODES)]
    others = [(name, kind) for name, kind in kinds if not name.startswith(OF_NODES)]
    return page(
        "Events",
        schema["description"]
        + " An event is a line of JSON, in the files `events.jsonl` and in `elastic-rs events --json`: "
        "[which files there are](../events.md#files). As JSON Schema: "
        "[events.schema.json](events.schema.json).",
        table(*fields),
        "## What the coordinator records",
        *of_types(others, schema),
        "## What nodes record",
        "Besides `phase`. Over etcd, or a backend of your own, they record the others too.",
        *of_types(of_nodes, schema),
    )


def of_types(kinds: list[tuple[str, Any]], schema: Any) -> Iterator[str]:
    """Yield a section for each type. Two forms of one type share it."""
    names = list(dict.fromkeys(name for name, _ in kinds))
    for name in names:
        yield f"### `{name}`"
        for kind in (kind for other, kind in kinds if other == name):
            yield described(kind, schema)
            data = resolved(kind["properties"]["data"], schema)
            rows = [f"- `{field}`: {described(value, schema)}" for field, value in ordered(data)]
            if "oneOf" in data:
                rows.append("- `type`, `data`: of the event that is replayed.")
            if rows:
                yield "\n".join(rows)


def ordered(of_type: Any) -> list[tuple[str, Any]]:
    """Return the fields of a type: those that are always there first, in the order of the program."""
    fields = of_type.get("properties", {})
    names = [*of_type.get("required", ()), *fields]
    return [(name, fields[name]) for name in dict.fromkeys(names) if name in fields]


def resolved(value: Any, schema: Any) -> Any:
    if "$ref" in value:
        return schema["$defs"][value["$ref"].rpartition("/")[2]]
    for other in value.get("anyOf", ()):
        if "$ref" in other:
            return resolved(other, schema)
    return value


def described(value: Any, schema: Any) -> str:
    """Return what a value means, and which words it may be."""
    of_type = resolved(value, schema)
    text = value.get("description") or of_type.get("description", "")
    words = [*of_type.get("enum", ()), *(case["const"] for case in of_type.get("oneOf", ()) if "const" in case)]
    text = re.sub(r"\s+", " ", text).replace("`None`", "`null`").replace("|", r"\|")
    text = re.sub(r"\[`(\w+)`\]", r"`\1`", text)
    return text + (f" One of {', '.join(f'`{word}`' for word in words)}." if words else "")


def exit_codes() -> str:
    from elastic_rs._exit_codes import BugReport, Doctor, ExitCode, Look, Run, Serve, Stacks, Token

    parts = []
    programs: tuple[type[ExitCode], ...] = (Run, Look, Stacks, Doctor, Serve, Token, BugReport)
    for codes in programs:
        sentence = re.sub(r"\s+", " ", inspect.cleandoc(codes.__doc__ or "")).replace("``", "`")
        parts += [f"## {re.findall('`[^`]+`', sentence)[0]}", sentence]
        parts.append(table(("exit code", "when"), *((str(code.value), cell(code.meaning)) for code in codes)))
    return page(
        "Exit codes",
        "A signal ends a program with 128 + its number: 129 for SIGHUP, 130 for SIGINT (Ctrl-C), 131 for SIGQUIT, 143 "
        "for SIGTERM. A shell shows 137 for SIGKILL. Which failure of a job leads to which code, and "
        "which are worth another run: [exit codes](../exit-codes.md).",
        *parts,
    )


FIXED = (
    ("src/agent/machine/in_place.rs", "RAISE_LIMIT"),
    ("src/agent/machine/in_place.rs", "PARK_LIMIT"),
    ("src/hang/judge/limits.rs", "IDLE"),
    ("src/hang/judge/limits.rs", "BUSY"),
    ("src/hang/judge/limits.rs", "FIRST"),
    ("python/elastic_rs/elastic/_membership.py", "STEP_LIMIT_S"),
    ("python/elastic_rs/elastic/_membership.py", "PART_LIMIT_S"),
    ("python/elastic_rs/elastic/_membership.py", "CONNECT_LIMIT_S"),
    ("src/rendezvous/run/in_place.rs", "RETURN_WITHIN"),
    ("src/rendezvous/messages/change.rs", "SAVE_WITHIN"),
    ("src/agent/machine/ahead.rs", "PREPARE_LIMIT"),
    ("src/warm/client.rs", "LOAD_LIMIT"),
    ("src/warm/client.rs", "FORK_LIMIT"),
    ("src/agent/machine.rs", "LEAVE_LIMIT"),
    ("src/agent/runner.rs", "KILL"),
    ("src/agent/hang_command.rs", "TIME_LIMIT"),
    ("src/agent/runner/recovery.rs", "IMPORT_LIMIT"),
    ("src/workers/orphans.rs", "LEADER_GRACE"),
    ("src/rendezvous/node/dial.rs", "CONNECT_TIMEOUT"),
    ("src/rendezvous/node/report.rs", "ENDS_ALONE_AFTER"),
    ("src/rendezvous/coordinator/machine.rs", "VACANT_FOR"),
    ("src/rendezvous/coordinator/connections.rs", "OBSERVER_IDLE"),
    ("src/secure/protection.rs", "HANDSHAKE_LIMIT"),
    ("src/hosts/cooldown.rs", "FORGIVES_AFTER"),
    ("src/events/file.rs", "LAST_LINES"),
)
"""Limits that cannot be set, and that a user may meet."""


def constant(file: str, name: str) -> tuple[float, str]:
    """Return the seconds of a constant in a source file, and what its comment says."""
    text = (ROOT / file).read_text()
    comment = r"((?:^ *(?:///|#) .*\n)+)"
    declared = rf"(?:.*\bconst {name}: Duration = Duration::from_(secs|millis)\((.+)\);|{name} = (.+))$"
    value = re.search(comment + declared, text, re.MULTILINE)
    if value is None:
        raise ValueError(f"{file} has no {name}: tools/reference_tables.py has to know it by its new name")
    said = " ".join(re.sub(r"^ *(///|#) ?", "", line) for line in value[1].splitlines())
    said = re.sub(r"`docs/[^`]*`[^.]*\.", "", re.sub(r"\[`(\w+)`\]", r"`\1`", said))
    factors = (value[3] or value[4]).split("*")
    seconds = 1.0
    for factor in factors:
        seconds *= float(ast.literal_eval(factor.strip()))
    return (seconds / 1000 if value[2] == "millis" else seconds), said.strip()


def shown(seconds: float) -> str:
    if seconds >= 7200 and seconds % 3600 == 0:
        return f"{seconds / 3600:g} h"
    return f"{seconds:g} s"


def time_limits(
    flags: list[tuple[str, str, str]], variables: list[tuple[str, str]], names: list[tuple[str, Any]]
) -> str:
    """Return the page. ``flags``: command, flag and help. ``names``: public names of the Python package."""
    from elastic_rs._elastic_rs import RendezvousConfig

    keys = [("key", "default", "what it bounds")]
    keys += [
        (f"`{key.name}`", "none" if key.default is None else shown(float(key.default)), key.help)
        for key in RendezvousConfig.table()
        if key.is_duration
    ]
    arguments = [("argument", "default", "what it bounds"), *sorted(of_arguments(names))]
    fixed = [("name in the source", "limit", "what it bounds")]
    for known in FIXED:
        seconds, said = constant(*known)
        fixed.append((f"`{known[1]}`", shown(seconds), said.replace("|", r"\|")))
    return page(
        "Time limits",
        "Each with its default, and what to set. Which one to raise on a slow file system: "
        "[troubleshooting](../troubleshooting.md#time-limits).",
        "## Keys of `--rdzv-conf`",
        "Set one by `--rdzv-conf=KEY=SECONDS`. A silent node is lost after its *lease*, which is `keep_alive_interval` "
        "times `keep_alive_max_attempt` (3): 15 s. [All keys](rdzv-conf.md).",
        table(*keys),
        "## Flags",
        table(
            ("flag", "of", "what it bounds, with its default"),
            *((f"`{flag}`", f"`{of}`", cell(text)) for of, flag, text in flags),
        ),
        "## Environment variables",
        table(("variable", "what it bounds"), *((f"`{name}`", what) for name, what in variables)),
        "## Arguments in Python",
        "A duration is a `timedelta`, or a number of seconds ([durations](../errors.md#durations)).",
        table(*arguments),
        "## Limits that cannot be set",
        table(*fixed),
    )


def of_arguments(names: list[tuple[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for name, value in names:
        found = {name: value}
        if inspect.isclass(value):
            found |= {f"{name}.{key}": member for key, member in vars(value).items() if not key.startswith("_")}
        for full, function in found.items():
            text = inspect.cleandoc(getattr(function, "__doc__", "") or "")
            try:
                parameters = inspect.signature(function).parameters if callable(function) else {}
            except (TypeError, ValueError):
                continue
            for key, parameter in parameters.items():
                said = re.search(rf"^ +{key}: (.*(?:\n {{8,}}.*)*)", text, re.MULTILINE)
                if re.search(r"timeout|_s$", key) and said and isinstance(parameter.default, (int, float, type(None))):
                    default = "none" if parameter.default is None else shown(float(parameter.default))
                    yield f"`{full}({key}=…)`", default, re.sub(r":\w+:`", "`", cell(said[1])).replace("``", "`")


GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Output of workers, and log files",
        "[Logs](../agent.md#logs), and what happens when a disk is full or a console hangs.",
        ("src/workers/logs", "src/workers/group/member", "src/discovery/output", "python/elastic_rs/agent/_consoles"),
    ),
    (
        "Hosts, and a driver",
        "[What happens when](../hosts.md#what-happens-when), and "
        "[why a host is not used](../hosts.md#why-a-host-is-not-used).",
        ("src/discovery", "src/hosts", "python/elastic_rs/discovery"),
    ),
    (
        "Tokens, certificates and worker stores",
        "[Secure a job](../security.md); [the worker stores](../security.md#worker-stores) and "
        "[their tunnel](../security.md#store-tunnel).",
        ("src/secure", "src/net", "src/launcher/tunnel", "python/elastic_rs/rendezvous/_protection"),
    ),
    ("The store", "[The store's log and counters](../store.md#log-and-counters).", ("src/store",)),
    (
        "Workers that survive",
        "[What happens when](../elastic-in-place.md#what-happens-when). A worker that cannot stay is restarted: "
        "nothing is lost but its time.",
        (
            "src/channel",
            "src/agent/machine/in_place",
            "src/agent/runner/in_place",
            "python/elastic_rs/elastic",
            "python/elastic_rs/_checkpoint",
        ),
    ),
    (
        "Rendezvous, coordinator and endpoint",
        "[The job does not form](../troubleshooting.md#the-job-does-not-form); over etcd "
        "[what happens when](../etcd.md#what-happens-when).",
        (
            "src/rendezvous",
            "src/endpoint",
            "src/etcd_client",
            "src/clock",
            "src/launcher/node",
            "python/elastic_rs/rendezvous",
            "python/elastic_rs/_observe",
        ),
    ),
    (
        "The command line, and the start of a node",
        "[It is refused](../troubleshooting.md#it-is-refused), and [the doctor](../elastic-run.md#the-doctor).",
        (
            "python/elastic_rs/run",
            "python/elastic_rs/_launch",
            "python/elastic_rs/_logging",
            "python/elastic_rs/_numa",
            "src/launcher/launch",
        ),
    ),
    (
        "A training that hangs",
        "[My job hangs](../hang.md). A hang is said in six lines or less, from `training stands still for` on. "
        "`elastic-rs stacks ENDPOINT` shows where each rank stands.",
        ("src/hang", "src/agent/runner/hang", "src/agent/runner/look", "src/agent/look", "src/channel/watch"),
    ),
    (
        "Agent and workers",
        "[It restarts in a loop](../troubleshooting.md#it-restarts-in-a-loop), and "
        "[what happens when](../agent.md#what-happens-when). "
        "`elastic-rs why` has the root cause.",
        (
            "src/agent",
            "src/workers",
            "src/warm",
            "src/signals",
            "src/processes",
            "python/elastic_rs/agent",
            "python/elastic_rs/_signal_options",
            "crates/py",
        ),
    ),
)
"""Titles, what explains the messages, and the files that log them. A file belongs to the first group that has it."""


def log_messages() -> str:
    by_group: dict[str, list[Message]] = {title: [] for title, _, _ in GROUPS}
    for message in messages():
        title = next((title for title, _, files in GROUPS if message.file.startswith(files)), None)
        if title is None:
            raise ValueError(f"{message.file} logs messages, and belongs to no group of tools/reference_tables.py")
        by_group[title].append(message)
    parts = []
    for title, advice, _ in reversed(GROUPS):
        rows = [("message", "level", "logged in")]
        rows += [(cell(message.text), message.level, f"`{message.file}`") for message in by_group[title]]
        parts += [f"## {title}", advice, table(*rows)]
    return page(
        "Log messages",
        "Messages at `warning` and `error`. Most end with what to do, and each section begins with a link to the page "
        "that explains its messages. `…` stands for what a message names: a node, a rank, a number, the reason. "
        "Lines of an agent begin with the run id in brackets, unless it was drawn. `further messages of this kind were "
        "not logged` ends a flood: its `count` is how many were left out. [`ELASTIC_RS_LOG`](environment.md) "
        "chooses the level.",
        *parts,
    )
