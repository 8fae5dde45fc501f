"""``elastic-rs top``: a job on a whole terminal, once a second. ``screen`` is pure."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_rs._terminal import shows_colours
from elastic_rs.observe import _text
from elastic_rs.observe._events import host_of
from elastic_rs.observe._story import PHASES, Story, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_rs.observe._events import Event
    from elastic_rs.observe._source import Live

__all__ = ["View", "screen", "show"]

INTERVAL_S = 1.0
SORTS = ("state", "node", "lag", *PHASES)
"""By what the nodes can be sorted."""

_STATES = ("lost", "left", "waiting", "spare", "running")
KEPT = 20_000
"""Most events that are kept. A coordinator keeps 4,096 of a run."""
_BARS = {"round": "=", "recovery": "X", "forming": "."}
_RED, _GREEN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_COLOURS = {"lost": _RED, "running": _GREEN}


@dataclass
class View:
    """What the person at the terminal has chosen.

    Attributes:
        sort: index in ``SORTS``.
        why: show the last recovery instead of the nodes.
        paused: what is shown stays.
        colours: the terminal shows colours.
        skip: number of nodes, or of lines, that are scrolled past.
    """

    sort: int = 0
    why: bool = False
    paused: bool = False
    colours: bool = True
    skip: int = 0

    def press_all(self, keys: str) -> bool:
        """Act on keys that came together, as a key that is held does. Returns whether to go on."""
        return all(self.press(key) for key in re.findall(r"\x1b\[[A-Z]|.", keys, re.DOTALL))

    def press(self, key: str) -> bool:
        """Act on a key. Returns whether to go on."""
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case "p":
                self.paused = not self.paused
            case "s":
                self.sort = (self.sort + 1) % len(SORTS)
            case "w":
                self.why, self.skip = not self.why, 0
            case "j" | "\x1b[B":
                self.skip += 1
            case "k" | "\x1b[A":
                self.skip = max(0, self.skip - 1)
        return True


@dataclass
class _Node:
    """A node's row. ``lag`` is the number of steps that it is behind."""

    name: str
    state: str = "waiting"
    lag: int = 0
    took: dict[str, float] = field(default_factory=dict)
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
                return -self.lag, 0, 0, name
            case "state":
                return _STATES.index(self.state), -self.lag, -round(sum(self.took.values())), name
            case phase:
                return -self.took.get(phase, 0.0), 0, 0, name


def screen(events: Sequence[Event], state: dict[str, Any] | None, size: tuple[int, int], view: View) -> list[str]:
    """Return the lines of the screen.

    Args:
        events: all of one run, in their order.
        state: what the coordinator says of now.
        size: columns and rows of the terminal.
        view: what to show.
    """
    columns, rows = size
    story = tell(events, None if state is None else state["mono_us"])
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
    if view.colours:
        head = [line.replace(" FAILED ", f" {_RED}FAILED{_PLAIN} ", 1) for line in head]
        shown = shown if view.why else [_coloured(line) for line in shown]
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
    nodes.sort(key=lambda node: node.key(SORTS[view.sort]))
    step_s = ((state or {}).get("step_time_us") or 0) / 1e6
    fixed = (
        f"{'NODE':<16} {'STATE':<8} {'LAG':>10} "
        + " ".join(f"{phase[:10].upper():>10}" for phase in PHASES[1:])
        + f" {'GONE':>4} "
    )
    bar = _bar(story, columns - len(fixed) - 2)
    rows = []
    for node in nodes:
        took = [_text.span(node.took[phase]) if phase in node.took else "-" for phase in PHASES[1:]]
        times = " ".join(f"{time:>10}" for time in (_lag(node.lag, step_s), *took))
        rows.append(f"{story.name(node.name)[:16]:<16} {node.state:<8} {times} {node.gone or '-':>4}")
    return [fixed + (f"|{bar}|" if bar else "")], rows


def _lag(steps: int, step_s: float) -> str:
    """Say how far a node is behind: as time, if it is known how long a step takes."""
    if not steps:
        return "-"
    return f"+{_text.span(steps * step_s)}" if step_s else f"+{steps:,}"


def _nodes(story: Story) -> list[_Node]:
    nodes: dict[str, _Node] = {}
    gone: dict[str, int] = {}
    away: dict[str, set[str]] = {}
    for event in story.events:
        if event.type == "round.completed":
            _place(event, nodes)
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
                node.state = "running"  # only members of the round tell phases
                node.took.update({phase: micros / 1e6 for phase, micros in story.phases_us(event).items()})
        node.gone = gone.get(host, 0)
    return list(nodes.values())


def _place(completed: Event, nodes: dict[str, _Node]) -> None:
    """Note which nodes run the round. The others are spares. The text names the members, of many the first ones."""
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


def _coloured(line: str) -> str:
    """Colour a row by its state, which follows the name."""
    if line.startswith("NODE "):
        return f"{_BOLD}{line}{_PLAIN}"
    name, state = line[:17], line[17:25]
    colour = _COLOURS.get(state.strip())
    return f"{name}{colour}{state}{_PLAIN}{line[25:]}" if colour else line


def show(live: Live) -> int:
    """Show a job until the person quits, or the coordinator has gone.

    On what is no terminal, the lines of ``status`` are printed every ten seconds instead.

    Raises:
        AnswerError: the coordinator has gone.
    """
    events: list[Event] = []
    state: dict[str, Any] | None = None
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        while True:
            new, state = live.read()
            events = [*events, *new][-KEPT:]
            story = tell(events, None if state is None else state["mono_us"])
            print("\n".join(_text.status(story, state)), flush=True)
            time.sleep(10 * INTERVAL_S)
    view = View(colours=shows_colours(sys.stdout))
    shown = events, state
    with _whole_terminal():
        while True:
            new, state = live.read()  # also while paused: the coordinator closes silent connections
            events = [*events, *new][-KEPT:]
            if not view.paused:
                shown = events, state
            lines = screen(*shown, shutil.get_terminal_size(), view)
            sys.stdout.write("\x1b[H" + "\r\n".join(f"\x1b[K{line}" for line in lines))
            sys.stdout.flush()
            if select.select([sys.stdin], [], [], INTERVAL_S)[0] and not view.press_all(_keys()):
                return 0


def _keys() -> str:
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace")


@contextlib.contextmanager
def _whole_terminal() -> Iterator[None]:
    """Use the whole terminal, key by key, and give it back as it was.

    Lines do not wrap meanwhile: what a worker says may be wider than it has characters.
    """
    before = termios.tcgetattr(sys.stdin)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through what follows
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J")
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
