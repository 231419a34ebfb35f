"""HTML building blocks of the chapters: boxes, tables, numbers as text.

Guarantee: titles, notes and table heads are escaped here; bodies and cells are HTML, and their authors escape text of
the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def card(title: str, body: str, *, note: str = "", wide: bool = False) -> str:
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" full" if wide else ""}"><h3>{escape(title)}</h3>{below}{body}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Sequence[str] = ()) -> str:
    """A table; cells are HTML."""
    cells = list(rows)
    if not cells:
        return '<p class="none">none</p>'
    names = [*classes, *[""] * len(head)]
    body = "".join(
        "<tr>" + "".join(f'<td class="{name}">{cell}</td>' for cell, name in zip(row, names, strict=False)) + "</tr>"
        for row in cells
    )
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="scroll" tabindex="0"><table><tr>{heads}</tr>{body}</table></div>'


def duration(seconds: float) -> str:
    """`2 h 03 min`, `4 min 12 s`, `38 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.0f} s"


def clock(t: Any) -> str:
    """`14:03:59` of a wall time."""
    return time.strftime("%H:%M:%S", time.localtime(float(t))) if isinstance(t, int | float) else "-"


def seconds(value: float | None) -> str:
    """`0.53 s`, `12 s`, `-` of None."""
    return "-" if value is None else f"{value:.2f} s" if value < 10 else duration(value)


def clip(text: Any, limit: int = 600) -> str:
    """The text, truncated if it is very long."""
    whole = text if isinstance(text, str) else str(text)
    return whole if len(whole) <= limit else whole[:limit] + " …"
