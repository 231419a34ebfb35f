"""Charts as SVG text: lines with a band, stacked areas, bars.

Guarantees:
1. pure functions of their arguments; every text is escaped; colours are CSS classes (`s1`..`s8`), so that the page's
   theme defines them;
2. charts carry their values in `data-chart` for the script's tooltips and smoothing; without the script they are
   complete, smoothed by `SMOOTHING`;
3. at most `MAX_POINTS` points are drawn per line: longer ones keep the first, the last and evenly spaced others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
MAX_POINTS = 400
SMOOTHING = 0.6  # weight of earlier values in smoothed lines
SMOOTHED_FROM = 20  # points; shorter lines are not smoothed
LEFT, RIGHT, TOP = 46, 10, 10
BOTTOM, BOTTOM_NAMED = 24, 40  # space below the axis: ticks; ticks and the name of the axis


class Line(NamedTuple):
    """One line: its name, its points, its colour class, and an optional band around it (low and high by point)."""

    name: str
    points: Points
    colour: str = "s1"
    band: Sequence[tuple[float, float]] = ()
    dashed: bool = False


class Frame(NamedTuple):
    """Place of the data in the picture."""

    width: int
    height: int
    x0: float
    x1: float
    y0: float
    y1: float
    bottom: int = BOTTOM

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        share = (value - self.x0) / ((self.x1 - self.x0) or 1.0)
        return round(LEFT + share * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        share = (value - self.y0) / ((self.y1 - self.y0) or 1.0)
        return round(self.height - self.bottom - share * (self.height - TOP - self.bottom), 1)


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points, including the first and the last.

    >>> thin([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)], 3)
    [(0, 0), (2, 2), (4, 4)]
    """
    if len(points) <= limit:
        return list(points)
    return [points[round(number * (len(points) - 1) / (limit - 1))] for number in range(limit)]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values that divide the range.

    >>> ticks(0, 10)
    [0.0, 5.0, 10.0]
    """
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few characters: `1.2k`, `0.031`, `12`."""
    size = abs(value)
    for limit, divisor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{suffix}"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


def line_chart(
    lines: Sequence[Line],
    *,
    width: int = 540,
    height: int = 200,
    x_label: str = "step",
    floor: float | None = None,
    bars: bool = False,
    smooth: bool = False,
    title: str = "",
) -> str:
    """Lines over a common x axis. `floor` is a value that the y axis must include. `smooth`: also draw smoothed
    lines.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return '<p class="none">nothing was measured</p>'
    every_y = [y for line in drawn for _, y in line.points] + [y for line in drawn for pair in line.band for y in pair]
    frame = _frame([x for line in drawn for x, _ in line.points], every_y, floor, width, height, named=bool(x_label))
    parts = [_axes(frame, x_label)]
    for place, line in enumerate(drawn):
        over = smooth and not line.dashed and not bars and len(line.points) >= SMOOTHED_FROM
        parts.append(_line(frame, line, bars=bars, number=place if over else None))
    return _svg(frame, parts, _tooltip(frame, drawn, x_label), title or ", ".join(line.name for line in drawn))


def stacked_chart(
    lines: Sequence[Line], *, limit: Line | None = None, width: int = 540, height: int = 200, x_label: str = "minutes"
) -> str:
    """Areas on top of each other; all lines have the same x values. `limit` is drawn as a line above them."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return '<p class="none">nothing was measured</p>'
    xs = [x for x, _ in drawn[0].points]
    totals = [sum(line.points[place][1] for line in drawn) for place in range(len(xs))]
    tops = totals + ([y for _, y in limit.points] if limit else [])
    frame = _frame(xs, tops, 0.0, width, height, named=bool(x_label))
    parts = [_axes(frame, x_label)]
    base = [0.0] * len(xs)
    for line in drawn:
        top = [below + y for below, (_, y) in zip(base, line.points, strict=True)]
        there = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in zip(xs, top, strict=True))
        back = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in reversed(list(zip(xs, base, strict=True))))
        parts.append(f'<polygon class="area {line.colour}" points="{there} {back}"/>')
        base = top
    if limit is not None:
        parts.append(_line(frame, limit, bars=False))
    title = ", ".join(line.name for line in drawn)
    return _svg(frame, parts, _tooltip(frame, [*drawn, *([limit] if limit else [])], x_label), title)


def bar_chart(
    bars: Sequence[tuple[str, float]],
    *,
    colour: str = "s1",
    width: int = 540,
    height: int = 200,
    mark: int | None = None,
    mark_text: str = "",
    x_label: str = "",
) -> str:
    """One bar per label with its value on top; `mark` draws a line right of that bar."""
    if not bars:
        return '<p class="none">nothing was measured</p>'
    frame = Frame(
        width,
        height,
        0.0,
        float(len(bars)),
        0.0,
        max(value for _, value in bars) * 1.15 or 1.0,
        BOTTOM_NAMED if x_label else BOTTOM,
    )
    floor = height - frame.bottom
    parts = [_grid(frame), _name(frame, x_label)]
    room = (width - LEFT - RIGHT) / len(bars)
    thick = min(48.0, room * 0.7)
    for place, (label, value) in enumerate(bars):
        middle = LEFT + room * (place + 0.5)
        top = frame.y(value)
        tall = max(0.0, floor - top)
        parts.append(
            f'<rect class="bar {colour}" x="{middle - thick / 2:.1f}" y="{top}" width="{thick:.1f}" '
            f'height="{tall:.1f}" rx="2"><title>{escape(label)}: {short(value)}</title></rect>'
        )
        if value:
            parts.append(f'<text class="value" x="{middle:.1f}" y="{top - 4}">{short(value)}</text>')
        parts.append(f'<text class="tick mid" x="{middle:.1f}" y="{floor + 16}">{escape(label)}</text>')
    if mark is not None:
        x = LEFT + room * (mark + 1)
        x = min(x, width - RIGHT)
        parts.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor}"/>'
            f'<text class="limit-text" x="{x - 4:.1f}" y="{TOP + 10}">{escape(mark_text)}</text>'
        )
    return _svg(frame, parts, None, ", ".join(f"{label}: {short(value)}" for label, value in bars[:24]))


