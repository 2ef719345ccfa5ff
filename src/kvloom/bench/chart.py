"""A bar chart as SVG, without other packages. It follows the reader's light or dark theme. Used for the figures of README
and docs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "bar_chart"]

WIDTH, LEFT, WORDS, ROW, GAP, TOP = 860, 16, 340, 22, 10, 60
"""Sizes in pixels: width of the chart, left edge of the bars, width of the words after a bar, height of a row, gap
between groups, top of the first group."""
COLOURS = ("#0072b2", "#dd9200", "#00916a", "#b9608f", "#cf5a00", "#4aa3d8")
STYLE = """
  text { font: 13px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1b2230; }
  .title { font-size: 17px; font-weight: 650; } .quiet { fill: #5d6472; } .line { stroke: #1b2230; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) { text { fill: #e9e7e1; } .quiet { fill: #9aa3b2; } .line { stroke: #e9e7e1; } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the heading above it, the name of its series, its value, and the words after it. All bars of a series
    have the same colour."""

    heading: str
    series: str
    value: float
    words: str = ""


def bar_chart(title: str, subtitle: str, bars: Sequence[Bar], mark: float | None = None) -> str:
    """Return horizontal bars as SVG. Consecutive bars with the same heading form a group. A dashed line shows the
    value `mark`. Raises ValueError without bars, or for a value that is not positive.
    """
    if not bars:
        raise ValueError("a chart needs at least one bar")
    if wrong := next((bar for bar in bars if not bar.value > 0), None):
        raise ValueError(f"the value {wrong.value} of {wrong.series!r} is not positive")
    room = WIDTH - LEFT - WORDS
    scale = room / max(*(bar.value for bar in bars), mark or 0.0, 1e-12)
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(b.series for b in bars))
    }
    parts, y, heading = [], float(TOP), None
    for bar in bars:
        if bar.heading != heading:
            y += GAP if heading is not None else 0
            parts.append(f'<text x="{LEFT}" y="{y + 15:.0f}">{escape(bar.heading)}</text>')
            heading = bar.heading
            y += ROW
        width = max(2.0, bar.value * scale)
        marked = 0.0 if mark is None else mark * scale
        parts.append(
            f'<rect x="{LEFT}" y="{y + 3:.0f}" width="{width:.1f}" height="{ROW - 6}" rx="3" fill="{colours[bar.series]}"/>'
            f'<text x="{LEFT + max(width, marked) + 8:.1f}" y="{y + 15:.0f}">{escape(bar.series)}'
            f'<tspan class="quiet" dx="6">{escape(bar.words)}</tspan></text>'
        )
        if mark is not None:
            x = LEFT + marked
            parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.0f}" y2="{y + ROW:.0f}"/>')
        y += ROW
    told = "; ".join(f"{bar.heading}: {bar.series} {bar.words}" for bar in bars)
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'role="img" aria-labelledby="title told">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="told">{escape(told)}</desc>\n<style>{STYLE}</style>\n'
        f'<text class="title" x="16" y="24">{escape(title)}</text>\n<text class="quiet" x="16" y="44">{escape(subtitle)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
