"""A job's story as one HTML file: a timeline of nodes and rounds, its worst nodes, and each recovery. Pure.

The file has no script and loads nothing. Texts that peers wrote are escaped. It is usable by keyboard, since it is made
of the browser's own elements, and its colours follow the reader's choice of light or dark. What the timeline shows by
pointing at it is in the texts below, too.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

from elastic_rs._observe import _text
from elastic_rs._observe._events import Event
from elastic_rs._observe._story import PHASES, Period, Recovery, Story, story_of

LIMIT_BYTES = 60_000
"""Most bytes of a page. One that would have more shows less of everything."""

REFRESH_S = 5
"""A served page asks for itself again after so many seconds."""

_OTHERS = ("rendezvous", "import")
"""Phases that say nothing about their node: it waits for others, or rank 0's node measures for all."""

_WIDTH, _NAMES, _ROW = 1000, 150, 16
_MARKS = {
    "worker.exited": ("exited", "M-4-4 4 4M4-4-4 4"),
    "worker.ended": ("exited", "M-4-4 4 4M4-4-4 4"),
    "node.lost": ("exited", "M-5-4 5-4 0 5Z"),
    "node.left": ("left", "M-5-4 5-4 0 5Z"),
    "node.joined": ("joined", "M-5 4 5 4 0-5Z"),
}
_MARK_KEY = (
    ("first", "worker.exited", "first failure"),
    ("exited", "worker.exited", "follows from it"),
    ("exited", "node.lost", "node lost"),
    ("left", "node.left", "node left"),
    ("joined", "node.joined", "node joined"),
)


@dataclass(frozen=True)
class Served:
    """How a coordinator serves a page.

    Attributes:
        still: it does not ask for itself again.
        named: it was asked for by its run's name, so there may be others.
    """

    still: bool
    named: bool


class _Detail:
    """How much a page shows."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.nodes = self._of(50)  # in the timeline: those that lost most first
        self.bars = self._of(160)  # phases in the timeline: the longest
        self.marked = self._of(80)  # marks in the timeline: failures and losses first. As many rounds and causes
        self.title = self._of(120)  # characters of a mark's text
        self.line = self._of(300)  # characters of a line about a recovery
        self.status = self._of(600)  # characters of a line about the job
        self.name = max(8, self._of(22))  # characters of a node's name
        self.recoveries = self._of(10)  # recoveries that are shown in full: the last ones
        self.hangs = self._of(3)  # hangs that are shown: the last ones
        self.zoomed = self._of(4)  # of them those that are drawn
        self.zoomed_nodes = self._of(8)  # nodes in these drawings: the slowest
        self.worst = self._of(10)  # nodes in the table

    def _of(self, most: int) -> int:
        return max(1, int(most * self._share))


_STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--dim:#667;--line:#d5d9e0;--good:#2f8f4e;--bad:#c2352b;
--stop:#d9822b;--rendezvous:#2b6cb0;--start:#7a4fb5;--import:#8a8f98;--detect:#b5a642;--first_step:#2a8f8f;--hang:#a8328f;
--group:#b0577a;--state:#5f7f2f}
@media(prefers-color-scheme:dark){:root{--fg:#e6e8eb;--bg:#15181c;--dim:#99a2ad;--line:#333941;--good:#55b877;
--bad:#ef6a5f;
--stop:#e69b4d;--rendezvous:#5b9ce0;--start:#a985dd;--import:#9aa0a8;--detect:#d1c15e;--first_step:#5cc0c0;--hang:#e07bc8;
--group:#d98aa8;--state:#9bbf63}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:72rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}pre{overflow-x:auto;white-space:pre-wrap;font-size:.85rem;line-height:1.45}
svg{width:100%;height:auto;min-width:40rem}figure{margin:0;overflow-x:auto}text{fill:var(--fg);font-size:11px}rect{height:10px}
.dim{fill:var(--dim)}.axis{stroke:var(--line)}.round{fill:var(--good)}.recovery,.forming{fill:var(--bad)}.forming{opacity:.4}
.stop{fill:var(--stop)}.rendezvous{fill:var(--rendezvous)}.start{fill:var(--start)}.import{fill:var(--import)}
.detect{fill:var(--detect)}.group{fill:var(--group)}.state{fill:var(--state)}
.first_step{fill:var(--first_step)}.hang{fill:var(--hang)}.mark{fill:none;stroke-width:2}.exited{stroke:var(--bad)}.left{stroke:var(--dim)}
.joined{stroke:var(--good)}.cause{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 2}
.first{stroke:var(--bad);stroke-width:4}.exited{stroke-width:1.5}
table{border-collapse:collapse;font-size:.85rem}th,td{text-align:right;white-space:nowrap;padding:.15rem .8rem .15rem 0}
th:first-child,td:first-child{text-align:left}th{font-weight:600;border-bottom:1px solid var(--line)}
nav{font-size:.85rem;color:var(--dim)}a{color:var(--rendezvous)}
:focus-visible{outline:2px solid var(--rendezvous);outline-offset:2px}
details{border-top:1px solid var(--line);padding:.3rem 0}summary{cursor:pointer}
ul.key{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}
.key svg{width:12px;min-width:0;vertical-align:-1px}
""".strip()


