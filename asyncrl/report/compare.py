"""Several runs on one page: their curves together, and the differences of settings and results.

Guarantees: as `asyncrl.report.page`; a run keeps its colour through the page; a setting is listed if two of the runs
differ in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from asyncrl.config.suggestions import value_at
from asyncrl.evaluation.ids import name_version
from asyncrl.metrics import line_number
from asyncrl.report.data import ENDS, RunData, newest
from asyncrl.report.html import card, seconds, table
from asyncrl.report.learning import figure_value, list_sources
from asyncrl.report.page import frame, grade, heading
from asyncrl.report.settings import list_repeated, plain_keys
from asyncrl.report.svg import Line, legend, line_chart, short

COLOURS = ("s1", "s2", "s3", "s5", "s4", "s6", "s8", "s7")
CURVES = (
    ("lag_mean", "mean lag, steps"), ("loss", "policy loss"), ("entropy", "entropy, nats"),
    ("grad_norm", "gradient norm"),
    ("response_length_mean", "response length, tokens"), ("tokens_per_s", "tokens/s trained"),
    ("ess", "effective sample size"), ("kl_behaviour", "KL to the behaviour policy"), ("step_s", "seconds per step"),
    ("zero_advantage_share", "groups without a signal, share"),
)  # fmt: skip


def comparison(runs: Sequence[RunData]) -> str:
    names = distinct([data.name for data in runs])
    parts = [
        _verdicts(runs, names),
        heading("results", "Results", "Where the runs ended."), f'<div class="cards">{_results(runs, names)}</div>',
        heading("curves", "Curves", "The same numbers of all runs over each other."),
        f'<div class="cards">{_rewards(runs, names)}{_small(runs, names)}</div>',
        heading("settings", "Settings", "What the runs were asked for, where they differ."),
        f'<div class="cards">{_settings(runs, names)}</div>',
    ]  # fmt: skip
    links = [("results", "Results", False), ("curves", "Curves", False), ("settings", "Settings", False)]
    return frame(
        f"Comparison of {len(runs)} runs", ", ".join(str(data.run.root) for data in runs), links, "".join(parts)
    )


def distinct(names: Sequence[str]) -> list[str]:
    """Distinct names.

    >>> distinct(["a", "b", "a"])
    ['a (1)', 'b', 'a (2)']
    """
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(f"{name} ({seen[name]})" if names.count(name) > 1 else name)
    return found


def _verdicts(runs: Sequence[RunData], names: Sequence[str]) -> str:
    lines = []
    for place, (data, name) in enumerate(zip(runs, names, strict=True)):
        kind, word, proof = grade(data)
        key = f'<i class="key {COLOURS[place % len(COLOURS)]}"></i>'
        lines.append(f'<p class="verdict {kind}">{key}{escape(name)}: <b>{escape(word)}</b>{escape(proof)}</p>')
    return "".join(lines)


def _held_out(data: RunData) -> str:
    lines = newest(data.evaluations)
    sources = list_sources(lines)
    found = figure_value(lines[-1], sources[0], "reward/mean", "") if lines and sources else None
    return "-" if found is None else f"{found[0]:.3f} ({name_version(lines[-1])})"


def _mean(data: RunData, name: str) -> str:
    values = [value for _, value in data.values(name)]
    return short(sum(values) / len(values)) if values else "-"


def _format_waiting(data: RunData) -> str:
    whole = sum(value for _, value in data.values("step_s"))
    return f"{sum(value for _, value in data.values('wait_s')) / whole:.1%}" if whole else "-"


#: Compared results: a title and the text of a number.
ENDS_OF: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    (f"reward, first {ENDS} steps", lambda data: f"{data.reward_ends()[0]:.3f}"),
    (f"reward, last {ENDS} steps", lambda data: f"{data.reward_ends()[1]:.3f}"),
    ("held out, mean at the end", _held_out),
    ("steps", lambda data: str(data.last_step)),
    ("wall time", lambda data: seconds(data.wall_s)),
    ("tokens/s trained, mean", lambda data: _mean(data, "tokens_per_s")),
    ("learner waited, share", _format_waiting),
    ("lag, mean", lambda data: f"{data.audit.lag_mean:.2f}"),
    ("lag, largest (bound)", lambda data: f"{data.audit.lag_max} ({data.audit.bound_max})"),
    ("groups trained", lambda data: str(data.audit.trained)),
    ("groups dropped", lambda data: str(sum(data.audit.dropped.values()))),
    ("groups dead", lambda data: str(sum(data.audit.dead.values()))),
    ("weights delivered, wrong", lambda data: "{}, {}".format(*data.deliveries()[:2])),
    ("faults", lambda data: str(len(data.recoveries))),
    ("lost, doubled", lambda data: f"{data.audit.lost}, {data.audit.doubled}"),
)


def _results(runs: Sequence[RunData], names: Sequence[str]) -> str:
    rows = [(escape(title), *(escape(value(data)) for data in runs)) for title, value in ENDS_OF]
    return card("End results", table(("", *names), rows, classes=("", *["number"] * len(runs))), wide=True)


def _lines(runs: Sequence[RunData], names: Sequence[str], points: Callable[[RunData], Any]) -> list[Line]:
    return [
        Line(name, points(data), COLOURS[place % len(COLOURS)])
        for place, (data, name) in enumerate(zip(runs, names, strict=True))
    ]


def _rewards(runs: Sequence[RunData], names: Sequence[str]) -> str:
    steps = _lines(runs, names, lambda data: data.values("reward_mean"))
    times = _lines(runs, names, _reward_over_time)
    later = line_chart(times, x_label="seconds since the start", smooth=True)
    first = card("Reward by step", legend(steps) + line_chart(steps, smooth=True))
    return first + card("Reward by time", legend(times) + later)


def _reward_over_time(data: RunData) -> list[tuple[float, float]]:
    start, _ = data.span_of_time()
    return [
        (float(line["t"]) - start, reward)
        for line in data.steps
        if "t" in line and (reward := line_number(line, "reward_mean")) is not None
    ]


def _small(runs: Sequence[RunData], names: Sequence[str]) -> str:
    figures = []
    for key, title in CURVES:
        lines = _lines(runs, names, partial(RunData.values, key=key))
        if any(line.points for line in lines):
            chart = line_chart(lines, width=320, height=150, x_label="", smooth=True)
            figures.append(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>")
    keys = legend(_lines(runs, names, lambda data: [(0, 0)]))
    return card("By step", keys + f'<div class="small">{"".join(figures)}</div>', wide=True) if figures else ""


def _settings(runs: Sequence[RunData], names: Sequence[str]) -> str:
    known = [data for data in runs if data.config is not None]
    if len(known) < len(runs):
        return card("Differences", '<p class="none">a config.toml cannot be read</p>', wide=True)
    rows = []
    for key in plain_keys():
        values = [repr(value_at(data.config, key)) for data in runs]
        if len(set(values)) > 1:
            rows.append((escape(key), *(escape(value) for value in values)))
    several = [list_repeated(data.config) for data in known if data.config]
    for key in sorted({key for one in several for key in one}):
        texts = [one.get(key, "-") for one in several]
        if len(set(texts)) > 1:
            rows.append((escape(key), *(escape(text) for text in texts)))
    same = '<p class="none">the configurations are the same</p>'
    body = table(("setting", *names), rows, classes=("short",)) if rows else same
    return card("Differences", body, wide=True)
