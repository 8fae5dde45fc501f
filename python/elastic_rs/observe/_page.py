"""A job's story as one HTML file: a timeline of nodes and rounds, and each recovery. Pure.

The file has no script and loads nothing. Texts that peers wrote are escaped. It is usable by keyboard, since it is made
of the browser's own elements, and its colours follow the reader's choice of light or dark.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Any

from elastic_rs.observe import _text
from elastic_rs.observe._story import PHASES, Period, Story, phase_periods, phases_us, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_rs.observe._events import Event

__all__ = ["page"]

_SHOWN = 50
"""Most nodes in the timeline: those that lost most first."""
_BARS = 160
"""Most phases in the timeline: the longest."""
_MARKED = 80
"""Most marks in the timeline: failures and losses first. As many rounds and causes."""
_TITLE = 120
"""Most characters of a mark's text."""
_LINE = 300
"""Most characters of a line about a recovery."""
_LISTED = 10
"""Most recoveries that are told in full: the last ones."""
_WIDTH, _NAMES, _ROW = 1000, 150, 16
_MARKS = {
    "worker.exited": ("exited", "M-4-4 4 4M4-4-4 4"),
    "node.lost": ("exited", "M-5-4 5-4 0 5Z"),
    "node.left": ("left", "M-5-4 5-4 0 5Z"),
    "node.joined": ("joined", "M-5 4 5 4 0-5Z"),
}

_STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--dim:#667;--line:#d5d9e0;--good:#2f8f4e;--bad:#c2352b;
--stop:#d9822b;--rendezvous:#2b6cb0;--start:#7a4fb5;--import:#8a8f98;--detect:#b5a642}
@media(prefers-color-scheme:dark){:root{--fg:#e6e8eb;--bg:#15181c;--dim:#99a2ad;--line:#333941;--good:#55b877;
--bad:#ef6a5f;
--stop:#e69b4d;--rendezvous:#5b9ce0;--start:#a985dd;--import:#9aa0a8;--detect:#d1c15e}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:72rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}pre{overflow-x:auto;font-size:.85rem;line-height:1.45}
svg{width:100%;height:auto;min-width:40rem}figure{margin:0;overflow-x:auto}text{fill:var(--fg);font-size:11px}rect{height:10px}
.dim{fill:var(--dim)}.axis{stroke:var(--line)}.round{fill:var(--good)}.recovery,.forming{fill:var(--bad)}.forming{opacity:.4}
.stop{fill:var(--stop)}.rendezvous{fill:var(--rendezvous)}.start{fill:var(--start)}.import{fill:var(--import)}
.detect{fill:var(--detect)}.mark{fill:none;stroke-width:2}.exited{stroke:var(--bad)}.left{stroke:var(--dim)}
.joined{stroke:var(--good)}.cause{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 2}
details{border-top:1px solid var(--line);padding:.3rem 0}summary{cursor:pointer}
ul.key{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}
.key svg{width:12px;min-width:0;vertical-align:-1px}
""".strip()


def page(events: Sequence[Event], state: dict[str, Any] | None = None) -> str:
    """Return the page of a run.

    Args:
        events: all of one run, in their order; at least one.
        state: what a live coordinator says of now. None: only events are known.
    """
    story = tell(events, None if state is None else state["mono_us"])
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = escape(f"job {story.run}")
    status = escape("\n".join(_text.status(story, state)))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1><pre>{status}</pre>",
            "<h2>Timeline</h2>",
            *_timeline(story),
            *_key(),
            f"<h2>Recoveries ({len(story.recoveries)})</h2>",
            *_recoveries(story),
            "</body></html>\n",
        ]
    )


def _recoveries(story: Story) -> Iterator[str]:
    if not story.recoveries:
        yield "<p>None: the job has not been disturbed.</p>"
    count = len(story.recoveries)
    if count > _LISTED:
        yield f"<p>The last {_LISTED} of {count}.</p>"
    for number in range(count, max(0, count - _LISTED), -1):
        title, *rest = (line[:_LINE] for line in _text.why(story, number))
        shown = " open" if number == count else ""
        root = _text.what(story.recoveries[number - 1].root, story)[:_LINE]
        summary = f"<summary>{escape(title)}: {escape(root)}</summary>"
        yield f"<details{shown}>{summary}<pre>{escape(chr(10).join(rest))}</pre></details>"


def _key() -> Iterator[str]:
    kinds = ["round", "recovery", *PHASES]
    yield '<ul class="key">'
    for kind in kinds:
        box = f'<svg width="12" height="12" viewBox="0 0 12 12"><rect class="{kind}" width="12"/></svg>'
        yield f"<li>{box} {kind}</li>"
    yield "</ul>"


class _Scale:
    """From the coordinator's clock to the drawing."""

    def __init__(self, begin_us: int, end_us: int) -> None:
        self._begin, self._span = begin_us, max(1, end_us - begin_us)

    def x(self, at_us: int) -> float:
        share = min(1.0, max(0.0, (at_us - self._begin) / self._span))
        return round(_NAMES + share * (_WIDTH - _NAMES - 10), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        for fifth in range(6):
            at = self._begin + self._span * fifth // 5
            yield self.x(at), _text.span((at - self._begin) / 1e6) if fifth else "0"


def _timeline(story: Story) -> Iterator[str]:
    nodes = _worst(story.events)
    rows = {node: at + 1 for at, node in enumerate(nodes[:_SHOWN])}
    scale = _Scale(*story.shown_us())
    height = (len(rows) + 2) * _ROW + 14
    yield f'<figure><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of nodes and rounds">'
    for x, label in scale.ticks():
        yield f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{height - 16}"/>'
        anchor = "end" if x > _WIDTH - 40 else "middle"
        yield f'<text class="dim" x="{x}" y="{height - 4}" text-anchor="{anchor}">{escape(label)}</text>'
    yield f'<text x="0" y="{_ROW - 4}">job</text>'
    for period in story.periods()[-2 * _MARKED :]:
        name = "waiting for nodes" if period.kind == "forming" else period.name
        yield _bar(period, name, 0, scale)
    for node, row in rows.items():
        name, whole = escape(story.name(node)[:22]), escape(node)
        yield f'<text x="0" y="{row * _ROW + _ROW - 4}">{name}<title>{whole}</title></text>'
    yield from _phases(story.events, rows, scale)
    marked = [(event, rows[event.node]) for event in story.events if event.type in _MARKS and event.node in rows]
    for event, row in sorted(marked, key=lambda one: list(_MARKS).index(one[0].type))[:_MARKED]:
        kind, path = _MARKS[event.type]
        title = escape((event.text or _text.what(event, story))[:_TITLE])
        at = f"translate({scale.x(event.mono_us)} {row * _ROW + _ROW // 2})"
        yield f'<path class="mark {kind}" d="{path}" transform="{at}"><title>{title}</title></path>'
    for recovery in story.recoveries[-_MARKED:]:
        if recovery.root.node in rows:
            x1, x2 = scale.x(recovery.root.mono_us), scale.x(recovery.broken.mono_us)
            y1 = rows[recovery.root.node] * _ROW + 8
            yield f'<line class="cause" x1="{x1}" y1="{y1}" x2="{x2}" y2="{_ROW - 3}"/>'
    yield "</svg></figure>"
    if len(nodes) > _SHOWN:
        yield f"<p>The {_SHOWN} nodes that lost most time, of {len(nodes)}.</p>"


def _phases(events: Sequence[Event], rows: dict[str, int], scale: _Scale) -> Iterator[str]:
    """Draw the longest phases of these nodes."""
    bars = [
        (period, rows[event.node])
        for event in events
        if event.type == "phase" and event.node in rows
        for period in phase_periods(event)
    ]
    for period, row in sorted(bars, key=lambda bar: bar[0].begin_us - bar[0].end_us)[:_BARS]:
        yield _bar(period, period.name, row, scale)


def _bar(period: Period, name: str, row: int, scale: _Scale) -> str:
    x, end = scale.x(period.begin_us), scale.x(period.end_us)
    title = escape(f"{name}: {_text.span(max(0, period.end_us - period.begin_us) / 1e6)}")
    width = max(1.0, round(end - x, 1))
    return f'<rect class="{period.kind}" x="{x}" y="{row * _ROW + 3}" width="{width}"><title>{title}</title></rect>'


def _worst(events: Sequence[Event]) -> list[str]:
    """Return all nodes: first those that failed or went, then those whose phases took longest."""
    cost: dict[str, float] = {}
    for event in events:
        if event.node is None:
            continue
        cost.setdefault(event.node, 0.0)
        if event.type in ("worker.exited", "node.lost"):
            cost[event.node] += 1e12
        elif event.type == "phase":
            cost[event.node] += sum(phases_us(event).values())
    return sorted(cost, key=lambda node: (-cost[node], node))