def page(events: Sequence[Event], state: dict[str, Any] | None = None, *, served: Served | None = None) -> str:
    """Return the page of a run, at most :data:`LIMIT_BYTES`."""
    story = story_of(events, None if state is None else state["mono_us"])
    run = story.run if events else str(state["run"] if state is not None else "")
    shown = ""
    for halved in range(8):
        parts = _parts(story, run, state, served, _Detail(0.5**halved))
        shown = _document(f"job {run}", parts, refreshes=served is not None and not served.still)
        if len(shown.encode()) <= LIMIT_BYTES:
            break
    return shown


def listing(names: Sequence[str], more: int, *, still: bool) -> str:
    parts = [_nav([_refreshing("", still=still)]), f"<h1>{len(names) + more} runs at this coordinator</h1>", "<ul>"]
    room = LIMIT_BYTES - 6000
    for at, name in enumerate(names):
        item = f'<li><a href="?run={quote(name, safe="")}">{escape(name)}</a></li>'
        room -= len(item.encode()) + 1
        if room < 0:
            more += len(names) - at
            break
        parts.append(item)
    parts.append("</ul>")
    if more:
        parts.append(f"<p>And {more} more: <code>?run=NAME</code> in the address shows one.</p>")
    return _document("runs", parts, refreshes=not still)


