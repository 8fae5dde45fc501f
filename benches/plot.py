"""A plot of ratios as SVG: how many times better ours is, one bar for each measurement, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROW, LABEL, PLOT, VALUE, TOP = 20, 330, 420, 130, 64
WIDTH = LABEL + PLOT + VALUE
# Bars end here: one that takes no time at all would leave the others no room.
CLIPPED = 1000.0
BETTER, WORSE, TARGET, GRID, TEXT = "#2a7a4b", "#b4552d", "#222222", "#d5d5d5", "#222222"


@dataclass(frozen=True)
class Bar:
    """One measurement."""

    label: str
    ratio: float
    """Above 1 where ours is better."""
    shown: str
    """The ratio, in words."""
    target: float | None = None
    """What the ratio should be at least."""


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
    box = f'viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(12, 20, title, size=15, weight="bold"),
        _text(12, 38, note),
    ]
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


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    step = (1, 2, 5) if high / low < 200 else (1,)
    return [tick for power in powers for tick in (factor * 10.0**power for factor in step) if low <= tick <= high]


def _line(x: float, top: float, bottom: float, color: str, width: float = 1) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{TEXT}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
