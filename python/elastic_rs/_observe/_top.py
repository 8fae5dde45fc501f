"""``elastic-rs top``: a job on a whole terminal, once a second. ``screen`` is pure."""

from __future__ import annotations

import contextlib
import curses
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_rs._observe import _text
from elastic_rs._observe._events import Event, host_of
from elastic_rs._observe._source import Live
from elastic_rs._observe._story import PHASES, Story, story_of
from elastic_rs._terminal import shows_colours

INTERVAL_S = 1.0
_COLUMNS = tuple(phase for phase in PHASES[1:] if phase not in {"group", "state"})
"""Phases that have room in the table. `why` has all of them."""
SORTS = ("state", "node", "lag", "detect", *_COLUMNS)
"""By what the nodes can be sorted."""

_STATES = ("lost", "left", "hangs", "waiting", "spare", "running")
KEPT = 20_000
"""Most events that are kept. A coordinator keeps 4,096 of a run."""
_BARS = {"round": "=", "recovery": "X", "forming": "."}
_COLOURS = {
    "FAILED": curses.COLOR_RED,
    "lost": curses.COLOR_RED,
    "hangs": curses.COLOR_RED,
    "running": curses.COLOR_GREEN,
}


@dataclass
class View:
    """What the person at the terminal has chosen.

    Attributes:
        sort: index in ``SORTS``.
        skip: number of nodes, or of lines, that are scrolled past.
    """

    sort: int = 0
    why: bool = False
    paused: bool = False
    skip: int = 0

    def press(self, key: str) -> bool:
        """Act on a key, by its name in curses. Returns whether to go on."""
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case "p":
                self.paused = not self.paused
            case "s":
                self.sort = (self.sort + 1) % len(SORTS)
            case "w":
                self.why, self.skip = not self.why, 0
            case "j" | "KEY_DOWN":
                self.skip += 1
            case "k" | "KEY_UP":
                self.skip = max(0, self.skip - 1)
        return True


@dataclass
class _Node:
    """A node's row.

    Attributes:
        lag: the number of steps that it is behind.
        still_s: for how long the others wait for it, if a look has named it.
    """

    name: str
    state: str = "waiting"
    lag: int = 0
    still_s: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)
    gone: int = 0

    def key(self, sort: str) -> tuple[float, float, float, list[tuple[str, int, str]]]:
        """Return what the node is sorted by.

        Of nodes in one state, those that are behind are first, and then the slowest. node9 is before node10.
        """
        parts = [(text, digits.lstrip("0")) for text, digits in re.findall(r"(\D*)(\d*)", self.name)]
        name = [(text, len(digits), digits) for text, digits in parts]
        match sort:
            case "node":
                return 0, 0, 0, name
            case "lag":
                return -self.still_s, -self.lag, 0, name
            case "state":
                return (
                    _STATES.index(self.state),
                    -(self.still_s or self.lag),
                    -round(sum(self.durations.values())),
                    name,
                )
            case phase:
                return -self.durations.get(phase, 0.0), 0, 0, name


def screen(events: Sequence[Event], state: dict[str, Any] | None, size: tuple[int, int], view: View) -> list[str]:
    columns, rows = size
    story = story_of(events, None if state is None else state["mono_us"])
    head = [_cut(line, columns) for line in _text.status(story, state)]
    pause, other = "go on" if view.paused else "pause", "nodes" if view.why else "why"
    keys = f"q quit  p {pause}  s sort ({SORTS[view.sort]})  w {other}"
    room = max(0, rows - len(head) - 2)
    heading, body = ([], _text.why(story)) if view.why else _table(story, state, columns, view)
    view.skip = min(view.skip, max(0, len(body) - 1))
    body, room = body[view.skip :], room - len(heading)
    if len(body) > room > 0:
        body = [*body[: room - 1], f"and {len(body) - room + 1} more (j, k scroll)"]
    shown = [_cut(line, columns) for line in (*heading, *body)]
    lines = [*head, "", *shown]
    lines += [""] * max(0, rows - 1 - len(lines))
    return [*lines[: rows - 1], keys[:columns]]


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: max(0, columns - 1)]}…"


