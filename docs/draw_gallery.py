"""Draws the learning curves of `docs/gallery.md` and `docs/recipes.md`: `docs/images/gallery-*.svg`.

`docs/generate.py` writes the files; they depend on `benchmarks/results/` alone. A line is the mean over seeds; its band
reaches from the lowest to the highest seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from asyncrl.report.svg import Line, line_chart

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COLOURS = {"s1": "#0969da", "s2": "#bc4c00", "s3": "#1a7f37", "s4": "#8250df"}
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #57606a } .mid { text-anchor: middle } .end { text-anchor: end }
  .line { fill: none; stroke-width: 1.8 } .raw { opacity: 0.3 } .band { opacity: 0.15; stroke: none }
  .grid { stroke: #d0d7de; stroke-width: 0.6 } svg { background: #ffffff }
"""


def draw(lines: Sequence[Line], title: str, *, smooth: bool = False, floor: float | None = 0.0) -> str:
    """One picture that needs no page around it."""
    text = line_chart(lines, floor=floor, smooth=smooth, title=title)
    text = re.sub(r" data-chart='[^']*'", "", text)
    text = re.sub(r'<line class="rule"[^>]*/>', "", text)
    size = 'xmlns="http://www.w3.org/2000/svg" width="540" height="226"'
    text = text.replace("<svg ", f"<svg {size} ", 1).replace('viewBox="0 0 540 200"', 'viewBox="0 -26 540 226"')
    colours = "".join(
        f" .line.{name} {{ stroke: {value} }} .band.{name}, .dot.{name}, text.{name} {{ fill: {value} }}"
        for name, value in COLOURS.items()
    )
    names, place = "", 46
    for line in lines:
        names += f'<text class="{line.colour}" x="{place}" y="-8">{escape(line.name)}</text>'
        place += 7 * len(line.name) + 20
    start = text.index(">") + 1
    return f"{text[:start]}<style>{STYLE}{colours}</style>{names}{text[start:]}\n"


def over_seeds(name: str, colour: str, curves: Sequence[Mapping[float, float]]) -> Line:
    """The mean of curves over their common steps, with a band from the lowest to the highest."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    points = [(step, sum(column) / len(column)) for step, column in zip(steps, columns, strict=True)]
    band = [(min(column), max(column)) for column in columns] if len(curves) > 1 else ()
    return Line(name, points, colour, band)


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def learning(prefix: str, what: str) -> list[Mapping[float, float]]:
    """The curves of all seeds of one row of `learning.json`: `held_out`, or `rewards` of training."""
    runs = [run for key, run in read("learning.json").items() if key.rpartition("/")[0] == prefix]
    if what == "held_out":
        return [{float(step): value for step, value in run[what].items()} for run in runs]
    return [{float(step): value for step, value in enumerate(run[what], 1)} for run in runs]


def bounds() -> str:
    """Training reward of whole runs at four bounds."""
    lines = [
        over_seeds(f"bound {bound}", colour, learning(f"bounds/running_sum/{bound}", "rewards"))
        for bound, colour in zip((0, 2, 8, 16), COLOURS, strict=True)
    ]
    return draw([line._replace(band=()) for line in lines], "training reward by step", smooth=True)


def ages() -> str:
    """Held-out reward where every sample has the same age."""
    lines = [
        over_seeds(f"{age} steps old", colour, learning(f"ages/running_sum/default/{age}", "held_out"))
        for age, colour in zip((0, 2, 8), COLOURS, strict=False)
    ]
    return draw(lines, "held-out reward by step")


def tools() -> str:
    """A policy that learns to call a calculator."""
    rewards = read("tool-calculator.json")["run"]["rewards"]
    return draw([Line("training reward", list(enumerate(rewards, 1)), "s1")], "training reward by step", smooth=True)


def agent() -> str:
    """An agent that speaks to the policy through OpenAI's client."""
    rewards = read("agent_openai.json")["rewards"]
    return draw([Line("training reward", list(enumerate(rewards, 1)), "s1")], "training reward by step", smooth=True)


def reasoning() -> str:
    """The recipe of `examples/reasoning` at three bounds."""
    lines = []
    for bound, colour in zip((0, 2, 4), COLOURS, strict=False):
        runs = [run["held_out"]["all"] for run in read("reasoning.json") if run["run"].startswith(f"rl-bound{bound}-")]
        curves = [{float(version): value for version, value in run.items()} for run in runs]
        lines.append(over_seeds(f"bound {bound}", colour, curves))
    return draw(lines, "held-out reward by step", floor=None)


PICTURES = {"bounds": bounds, "ages": ages, "tools": tools, "agent": agent, "reasoning": reasoning}
