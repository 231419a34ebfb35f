"""The section on evaluations: curves over steps and a table of all evaluations.

It reads only `metrics/evaluation.jsonl`. Guarantees:
1. of a step that was evaluated again, the last evaluation is shown;
2. without evaluations there is no section; unknown figures are `-`;
3. text of the run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from asyncrl.evaluation.statistics import ALL
from asyncrl.report.data import RunData
from asyncrl.report.html import card, table
from asyncrl.report.svg import Line, legend, line_chart, short

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")
FIGURES = (("reward/mean", ""), ("reward/best", "/mean"), ("reward/maj", "/mean"), ("acc/pass", "/mean"))


def section(data: RunData) -> str:
    """Both cards; empty if the run has no evaluations."""
    lines = newest(data.evaluations)
    if not lines:
        return ""
    return card(
        "Evaluation",
        _curves(lines),
        wide=True,
        note=(
            "held-out prompts, never trained: mean reward by the step that was evaluated; the band is two standard "
            "errors over the prompts to either side"
        ),
    ) + card(
        "Evaluations",
        _table(lines),
        wide=True,
        note=(
            "versions: oldest and newest weights that made a sample; weights go on changing while an evaluation runs. "
            "Figures are of the scored prompts alone"
        ),
    )


def newest(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of every step, in order."""
    return [line for _, line in sorted({int(line["step"]): line for line in lines if "step" in line}.items())]


def list_sources(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The data sources, `all` first if there are several."""
    found = {str(source) for line in lines for source in dict(line.get("sources") or {})}
    return [ALL, *sorted(found)] if len(found) > 1 else sorted(found)


def figure_value(line: Mapping[str, Any], source: str, figure: str, tail: str) -> tuple[float, float] | None:
    """Value and standard error of a figure at the line's k, or None."""
    k = int(line.get("evaluation_samples", 1))
    value = line.get(f"val-core/{source}/{figure}@{k}{tail}")
    error = line.get(f"val-aux/{source}/{figure}@{k}/se", 0.0)
    return (float(value), float(error)) if isinstance(value, int | float) else None


def _curves(lines: Sequence[Mapping[str, Any]]) -> str:
    drawn = []
    for place, source in enumerate(list_sources(lines)):
        points, band = [], []
        for line in lines:
            found = figure_value(line, source, "reward/mean", "")
            if found is not None:
                points.append((float(line["step"]), found[0]))
                band.append((found[0] - 2 * found[1], found[0] + 2 * found[1]))
        drawn.append(Line(source, points, COLOURS[place % len(COLOURS)], band))
    return (legend(drawn) if len(drawn) > 1 else "") + line_chart(drawn, width=1000, height=220)


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    head = ("step", "source", "mean@k", "best@k", "maj@k", "pass@k", "prompts", "versions", "seconds", "not scored")
    rows = []
    for line in lines:
        for place, source in enumerate(list_sources([line]) or ["-"]):
            cells = [_figure(figure_value(line, source, name, tail)) for name, tail in FIGURES]
            rows.append(
                (escape(str(line["step"])), escape(source), *cells, *(_account(line) if not place else [""] * 4))
            )
    return table(head, rows, classes=("short number", "short", *["short number"] * 7))


def _figure(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


def _account(line: Mapping[str, Any]) -> list[str]:
    reasons = {**dict(line.get("failed") or {}), **dict(line.get("missing") or {})}
    told = [f"{reason} {count}" for reason, count in sorted(reasons.items())]
    told += [f"ended early: {line['why']}"] if line.get("why") else []
    versions = "-"
    if "evaluation_version_min" in line:
        versions = f"{line['evaluation_version_min']} to {line['evaluation_version_max']}"
    scored, prompts, k = (int(line.get(f"evaluation_{name}", 0)) for name in ("scored", "prompts", "samples"))
    return [
        f"{scored} of {prompts} x {k}",
        versions,
        short(float(line.get("evaluation_s", 0.0))),
        escape(", ".join(told)),
    ]