def _document(title: str, parts: Sequence[str], *, refreshes: bool) -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width">',
    ]
    if refreshes:
        head.append(f'<meta http-equiv="refresh" content="{REFRESH_S}">')
    head.append(f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>")
    return "\n".join([*head, *parts, "</body></html>\n"])


def _parts(story: Story, run: str, state: dict[str, Any] | None, served: Served | None, detail: _Detail) -> list[str]:
    """Return what the page of a run has below its head."""
    parts = []
    if served is not None:
        links = ['<a href="/">all runs</a>'] if served.named else []
        parts.append(_nav([*links, _refreshing(f"run={quote(run, safe='')}&", still=served.still)]))
    lines = _text.status(story, state) if story.events else []
    status = "\n".join(line.removesuffix(" (see why)")[: detail.status] for line in lines)
    parts.append(f"<h1>{escape(f'job {run}')}</h1><pre>{escape(status) or 'No event is known yet.'}</pre>")
    if story.events:
        nodes = _costs(story)
        parts += ["<h2>Timeline</h2>", *_timeline(story, nodes, detail), *_key()]
        parts += [*_worst(story, nodes, detail), *_hangs(story, detail)]
        parts += [f"<h2>Recoveries ({len(story.recoveries)})</h2>", *_recoveries(story, detail)]
    return parts


def _nav(links: Sequence[str]) -> str:
    return f"<nav>{' &middot; '.join(links)}</nav>"


def _refreshing(query: str, *, still: bool) -> str:
    if still:
        return f'shown as it was; <a href="?{escape(query)}refresh=on">refresh every {REFRESH_S} s</a>'
    return f'refreshes every {REFRESH_S} s; <a href="?{escape(query)}refresh=off">stop</a>'


def _hangs(story: Story, detail: _Detail) -> Iterator[str]:
    """Yield the lines of the last hangs."""
    if not story.hangs:
        return
    yield f"<h2>Hangs ({len(story.hangs)})</h2>"
    for hang in reversed(story.hangs[-detail.hangs :]):
        lines = "\n".join(line[: detail.line] for line in _text.hang_lines(hang, story))
        yield f"<pre>{escape(lines)}</pre>"


def _recoveries(story: Story, detail: _Detail) -> Iterator[str]:
    if not story.recoveries:
        yield "<p>None so far: no round was interrupted.</p>"
    count = len(story.recoveries)
    if count > detail.recoveries:
        yield f"<p>The last {detail.recoveries} of {count}.</p>"
    for number in range(count, max(0, count - detail.recoveries), -1):
        recovery = story.recoveries[number - 1]
        title, *rest = (line[: detail.line] for line in _text.why(story, number))
        shown = " open" if number == count else ""
        root = _text.what(recovery.root, story)[: detail.line]
        drawn = _zoom(story, recovery, detail) if number > count - detail.zoomed else ()
        summary = f"<summary>{escape(title)}: {escape(root)}</summary>"
        yield f"<details{shown}>{summary}<pre>{escape(chr(10).join(rest))}</pre>{''.join(drawn)}</details>"


def _key() -> Iterator[str]:
    def box(inside: str) -> str:
        return f'<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">{inside}</svg>'

    yield '<ul class="key">'
    for kind in ["round", "recovery", *PHASES, "hang"]:
        drawn = f'<rect class="{kind}" width="12"/>'
        yield f"<li>{box(drawn)} {kind}</li>"
    for kind, of, name in _MARK_KEY:
        drawn = f'<path class="mark {kind}" d="{_MARKS[of][1]}" transform="translate(6 6)"/>'
        yield f"<li>{box(drawn)} {name}</li>"
    yield "</ul>"


class _Scale:
    """From the coordinator's clock to the drawing."""

    def __init__(self, begin_us: int, end_us: int) -> None:
        self._begin, self._span = begin_us, max(1, end_us - begin_us)

    def x(self, at_us: int) -> float:
        share = min(1.0, max(0.0, (at_us - self._begin) / self._span))
        return round(_NAMES + share * (_WIDTH - _NAMES - 10), 1)

    def axis(self, height: int) -> Iterator[str]:
        for fifth in range(6):
            x = self.x(self._begin + self._span * fifth // 5)
            label = _text.span(self._span * fifth / 5e6) if fifth else "0"
            anchor = "end" if x > _WIDTH - 40 else "middle"
            yield f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{height - 16}"/>'
            yield f'<text class="dim" x="{x}" y="{height - 4}" text-anchor="{anchor}">{escape(label)}</text>'


def _figure(what: str, rows: int, scale: _Scale) -> Iterator[str]:
    height = (rows + 1) * _ROW + 14
    # It can be scrolled on a narrow screen, so the keyboard must reach it.
    label = f'aria-label="{what}"'
    yield f'<figure tabindex="0" {label}><svg viewBox="0 0 {_WIDTH} {height}" role="img" {label}>'
    yield from scale.axis(height)


def _named(node: str, row: int, story: Story, detail: _Detail) -> str:
    name, whole = escape(story.name(node)[: detail.name]), escape(node[: detail.title])
    return f'<text x="0" y="{row * _ROW + _ROW - 4}">{name}<title>{whole}</title></text>'


def _timeline(story: Story, nodes: Sequence[_Cost], detail: _Detail) -> Iterator[str]:
    rows = {cost.node: at + 1 for at, cost in enumerate(nodes[: detail.nodes])}
    scale = _Scale(*story.shown_us())
    yield from _figure("timeline of nodes and rounds", len(rows) + 1, scale)
    yield f'<text x="0" y="{_ROW - 4}">job</text>'
    for period in story.periods()[-2 * detail.marked :]:
        name = "waiting for nodes" if period.kind == "forming" else period.name
        yield _bar(period, name, 0, scale)
    for node, row in rows.items():
        yield _named(node, row, story, detail)
    yield from _phases(story, rows, scale, detail)
    for hang in story.hangs[-detail.marked :]:
        # The node of the first rank that is waited for. If it is not known, or not shown, all wait.
        end_us = story.end_us() if hang.ended_us is None else hang.ended_us
        period = Period("hang", hang.began_us(), end_us)
        yield _bar(period, _text.what(hang.found, story)[: detail.title], rows.get(hang.found.node or "", 0), scale)
    yield from _marks(story, rows, scale, detail)
    for recovery in story.recoveries[-detail.marked :]:
        if recovery.root.node in rows:
            x1, x2 = scale.x(recovery.root.mono_us), scale.x(recovery.broken.mono_us)
            y1 = rows[recovery.root.node] * _ROW + 8
            yield f'<line class="cause" x1="{x1}" y1="{y1}" x2="{x2}" y2="{_ROW - 3}"/>'
    yield "</svg></figure>"
    if len(nodes) > detail.nodes:
        yield f"<p>The {detail.nodes} nodes that lost most time, of {len(nodes)}.</p>"


def _marks(story: Story, rows: dict[str, int], scale: _Scale, detail: _Detail) -> Iterator[str]:
    roots = {recovery.root.id for recovery in story.recoveries}
    marked = [
        (event, rows[event.node])
        for event in story.events
        if event.node in rows and event.type in _MARKS and (event.type != "worker.ended" or event.id in roots)
    ]
    marked.sort(key=lambda one: (one[0].id not in roots, list(_MARKS).index(one[0].type)))
    for event, row in reversed(marked[: detail.marked]):  # the first failures above the others
        kind, path = _MARKS[event.type]
        if event.id in roots and kind == "exited":
            kind = "first"
        title = escape((event.text or _text.what(event, story))[: detail.title])
        at = f"translate({scale.x(event.mono_us)} {row * _ROW + _ROW // 2})"
        yield f'<path class="mark {kind}" d="{path}" transform="{at}"><title>{title}</title></path>'


def _phases(story: Story, rows: dict[str, int], scale: _Scale, detail: _Detail) -> Iterator[str]:
    """Draw the longest phases of these nodes."""
    bars = [
        (period, rows[event.node])
        for event in story.events
        if event.type == "phase" and event.node in rows
        for period in story.phase_periods(event)
    ]
    for period, row in sorted(bars, key=lambda bar: bar[0].begin_us - bar[0].end_us)[: detail.bars]:
        yield _bar(period, period.name, row, scale)


def _zoom(story: Story, recovery: Recovery, detail: _Detail) -> Iterator[str]:
    """Draw the phases of the slowest nodes in one recovery."""
    if recovery.completed is None:
        return
    periods: dict[str, list[Period]] = {}
    for event in story.events:
        if event.type == "phase" and event.node and event.cause[:1] == (recovery.completed.id,):
            periods.setdefault(event.node, []).extend(story.phase_periods(event))

    def own_us(node: str) -> int:
        return sum(period.end_us - period.begin_us for period in periods[node] if period.kind != "rendezvous")

    slowest = sorted((node for node in periods if periods[node]), key=lambda node: (-own_us(node), node))
    shown = slowest[: detail.zoomed_nodes]
    if not shown:
        return
    scale = _Scale(recovery.root.mono_us, max(period.end_us for node in shown for period in periods[node]))
    yield from _figure("phases of the slowest nodes", len(shown), scale)
    for row, node in enumerate(shown):
        yield _named(node, row, story, detail)
        for period in periods[node]:
            yield _bar(period, period.name, row, scale)
    yield "</svg></figure>"
    if len(slowest) > len(shown):
        yield f"<p>The {len(shown)} slowest nodes of {len(slowest)}. In <i>rendezvous</i> they wait for the others.</p>"


def _bar(period: Period, name: str, row: int, scale: _Scale) -> str:
    x, end = scale.x(period.begin_us), scale.x(period.end_us)
    title = escape(f"{name}: {_text.span(max(0, period.end_us - period.begin_us) / 1e6)}")
    width = max(1.0, round(end - x, 1))
    return f'<rect class="{period.kind}" x="{x}" y="{row * _ROW + 3}" width="{width}"><title>{title}</title></rect>'


@dataclass
class _Cost:
    """What a node has cost the job.

    Attributes:
        first: recoveries that began with it.
        follows: failures of its workers that followed from others.
        longest_us: the longest of each of its phases, in microseconds.
        total_us: all of its phases but those that say nothing about it, in microseconds.
    """

    node: str
    first: int = 0
    follows: int = 0
    went: int = 0
    longest_us: dict[str, int] | None = None
    total_us: int = 0

    def key(self) -> tuple[int, int, int, int, str]:
        """Sort by this: the worst first."""
        return -self.first, -self.went, -self.follows, -self.total_us, self.node


def _costs(story: Story) -> list[_Cost]:
    """Return all nodes: first those that recoveries began with, then those that failed or went, then the slow ones."""
    roots = {recovery.root.id for recovery in story.recoveries}
    costs: dict[str, _Cost] = {}
    for event in story.events:
        if event.node is None:
            continue
        cost = costs.setdefault(event.node, _Cost(event.node))
        cost.first += event.id in roots and event.type in ("worker.exited", "worker.ended", "node.lost", "hang.found")
        cost.went += event.type == "node.lost"
        cost.follows += event.type == "worker.exited" and event.id not in roots
        if event.type == "phase":
            longest = cost.longest_us or {}
            for phase, micros in story.phases_us(event).items():
                longest[phase] = max(longest.get(phase, 0), micros)
                cost.total_us += micros if phase not in _OTHERS else 0
            cost.longest_us = longest
    return sorted(costs.values(), key=_Cost.key)


def _worst(story: Story, nodes: Sequence[_Cost], detail: _Detail) -> Iterator[str]:
    """Yield a table of the nodes that cost most."""
    if not story.recoveries:
        return
    phases = [phase for phase in PHASES if any(phase in (cost.longest_us or {}) for cost in nodes)]
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("began", "lost", "follows", *phases))
    yield '<h2>Worst nodes</h2><figure tabindex="0" aria-label="worst nodes"><table>'
    yield f'<tr><th scope="col">node</th>{heads}</tr>'
    for cost in nodes[: detail.worst]:
        counts = "".join(f"<td>{count or '-'}</td>" for count in (cost.first, cost.went, cost.follows))
        longest = (cost.longest_us or {}).get
        spans = "".join(
            f"<td>{_text.span(us / 1e6) if (us := longest(phase)) is not None else '-'}</td>" for phase in phases
        )
        yield f"<tr><td>{escape(story.name(cost.node)[: detail.name])}</td>{counts}{spans}</tr>"
    yield "</table></figure><p>How many recoveries began with the node, how often it was lost, and how many failures of"
    yield "its workers followed from others. Of each phase the longest.</p>"