def _table(story: Story, state: dict[str, Any] | None, columns: int, view: View) -> tuple[list[str], list[str]]:
    """Return the heading and the rows of the nodes."""
    nodes = _nodes(story)
    behind = dict((state or {}).get("behind", ()))
    for node in nodes:
        node.lag = behind.get(node.name, 0) if node.state == "running" else 0
    _mark_awaited(story, state, nodes)
    nodes.sort(key=lambda node: node.key(SORTS[view.sort]))
    step_s = ((state or {}).get("step_time_us") or 0) / 1e6
    fixed = (
        f"{'NODE':<16} {'STATE':<8} {'LAG':>10} "
        + " ".join(f"{phase[:10].upper():>10}" for phase in _COLUMNS)
        + f" {'GONE':>4} "
    )
    bar = _bar(story, columns - len(fixed) - 2)
    rows = []
    for node in nodes:
        durations = [_text.span(node.durations[phase]) if phase in node.durations else "-" for phase in _COLUMNS]
        times = " ".join(f"{time:>10}" for time in (_lag(node, step_s), *durations))
        rows.append(f"{story.name(node.name)[:16]:<16} {node.state:<8} {times} {node.gone or '-':>4}")
    return [fixed + (f"|{bar}|" if bar else "")], rows


def _lag(node: _Node, step_s: float) -> str:
    """Say how far a node is behind: as time, if it is known how long a step takes, or if the others wait for it."""
    if node.still_s:
        return f"+{_text.span(node.still_s)}"
    if not node.lag:
        return "-"
    return f"+{_text.span(node.lag * step_s)}" if step_s else f"+{node.lag:,}"


def _mark_awaited(story: Story, state: dict[str, Any] | None, nodes: Sequence[_Node]) -> None:
    """Set for how long the others wait for a node. The event of the same ranks has its name."""
    hang = (state or {}).get("hang")
    if hang is None or not hang["ranks"]:
        return
    named = (event for event in reversed(story.events) if event.type in ("hang.found", "hang.waits"))
    last = next(named, None)
    for node in nodes:
        if last is not None and last.node == node.name and last.data.get("ranks") == hang["ranks"]:
            node.still_s = hang["still_s"]
            node.state = "hangs" if hang["found"] else node.state


def _nodes(story: Story) -> list[_Node]:
    nodes: dict[str, _Node] = {}
    gone: dict[str, int] = {}
    away: dict[str, set[str]] = {}
    for event in story.events:
        if event.type == "round.completed":
            _mark_members(event, nodes)
        if event.node is None:
            continue
        host = host_of(event.node)
        if event.type == "node.joined":
            # An agent that was started again has another process id.
            for other in away.pop(host, ()):
                nodes.pop(other, None)
        node = nodes.setdefault(event.node, _Node(event.node))
        match event.type:
            case "node.joined":
                node.state = "waiting"
            case "node.lost" | "node.left" | "node.withdrew" | "node.replaced":
                node.state = "lost" if event.type == "node.lost" else "left"
                away.setdefault(host, set()).add(event.node)
                if event.type in ("node.lost", "node.left"):
                    gone[host] = gone.get(host, 0) + 1
            case "phase":
                node.state = "running"  # only members of the round report phases
                node.durations.update({phase: micros / 1e6 for phase, micros in story.phases_us(event).items()})
        node.gone = gone.get(host, 0)
    return list(nodes.values())


def _mark_members(completed: Event, nodes: dict[str, _Node]) -> None:
    """Set which nodes are members of the round. The others are spares. The text names the first members."""
    present = [node for node in nodes.values() if node.state not in ("lost", "left")]
    members = completed.data.get("nodes")
    surplus = isinstance(members, int) and len(present) > members
    for node in present:
        named = f"({node.name})" in (completed.text or "")
        node.state = "running" if named or not surplus else "spare"


