"""SVG plots: bars of ratios (how many times better ours is) and lines, with logarithmic scales, and bars of shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROW, LABEL, PLOT, VALUE, TOP = 20, 330, 420, 130, 64
WIDTH = LABEL + PLOT + VALUE
# Longest bar. A measurement of almost no time would leave the other bars no room.
CLIPPED = 1000.0
BETTER, WORSE, TARGET, GRID, TEXT = "#2a7a4b", "#b4552d", "#222222", "#d5d5d5", "#222222"


@dataclass(frozen=True)
class Bar:
    """One measurement."""

    label: str
    ratio: float
    """Above 1 where ours is better."""
    shown: str
    """The ratio as text."""
    target: float | None = None
    """The target: the smallest ratio that is accepted."""


def write(path: Path, title: str, note: str, bars: Sequence[Bar]) -> None:
    """Write the plot to a file."""
    path.write_text(_svg(title, note, bars))


def _svg(title: str, note: str, bars: Sequence[Bar]) -> str:
    ends = [value for bar in bars for value in (bar.ratio, bar.target or 1.0) if value > 0]
    low = min(0.5, *ends)
    high = min(CLIPPED, max(2.0, *ends))

    def x(ratio: float) -> float:
        share = math.log(min(max(ratio, low), high) / low) / math.log(high / low)
        return LABEL + PLOT * share

    height = TOP + ROW * len(bars) + 34
    bottom = TOP + ROW * len(bars)
    parts = _head(WIDTH, height, title, note)
    for tick in _ticks(low, high):
        at = x(tick)
        parts.append(_line(at, TOP - 6, bottom, TEXT if tick == 1 else GRID))
        parts.append(_text(at, bottom + 16, f"{tick:g}", anchor="middle"))
    for row, bar in enumerate(bars):
        y = TOP + ROW * row
        left, right = sorted((x(1.0), x(bar.ratio)))
        color = BETTER if bar.ratio >= 1 else WORSE
        parts.append(_text(LABEL - 8, y + 13, bar.label, anchor="end"))
        parts.append(f'<rect x="{left:.1f}" y="{y + 3}" width="{right - left:.1f}" height="{ROW - 6}" fill="{color}"/>')
        if bar.target is not None:
            parts.append(_line(x(bar.target), y + 1, y + ROW - 1, TARGET, width=2.5))
        parts.append(_text(LABEL + PLOT + 10, y + 13, bar.shown))
    parts.append(_text(LABEL, bottom + 30, "times better than PyTorch's; the short bar marks the target"))
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class Series:
    """One line."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


def write_lines(path: Path, title: str, axes: tuple[str, str], series: Sequence[Series]) -> None:
    """Write lines to a file. ``axes`` has the labels of the horizontal and the vertical axis."""
    width, height, left, right, top, bottom = 640, 360, 70, 500, 60, 310
    xs, ys = ([point[axis] for line in series for point in line.points] for axis in (0, 1))
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))

    def place(value: tuple[float, float]) -> tuple[float, float]:
        share_x = math.log(value[0] / low_x) / math.log(high_x / low_x)
        share_y = math.log(value[1] / low_y) / math.log(high_y / low_y)
        return left + (right - left) * share_x, bottom - (bottom - top) * share_y

    parts = _head(width, height, title, f"upwards: {axes[1]}")
    parts.append(_text(right, height - 12, axes[0], anchor="end"))
    for power in range(round(math.log10(low_y)), round(math.log10(high_y)) + 1):
        y = place((low_x, 10.0**power))[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(left - 6, y + 4, f"{10.0**power:,.0f}", anchor="end"))
    parts.extend(_text(place((x, low_y))[0], bottom + 18, f"{x:g}", anchor="middle") for x in sorted({*xs}))
    for line in series:
        places = [place(point) for point in line.points]
        path_points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{line.color}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>' for x, y in places)
        parts.append(_text(places[-1][0] + 8, places[-1][1] + 4, line.label))
    path.write_text("\n".join([*parts, "</svg>\n"]))


@dataclass(frozen=True)
class Group:
    """Shares, 0 to 1, by name."""

    label: str
    shares: Mapping[str, float]


def write_shares(path: Path, title: str, note: str, groups: Sequence[Group]) -> None:
    """Write groups of bars of shares to a file."""
    height = TOP + sum(ROW * (len(group.shares) + 2) for group in groups)
    parts = _head(WIDTH, height, title, note)
    y = TOP
    for group in groups:
        parts.append(_text(LABEL, y + 13, group.label, weight="bold"))
        for row, (label, share) in enumerate(group.shares.items(), 1):
            top, width = y + ROW * row, PLOT * max(0.0, share)
            bar = f'x="{LABEL}" y="{top + 3}" height="{ROW - 6}"'
            parts.append(_text(LABEL - 8, top + 13, label, anchor="end"))
            parts.append(f'<rect {bar} width="{PLOT}" fill="{GRID}"/>')
            parts.append(f'<rect {bar} width="{width:.1f}" fill="{BETTER}"/>')
            parts.append(_text(LABEL + PLOT + 10, top + 13, f"{share:.0%}"))
        y += ROW * (len(group.shares) + 2)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _head(width: int, height: int, title: str, note: str) -> list[str]:
    """Return the beginning of a plot: its size, title, and a line below that."""
    box = f'viewBox="0 0 {width} {height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 20, title, size=15, weight="bold"),
        _text(12, 38, note),
    ]


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    step = (1, 2, 5) if high / low < 200 else (1,)
    return [tick for power in powers for tick in (factor * 10.0**power for factor in step) if low <= tick <= high]


def _line(x: float, top: float, bottom: float, color: str, width: float = 1) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{TEXT}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