# ---------------------------------------------------------------- parts


def _frame(
    xs: Sequence[float], ys: Sequence[float], floor: float | None, width: int, height: int, *, named: bool
) -> Frame:
    below = BOTTOM_NAMED if named else BOTTOM
    finite = [y for y in ys if math.isfinite(y)] or [0.0]
    low, high = min(finite), max(finite)
    if floor is not None:
        low, high = min(low, floor), max(high, floor)
    if low == high == 0.0:
        return Frame(width, height, min(xs), max(xs), 0.0, 1.0, below)
    pad = (high - low) * 0.06 or abs(high) * 0.1
    bottom = low if floor is not None and low == floor else low - pad
    return Frame(width, height, min(xs), max(xs), bottom, high + pad, below)


def _grid(frame: Frame) -> str:
    parts = []
    for value in ticks(frame.y0, frame.y1, 4):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5}">{short(value)}</text>'
        )
    return "".join(parts)


def _axes(frame: Frame, x_label: str) -> str:
    parts = [_grid(frame)]
    floor = frame.height - frame.bottom
    for value in ticks(frame.x0, frame.x1, 6):
        parts.append(f'<text class="tick mid" x="{frame.x(value)}" y="{floor + 16}">{short(value)}</text>')
    return "".join([*parts, _name(frame, x_label)])


def _name(frame: Frame, x_label: str) -> str:
    """The name of the horizontal axis, in the middle below its ticks."""
    middle = (LEFT + frame.width - RIGHT) / 2
    return f'<text class="tick mid" x="{middle:g}" y="{frame.height - 4}">{escape(x_label)}</text>' if x_label else ""


def smooth(points: Points, weight: float = SMOOTHING) -> list[tuple[float, float]]:
    """An exponential mean of earlier values, without the bias of its start.

    >>> smoothed([(1, 1.0), (2, 1.0), (3, 1.0)])[-1]
    (3, 1.0)
    """
    last = total = 0.0
    found = []
    for x, y in points:
        last, total = last * weight + (1 - weight) * y, total * weight + (1 - weight)
        found.append((x, last / total))
    return found


def _line(frame: Frame, line: Line, *, bars: bool, number: int | None = None) -> str:
    """`number`: position of the line in the chart, if a smoothed one is drawn over it."""
    points = thin(line.points)
    parts = []
    if line.band:
        pairs = thin([(x, place) for place, (x, _) in enumerate(line.points)])
        high = " ".join(f"{frame.x(x)},{frame.y(line.band[int(place)][1])}" for x, place in pairs)
        low = " ".join(f"{frame.x(x)},{frame.y(line.band[int(place)][0])}" for x, place in reversed(pairs))
        parts.append(f'<polygon class="band {line.colour}" points="{high} {low}"/>')
    dashed = " dashed" if line.dashed else ""
    if bars or len(points) == 1:
        parts += [f'<circle class="dot {line.colour}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="2.5"/>' for x, y in points]
    if not bars:
        raw = "" if number is None else " raw"
        parts.append(f'<polyline class="line {line.colour}{dashed}{raw}" points="{_path(frame, points)}"/>')
        if number is not None:
            over = _path(frame, smooth(points))
            parts.append(f'<polyline class="line {line.colour}" data-line="{number}" points="{over}"/>')
    return "".join(parts)


def _path(frame: Frame, points: Points) -> str:
    return " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)


def _tooltip(frame: Frame, lines: Sequence[Line], x_label: str = "") -> str:
    """Data for the script's tooltips and smoothing."""
    data = {
        "left": LEFT, "right": frame.width - RIGHT, "top": TOP, "bottom": frame.height - frame.bottom,
        "x0": frame.x0, "x1": frame.x1, "y0": _json(frame.y0), "y1": _json(frame.y1), "label": x_label,
        "lines": [{"name": line.name, "colour": line.colour,
                   "points": [[_json(x), _json(y)] for x, y in thin(line.points)]} for line in lines],
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":"))


def _json(value: float) -> float:
    return float(f"{value:.6g}")


def _svg(frame: Frame, parts: Sequence[str], data: str | None, title: str) -> str:
    chart = f" data-chart='{escape(data, quote=True)}'" if data else ""
    floor = frame.height - frame.bottom
    label = f' aria-label="{escape(title, quote=True)}"'
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img"{label}{chart}>{"".join(parts)}'
        f'<line class="rule" y1="{TOP}" y2="{floor}" visibility="hidden"/></svg>'
    )


def legend(lines: Sequence[Line]) -> str:
    """Names next to their colours."""
    return (
        '<p class="legend">'
        + "".join(f'<span><i class="key {line.colour}"></i>{escape(line.name)}</span>' for line in lines if line.points)
        + "</p>"
    )
