"""The commands ``status``, ``why``, ``events``, ``stacks``, ``top`` and ``page`` of ``elastic-rs``.

What only one of them needs is imported by it: half of the time of ``status`` are imports.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import io
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_rs import _elastic_rs
from elastic_rs._exit_codes import Look, Stacks, in_help
from elastic_rs._observe import _source, _text
from elastic_rs._observe._events import Event, escaped, incarnation_of, parse
from elastic_rs._observe._merge import merge
from elastic_rs._observe._story import Names, Story, story_of
from elastic_rs._terminal import close_output, error_line, plain
from elastic_rs.rendezvous._config import DEFAULT_PORT, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_origin", "add_parsers", "live"]

FOR_PROGRAMS = {"status", "why", "events", "stacks"}
"""Commands that also write JSON."""

LARGEST_RANK = 2**31 - 1

LIVE = {"top", "stacks"}
"""Commands that ask the job alone, and read no files."""

EPILOG = in_help(Look, **{"130": "Ctrl-C"})


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to those of ``elastic-rs``."""
    status = _parser(commands, "status", _status, "the state of a job, and the time that it has lost")
    status.epilog = EPILOG
    why = _parser(commands, "why", _why, "why a job's workers were last restarted, and how long that took")
    why.add_argument("--recovery", type=int, metavar="N", help="number of the recovery, from 1 (default: the last one)")
    why.add_argument(
        "--list",
        action="store_true",
        help="a line for each recovery of each job in these files, with its time of day and root cause",
    )
    events = _parser(commands, "events", _events, "what happened, event by event, each with its causes")
    events.add_argument("--follow", action="store_true", help="go on with each event as it happens, until interrupted")
    events.add_argument(
        "--format",
        choices=("lines", "json", "chrome-trace", "otlp"),
        default="lines",
        help="chrome-trace is for https://ui.perfetto.dev; otlp is a line of OTLP-JSON for each recovery, for a "
        "collector of OpenTelemetry, with --follow once it is known what the recovery has cost; json is the same as "
        "--json (default: %(default)s)",
    )
    events.add_argument("--otlp-http", help=argparse.SUPPRESS)
    events.set_defaults(run=_events_unless_otlp_http)
    stacks = _parser(commands, "stacks", _stacks, "where each rank stands now, grouped by state and line")
    stacks.epilog = in_help(Stacks)
    stacks.add_argument(
        "--rank", type=int, metavar="N", help="all frames of this rank's main thread (default: all ranks)"
    )
    stacks.add_argument(
        "--deep",
        action="store_true",
        help="with --rank: also what py-spy, if its node has it, shows of all threads of the rank, without pausing it",
    )
    top = _parser(commands, "top", _top, "a job on the whole terminal, once a second")
    top.epilog = "keys: q quit, p pause, s sort, w why, j and k scroll. Colours are off if NO_COLOR is not empty."
    shown = _parser(commands, "page", _page, "a job as one HTML file: a timeline, and each recovery")
    shown.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it (default: standard output)")


def _parser(
    commands: argparse._SubParsersAction[Any],
    name: str,
    run: Callable[[argparse.Namespace], int],
    what: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"Show {what}. It changes nothing.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_origin(parser, files=name not in LIVE)
    if name in FOR_PROGRAMS:
        parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=lambda args: _guarded(run, args), command=name)
    return parser


def add_origin(parser: argparse.ArgumentParser, *, files: bool = True) -> None:
    """Add the arguments that say which job's events a command reads, and where: :func:`live` takes the endpoint.

    Args:
        parser: the command's.
        files: whether it also reads files of events.
    """
    parser.add_argument(
        "endpoint",
        nargs="?",
        metavar="HOST[:PORT]",
        help=f"the job's rendezvous endpoint; the port is {DEFAULT_PORT} by default",
    )
    if files:
        parser.add_argument(
            "--events",
            action="extend",
            nargs="+",
            type=Path,
            metavar="FILE",
            help="read events from these files instead: events.jsonl of nodes, events-coordinator.jsonl, or what "
            "`events --json` wrote; of a folder, all such files below it; `-` is standard input",
        )
    else:
        parser.set_defaults(events=None)
    parser.add_argument("--run-id", metavar="ID", help="which job, if there are several or a token is used")


def _guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    if (args.endpoint is None) == (args.events is None):
        either = (
            "an endpoint (HOST[:PORT])" if args.command in LIVE else "either an endpoint (HOST[:PORT]) or --events FILE"
        )
        return _fail(Look.NOT_VALID, f"give {either}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an output that is not UTF-8 has no `…`, nor all that workers say
    collects = gc.isenabled()
    if args.events is not None:
        gc.disable()  # files are read once, and looking for garbage among 100,000 events takes half of the time
    try:
        code = run(args)
        if sys.stdout is not None:  # `>&-`
            sys.stdout.flush()
        return code
    except _source.AnswerError as error:
        return _fail(Look.UNREACHABLE, str(error))
    except BrokenPipeError:
        close_output()  # who reads has read enough, as `head` does
        return Look.HEALTHY
    except KeyError as error:
        return _fail(Look.UNREACHABLE, f"{args.endpoint}: its answer has no {error}")
    except OSError as error:
        return _fail(
            Look.NOT_VALID, f"`{error.filename}`: {error.strerror}" if error.filename and error.strerror else str(error)
        )
    except ValueError as error:
        return _fail(Look.NOT_VALID, str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if collects:
            gc.enable()


def _events_unless_otlp_http(args: argparse.Namespace) -> int:
    if args.otlp_http is not None:
        return _fail(
            Look.NOT_VALID,
            "--otlp-http is not supported: write `elastic-rs events HOST:PORT --format=otlp --follow` into a file that "
            "a collector's otlpjsonfile receiver reads",
        )
    return _guarded(_events, args)


def _fail(code: int, text: str) -> int:
    print(error_line("elastic-rs", plain(text)), file=sys.stderr)
    return code


def live(args: argparse.Namespace) -> _source.Live:
    """Return the coordinator at the endpoint of :func:`add_origin`.

    Raises:
        ValueError: it is no endpoint, or has port 0.
    """
    endpoints = [parse_endpoint(one, DEFAULT_PORT) for one in args.endpoint.split(",")]
    if any(port == 0 for _, port in endpoints):
        raise ValueError(f"the rendezvous endpoint is `{args.endpoint}`, must have the port on which the job is, not 0")
    return _source.Live(endpoints, args.run_id)


def _read(args: argparse.Namespace) -> tuple[list[Event], dict[str, Any] | None]:
    if args.events is not None:
        return _source.from_files(args.events, args.run_id), None
    events, state = live(args).read()
    _source.warn_of_later(events)
    return events, state


def _story(args: argparse.Namespace) -> tuple[Story, dict[str, Any] | None]:
    events, state = _read(args)
    return story_of(events, None if state is None else state["mono_us"]), state


def _status(args: argparse.Namespace) -> int:
    story, state = _story(args)
    text = json.dumps({"state": state, **_facts(story)}) if args.json else "\n".join(_text.status(story, state))
    try:
        print(text, flush=True)
    except BrokenPipeError:
        close_output()  # `| head` has read enough, and the exit code still says how the job is
    return Look.HEALTHY if _is_healthy(story, state) else Look.NOT_HEALTHY


def _why(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    story, _ = _story(args)
    count = len(story.recoveries)
    if args.recovery is not None and not 1 <= args.recovery <= count:
        return _fail(
            Look.NOT_VALID, f"--recovery is `{args.recovery}`, and there {'is' if count == 1 else 'are'} {count}"
        )
    if args.json:
        facts = _facts(story)["recoveries"]
        print(json.dumps(facts[(args.recovery or count) - 1] if facts else None))
    else:
        print("\n".join(_text.why(story, args.recovery)))
    return Look.HEALTHY


def _list(args: argparse.Namespace) -> int:
    if args.recovery is not None:
        return _fail(
            Look.NOT_VALID, "--list and --recovery cannot be combined: give --recovery=N with a number of the list"
        )
    if args.events is None:
        stories = [_story(args)[0]]
    else:
        stories = [story_of(events) for events in _source.runs_of_files(args.events, args.run_id).values()]
    if args.json:
        print(json.dumps({story.run: _facts(story)["recoveries"] for story in stories}))
    else:
        print("\n".join(line for story in stories for line in _text.recoveries(story)))
    return Look.HEALTHY


def _events(args: argparse.Namespace) -> int:
    args.json |= args.format == "json"
    if args.follow and args.events is not None:
        return _fail(Look.NOT_VALID, "--follow needs an endpoint: files do not change")
    if args.format in ("chrome-trace", "otlp"):
        if args.json:
            return _fail(Look.NOT_VALID, f"--format={args.format} must be given without --json")
        if not args.follow:
            return _traces(args)
        if args.format == "chrome-trace":
            return _fail(
                Look.NOT_VALID, "--format=chrome-trace covers what has happened so far, must be given without --follow"
            )
        from elastic_rs._observe._exporter import export

        export(live(args), _elastic_rs.VERSION)
        return Look.HEALTHY
    names = Names()
    since: dict[str, int] = {}
    if args.follow:
        for line in live(args).follow():
            if args.json:
                print(escaped(line), flush=True)
                continue
            (event,) = parse([line])
            since_us = since.setdefault(incarnation_of(event), event.mono_us)
            print(_text.event_line(event, names.count(event), since_us), flush=True)
    elif args.json and args.events is None:
        # As they were recorded, so that other programs find fields that this release does not know. A peer may have
        # written them.
        for line in live(args).lines():
            print(escaped(line))
    else:
        read = _read(args)[0]
        if args.json:
            print(*(json.dumps(event.raw) for event in read), sep="\n")
            return Look.HEALTHY
        merged = merge(read)[0]
        for event in merged:
            names.count(event)
        for event in merged:
            print(_text.event_line(event, names.story, since.setdefault(incarnation_of(event), event.mono_us)))
    return Look.HEALTHY


def _traces(args: argparse.Namespace) -> int:
    events, state = _read(args)
    now_us = None if state is None else state["mono_us"]
    if args.format == "chrome-trace":
        from elastic_rs._observe._trace import chrome_trace

        print(json.dumps(chrome_trace(events, now_us)))
        return Look.HEALTHY
    from elastic_rs._observe._otlp import traces

    for trace in traces(events, _elastic_rs.VERSION, now_us):
        print(json.dumps(trace))
    return Look.HEALTHY


def _stacks(args: argparse.Namespace) -> int:
    if args.rank is not None and not 0 <= args.rank <= LARGEST_RANK:
        return _fail(Stacks.NOT_VALID, f"--rank is `{args.rank}`, must be from 0 to {LARGEST_RANK}")
    if args.deep and args.rank is None:
        return _fail(Stacks.NOT_VALID, "--deep needs --rank=N: py-spy looks at one rank")
    seen = live(args).look(args.rank, deep=args.deep)
    if args.json:
        print(json.dumps(seen))
    else:
        print(*map(plain, seen["lines"]), sep="\n")
    return Stacks.NOT_WHOLE if seen["silent"] or seen["problems"] else Stacks.WHOLE


def _top(args: argparse.Namespace) -> int:
    from elastic_rs._observe._top import show

    return show(live(args))


def _page(args: argparse.Namespace) -> int:
    from elastic_rs._observe._page import page

    events, state = _read(args)
    if not events:
        return _fail(Look.NOT_VALID, "there are no events yet")
    html = page(events, state)
    if args.output is None:
        print(html, end="")
    else:
        args.output.write_text(html, encoding="utf-8")
    return Look.HEALTHY


def _is_healthy(story: Story, state: dict[str, Any] | None) -> bool:
    if state is not None:
        ended_well = state["state"] == "closed" and not state["failed"]
        return state["state"] == "running" or ended_well
    if story.closed is not None:
        return bool(story.closed.data.get("verdict") == "succeeded")
    return story.formed_us is not None and all(one.completed is not None for one in story.recoveries)


def _facts(story: Story) -> dict[str, Any]:
    recoveries = [
        {
            "round": one.broken.round,
            "root": one.root.facts(),
            "broken": one.broken.facts(),
            "consequences": [event.facts() for event in one.consequences],
            "stopped": [event.facts() for event in one.stopped],
            "early": [event.facts() for event in one.early],
            "mismatched": None if one.mismatched is None else one.mismatched.facts(),
            "hang": None if one.hang is None else one.hang.found.facts(),
            "completed": None if one.completed is None else one.completed.facts(),
            "lasted_s": one.lasted_s(story.end_us()),
            "redo": None if one.redo is None else dataclasses.asdict(one.redo),
            "phases": {phase: dataclasses.asdict(part) for phase, part in one.parts.items()},
        }
        for one in story.recoveries
    ]
    return {
        "run": story.run,
        "elapsed_s": story.elapsed_s(),
        "lost_s": story.lost_s(),
        "goodput": story.goodput(),
        "goodput_at_most": story.goodput_at_most(),
        "recoveries": recoveries,
        "hangs": [
            {"found": one.found.facts(), "over": None if one.over is None else one.over.facts()} for one in story.hangs
        ],
        "away": {node: event.facts() for node, event in story.away.items()},
    }