def _bar(story: Story, width: int) -> str:
    """Return the job's time as one line: ``=`` a round runs, ``X`` a recovery goes on, ``.`` the first round forms."""
    if width < 8 or not story.events:
        return ""
    begin, end = story.shown_us()
    periods = story.periods()
    cells = []
    for cell in range(width):
        since, until = (begin + (end - begin) * at // width for at in (cell, cell + 1))
        kinds = {period.kind for period in periods if period.begin_us <= until and period.end_us > since}
        # A recovery that is shorter than a cell fills it, so that it can be seen.
        cells.append(_BARS[next((kind for kind in ("recovery", "forming") if kind in kinds), "round")])
    return "".join(cells)


def highlights(lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yield what stands out on the screen, as row, begin, end and text: states, and the heading of the table."""
    in_table = False
    for row, line in enumerate(lines):
        if line.startswith("NODE "):
            in_table = True
            yield row, 0, len(line), line
        elif row == 0 or in_table:
            found = re.match(r".{16} (lost|hangs|running) " if in_table else r".*? (FAILED) ", line)
            if found:
                yield row, *found.span(1), found[1]


def show(live: Live) -> int:
    """Show a job until the person quits, or the coordinator has gone.

    On what is no terminal, the lines of ``status`` are printed every ten seconds instead.

    Raises:
        AnswerError: the coordinator has gone.
    """
    events: list[Event] = []
    state: dict[str, Any] | None = None
    if not _has_screen():
        while True:
            new, state = live.read()
            events = [*events, *new][-KEPT:]
            story = story_of(events, None if state is None else state["mono_us"])
            print("\n".join(_text.status(story, state)), flush=True)
            time.sleep(10 * INTERVAL_S)
    return curses.wrapper(_watch, live)


def _has_screen() -> bool:
    """Whether there is a terminal for a screen. One that is not known here is taken for an xterm, as most are."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return False
    for name in (os.environ.get("TERM") or "xterm", "xterm"):
        with contextlib.suppress(curses.error):
            curses.setupterm(name)
            os.environ["TERM"] = name
            return curses.tigetstr("cup") is not None
    return False


def _watch(window: curses.window, live: Live) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the terminal is given back
    with contextlib.suppress(curses.error):  # a terminal that cannot
        curses.curs_set(0)
        curses.use_default_colors()
    colours = shows_colours(sys.stdout) and curses.has_colors()
    for colour in {*_COLOURS.values()} if colours else ():
        curses.init_pair(colour, colour, -1)
    view = View()
    events: list[Event] = []
    shown: tuple[list[Event], dict[str, Any] | None] = events, None
    while True:
        new, state = live.read()  # also while paused: the coordinator closes silent connections
        events = [*events, *new][-KEPT:]
        if not view.paused:
            shown = events, state
        rows, columns = window.getmaxyx()
        lines = screen(*shown, (columns, rows), view)
        window.erase()
        with contextlib.suppress(curses.error):  # behind the last character of the screen
            for row, line in enumerate(lines):
                window.addnstr(row, 0, line, columns)
        for row, begin, end, text in highlights(lines) if colours else ():
            window.chgat(
                row, begin, end - begin, curses.color_pair(_COLOURS[text]) if text in _COLOURS else curses.A_BOLD
            )
        window.refresh()
        if not all(map(view.press, _keys(window))):
            return 0


def _keys(window: curses.window) -> Iterator[str]:
    """Yield the keys that are pressed within an interval, as soon as there are any."""
    window.timeout(int(1000 * INTERVAL_S))
    with contextlib.suppress(curses.error):  # there is none
        while True:
            yield window.getkey()
            window.timeout(0)
