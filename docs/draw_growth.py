"""Draws how costs grow, for `docs/performance.md`: `docs/images/growth-*.svg`, by `docs/generate.py`.

The pictures depend on `benchmarks/results/` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PANEL, HEIGHT, TOP, BAR, GAP = 190, 190, 46, 38, 14
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #37474f; text-anchor: middle }
  .name { font-weight: 600; fill: #10302c } .bar { fill: #00796b } .other { fill: #90a4ae } .axis { stroke: #90a4ae }
  @media (prefers-color-scheme: dark) {
    text { fill: #b0c4c0 } .name { fill: #e4f5f2 } .bar { fill: #4db6ac } .other { fill: #78909c }
    .axis { stroke: #546e7a }
  }
"""


class Panel(NamedTuple):
    """Bars from zero with their values: at each label, one of each kind."""

    title: str
    unit: str
    labels: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]  # class, values by label


def draw(title: str, axis: str, panels: Sequence[Panel]) -> str:
    """Panels next to each other; `axis` names their labels."""
    floor = HEIGHT - 44
    parts, left = [], 10.0
    for panel in panels:
        step = len(panel.bars) * BAR + GAP
        width = max(PANEL, step * len(panel.labels) + GAP)
        most = max(value for _, values in panel.bars for value in values)
        parts.append(_text(left + width / 2, 16, panel.title, "name") + _text(left + width / 2, 32, panel.unit))
        parts.append(f'<path class="axis" d="M{left:g} {floor} H{left + width:g}"/>')
        begin = left + (width - step * len(panel.labels) + GAP) / 2
        for place, label in enumerate(panel.labels):
            for number, (kind, values) in enumerate(panel.bars):
                x, tall = begin + place * step + number * BAR, values[place] / most * (floor - TOP - 14)
                parts.append(
                    f'<rect class="{kind}" x="{x + 2:g}" y="{floor - tall:.1f}" width="{BAR - 4}" height="{tall:.1f}"/>'
                )
                parts.append(_text(x + BAR / 2, floor - tall - 4, f"{values[place]:.3g}"))
            parts.append(_text(begin + place * step + (step - GAP) / 2, floor + 16, label))
        left += width + 20
    parts.append(_text(left / 2 - 5, HEIGHT - 8, axis))
    size = f'viewBox="0 0 {left - 10:g} {HEIGHT}" width="{left - 10:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{start}\n<title>{escape(title)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def prompts() -> str:
    """The buffer after 1e4, 1e5 and 1e6 prompts."""
    sizes = read("growth.json")["sizes"]
    labels = [f"1e{len(str(size['issued'])) - 1}" for size in sizes]

    def panel(title: str, unit: str, key: str, by: float = 1.0) -> Panel:
        return Panel(title, unit, labels, [("bar", [size[key] * by for size in sizes])])

    panels = (
        panel("check of each second", "ms", "check_ms"),
        panel("ledger of a checkpoint", "kB", "ledger_bytes", 1e-3),
        panel("memory", "MB", "resident_mb"),
        panel("restart", "s", "restart_s"),
    )
    return draw("Costs of the buffer by the number of prompts", "prompts issued, half of them dropped", panels)


def fleet() -> str:
    """One buffer with 10 and with 1,000 producers."""
    runs: Mapping[str, Mapping[str, float]] = read("fleet.json")["runs"]
    labels = [f"{int(name.partition(':')[0]):,}" for name in runs]

    def panel(title: str, unit: str, key: str, by: float = 1.0) -> Panel:
        return Panel(title, unit, labels, [("bar", [run[key] * by for run in runs.values()])])

    panels = (
        panel("throughput", "groups/s", "groups_s"),
        panel("CPU of a group", "ms", "cpu_ms_per_group"),
        panel("heartbeats", "% of a core", "heartbeat_share", 100),
        panel("all have joined", "s", "join_s"),
    )
    axis = f"producers ({' and '.join(name.partition(':')[2] for name in runs)} reward workers)"
    return draw("One buffer by the number of producers", axis, panels)


def generators() -> str:
    """A round of weights to 1, 2 and 4 generators."""
    found = read("weightsync.json")["figures_by_generators"]

    def panel(name: str, way: str) -> Panel:
        ours = [figures[way]["transfer_s"] for figures in found.values()]
        flat = [figures[way]["flat_s"] for figures in found.values()]
        return Panel(name, "s", list(found), [("bar", ours), ("other", flat)])

    panels = (panel("shared memory", "local"), panel("process group", "collective"), panel("TCP", "stream"))
    axis = "generators on one host; left bar: this way, right bar: one flat Gloo broadcast"
    return draw("Seconds of a transfer by the number of generators", axis, panels)


PICTURES = {"prompts": prompts, "fleet": fleet, "generators": generators}
