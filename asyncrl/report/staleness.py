"""The chapter on staleness: the lag of trained groups per step, against the bound. Lags come from the log."""

from __future__ import annotations

from asyncrl.report.data import RunData
from asyncrl.report.html import card
from asyncrl.report.svg import Line, bar_chart, legend, line_chart


def staleness(data: RunData) -> str:
    """Quantiles of the lag by step under its bound, and how many groups had which lag."""
    return _lag_per_step(data) + _lag_histogram(data)


def _lag_per_step(data: RunData) -> str:
    steps = [(float(one.step), one) for one in data.lags]
    if steps:
        ends = [(float(one.low), float(one.high)) for _, one in steps]
        lines = [
            Line("median lag", [(step, one.median) for step, one in steps], "s1", ends),
            Line("90 %", [(step, one.upper) for step, one in steps], "s2"),
            Line("bound", [(step, float(one.bound)) for step, one in steps], "s6", dashed=True),
        ]
        note = "the band reaches from the youngest to the oldest group of the step"
    else:  # an older log without samples: the learner's own numbers
        lines = [
            Line("largest lag", data.values("lag_max"), "s2"),
            Line("mean lag", data.values("lag_mean"), "s1"),
            Line("bound", data.values("bound_max"), "s6", dashed=True),
        ]
        note = "as the learner counted it"
    note = "lag: steps between the oldest weights that made a group and those its step starts from; " + note
    return card("Staleness by step", legend(lines) + line_chart(lines, floor=0.0), note=note)


def _lag_histogram(data: RunData) -> str:
    counts = data.audit.lag_counts
    top = max([*counts, data.audit.bound_max], default=0)
    bars = [(str(lag), float(counts.get(lag, 0))) for lag in range(top + 1)] if counts else []
    mark = data.audit.bound_max if bars else None
    chart = bar_chart(bars, mark=mark, mark_text=f"bound {data.audit.bound_max}", x_label="lag, steps")
    return card("Staleness of groups", chart, note="number of trained groups by lag, counted in the log")
