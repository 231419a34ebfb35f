"""Charts of time and quantities as SVG text: lanes of time, and a flow.

Guarantees: as `asyncrl.report.svg`; at most `BINS` columns per lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from asyncrl.report.svg import RIGHT, short, ticks

BINS = 200
LEFT, TALL, GAP = 130, 18, 7


class Lane(NamedTuple):
    """One row: `columns` (from, to, parts), a part is (share of the height, colour); `marks` (when, colour, words)."""

    name: str
    columns: Sequence[tuple[float, float, Sequence[tuple[float, str]]]]
    marks: Sequence[tuple[float, str, str]] = ()
    titles: Sequence[str] = ()  # tooltip of each column


def lanes(rows: Sequence[Lane], *, start: float, end: float, width: int = 1000) -> str:
    """A row of time per lane; a column's parts stand on top of each other. Times in seconds."""
    if not rows:
        return '<p class="none">nothing was measured</p>'
    height = len(rows) * (TALL + GAP) + 24
    span = (end - start) or 1.0
    room = width - LEFT - RIGHT

    def position(t: float) -> float:
        return LEFT + min(1.0, max(0.0, (t - start) / span)) * room

    parts = []
    for number, lane in enumerate(rows):
        y = number * (TALL + GAP)
        parts.append(
            f'<text class="tick end" x="{LEFT - 8}" y="{y + 13}">{escape(lane.name)}</text>'
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{room}" height="{TALL}"/>'
        )
        for place, (begin, until, shares) in enumerate(lane.columns):
            x, wide = position(begin), max(0.6, position(until) - position(begin))
            title = f"<title>{escape(lane.titles[place])}</title>" if place < len(lane.titles) else ""
            parts.append(f"<g>{title}{_column(shares, x=x, y=y, wide=wide)}</g>")
        for t, colour, words in lane.marks:
            parts.append(
                f'<line class="mark {colour}" x1="{position(t):.1f}" x2="{position(t):.1f}" y1="{y - 3}" '
                f'y2="{y + TALL + 3}"><title>{escape(words)}</title></line>'
            )
    for value in ticks(0, span, 8):
        parts.append(
            f'<text class="tick mid" x="{position(start + value):.1f}" y="{height - 4}">{short(value)} s</text>'
        )
    label = escape(", ".join(lane.name for lane in rows), quote=True)
    return f'<svg class="wide" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _column(shares: Sequence[tuple[float, str]], *, x: float, y: float, wide: float) -> str:
    parts, floor = [], y + TALL
    for share, colour in shares:
        tall = min(1.0, max(0.0, share)) * TALL
        if tall >= 0.2:
            floor -= tall
            parts.append(
                f'<rect class="bar {colour}" x="{x:.1f}" y="{floor:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
            )
    return "".join(parts)


class Share(NamedTuple):
    """A part of a flow."""

    name: str
    size: int
    colour: str


def flow(name: str, shares: Sequence[Share], *, width: int = 1000) -> str:
    """The whole at the left, its parts at the right, with ribbons as thick as the parts."""
    parts_of = [share for share in shares if share.size > 0]
    total = sum(share.size for share in parts_of)
    if not total:
        return '<p class="none">nothing was issued</p>'
    room, gap, least, bar = 120.0, 12.0, 3.0, 14
    tall = [max(least, room * share.size / total) for share in parts_of]
    height = sum(tall) + gap * (len(tall) - 1) + 12
    left, right = 150, width - 330
    middle = (left + bar + right) / 2
    top = (height - sum(tall)) / 2
    half = height / 2 + 4
    parts = [
        f'<rect class="bar s7" x="{left}" y="{top:.1f}" width="{bar}" height="{sum(tall):.1f}" rx="2"/>'
        f'<text class="name end" x="{left - 8}" y="{half:.1f}">{escape(name)} {total}</text>'
    ]
    here, there = top, 6.0
    for share, thick in zip(parts_of, tall, strict=True):
        words = f"{share.name} {share.size} ({share.size / total:.1%})"
        a, b, c, d = here, here + thick, there, there + thick
        x0, x1 = left + bar, right
        path = (
            f"M{x0} {a:.1f}C{middle} {a:.1f} {middle} {c:.1f} {x1} {c:.1f}V{d:.1f}"
            f"C{middle} {d:.1f} {middle} {b:.1f} {x0} {b:.1f}Z"
        )
        said = f'<text class="name" x="{right + bar + 8}" y="{c + thick / 2 + 4:.1f}">{escape(words)}</text>'
        parts.append(
            f'<g class="{share.colour}"><title>{escape(words)}</title><path class="ribbon" d="{path}"/>'
            f'<rect class="bar" x="{right}" y="{c:.1f}" width="{bar}" height="{thick:.1f}" rx="2"/>'
            f"{said}</g>"
        )
        here, there = here + thick, there + thick + gap
    label = escape(", ".join(f"{share.name} {share.size}" for share in parts_of), quote=True)
    return (
        f'<svg class="wide" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )
