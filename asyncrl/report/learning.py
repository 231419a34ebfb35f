"""Chapters on learning: rewards and metrics of the algorithm, staleness, lengths, evaluations.

Lags and lengths are those of `asyncrl audit`; evaluations come from `metrics/evaluation.jsonl`. Of a step that was
evaluated again, the last evaluation is shown; unknown figures are `-`. Text of the run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from asyncrl.evaluation.ids import measured_version, name_version
from asyncrl.evaluation.statistics import ALL
from asyncrl.metrics.length_bias import Bucket
from asyncrl.report.data import RunData, newest
from asyncrl.report.html import card, table
from asyncrl.report.svg import Line, bar_chart, legend, line_chart, short

SMALL = (
    ("loss", "policy loss"), ("grad_norm", "gradient norm"), ("entropy", "entropy, nats"),
    ("ess", "effective sample size"), ("kl_behaviour", "KL to the behaviour policy"),
    ("clip_share", "clipped tokens, share"), ("response_length_mean", "response length, tokens"),
    ("truncated_share", "samples cut at the length limit, share"),
    ("zero_advantage_share", "groups without a signal, share"), ("logprob_gap_mean", "gap of log-probs, nats"),
    ("value_loss", "value loss of the critic"), ("explained_variance", "explained variance of the critic"),
    ("kl_reference", "KL to the reference"),
    ("teacher_kl", "log-prob above the teacher's, nats"), ("pair_accuracy", "pairs ranked right, share"),
    ("lr", "learning rate"),
)  # fmt: skip
PART_COLOURS = ("s2", "s3", "s5", "s4", "s8", "s6")


def learning(data: RunData) -> str:
    """Reward with its spread, its parts, and the small multiples."""
    spread = {float(line["step"]): float(line.get("reward_std", 0.0)) for line in data.steps}
    rewards = data.values("reward_mean")
    band = [(y - spread.get(x, 0.0), y + spread.get(x, 0.0)) for x, y in rewards]
    names = sorted({name for line in data.steps for name in line if name.startswith("reward/")})
    lines = [Line("reward", rewards, "s1", band)]
    if len(names) > 1:
        lines += [
            Line(name.removeprefix("reward/"), data.values(name), colour)
            for name, colour in zip(names, PART_COLOURS, strict=False)
        ]
    curve = line_chart(lines, width=1000, height=260, smooth=True)
    note = "mean of the batch by step; the band is one standard deviation of its samples"
    reward = card("Reward", (legend(lines) if len(lines) > 1 else "") + curve, note=note, wide=True)
    small = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"{line_chart([Line(title, data.values(key), 's1')], width=320, height=150, x_label='', smooth=True)}</figure>"
        for key, title in SMALL
        if _moves(data, key)
    )
    return reward + (card("Training", f'<div class="small">{small}</div>', wide=True) if small else "")


def _moves(data: RunData, key: str) -> bool:
    """Whether a curve is worth showing: not constant 0, and not a constant learning rate."""
    values = {value for _, value in data.values(key)}
    return any(values) and (key != "lr" or len(values) > 1)


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


SERIES = (("made", "s1"), ("trained", "s3"), ("dropped", "s2"), ("dead", "s6"))


def lengths(data: RunData) -> str:
    """Distributions by length, drops by length, and the means by step."""
    found = data.audit.lengths
    if not found.made_mean:
        return card("Length bias", '<p class="none">no samples yet</p>')
    alarm = f'<p class="verdict bad"><b>length bias</b> {escape(found.alarm)}</p>' if found.alarm else ""
    early = f'<p class="note">{escape(found.early)}</p>' if found.early else ""
    said = "no bias" if not found.alarm else "an alarm"
    note = (
        f"share of samples by length, tokens; mean made {found.made_mean:.1f}, trained {found.trained_mean:.1f}, "
        f"dropped {found.dropped_mean:.1f}; distance of trained from all that ended: KS {found.ks:.3f} "
        f"(limit {found.ks_limit:.3f}): {said}"
    )
    curves = _curves(found.samples)
    chart = legend(curves) + line_chart(curves, floor=0.0, x_label="length, tokens")
    by_step = [
        Line(name.replace("_length_mean", ""), data.values(name), colour)
        for name, colour in (("issued_length_mean", "s1"), ("trained_length_mean", "s3"), ("dropped_length_mean", "s2"))
        if data.values(name)
    ]
    steps = legend(by_step) + line_chart(by_step) if by_step else ""
    means = (
        card("Length by step", steps, note="running means of all samples made, trained and dropped") if steps else ""
    )
    body = alarm + chart + _drops(found.samples, "samples") + _drops(found.groups, "groups") + early
    return card("Length bias", body, note=note) + means


def _curves(buckets: list[Bucket]) -> list[Line]:
    curves = []
    for name, colour in SERIES:
        total = sum(getattr(bucket, name) for bucket in buckets)
        if total:
            points = [(float(bucket.low), getattr(bucket, name) / total) for bucket in buckets]
            curves.append(Line(name, points, colour))
    return curves


def _drops(buckets: list[Bucket], what: str) -> str:
    """Dropped groups by length; empty without any."""
    if not any(bucket.dropped or bucket.dead for bucket in buckets):
        return ""
    rows = [
        (
            f"{bucket.low} to {bucket.high - 1}",
            str(bucket.made),
            str(bucket.trained),
            str(bucket.dropped),
            str(bucket.dead),
            f"{(bucket.dropped + bucket.dead) / bucket.made:.0%}",
        )
        for bucket in buckets
        if bucket.made
    ]
    head = ("length" if what == "samples" else "mean length", f"{what} made", "trained", "dropped", "dead", "not used")
    return table(head, rows, classes=("short",) + ("number",) * 5)


COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")
FIGURES = (("reward/mean", ""), ("reward/best", "/mean"), ("reward/maj", "/mean"), ("acc/pass", "/mean"))


def evaluations(data: RunData) -> str:
    """Both cards; empty if the run has no evaluations."""
    lines = newest(data.evaluations)
    if not lines:
        return ""
    return card(
        "Evaluation",
        _evaluation_curves(lines),
        wide=True,
        note=(
            "held-out prompts, never trained: mean reward by the version that was measured; the band is two "
            "standard errors over the prompts to either side"
        ),
    ) + card(
        "Evaluations",
        _table(lines),
        wide=True,
        note=(
            "version: the weights that made every sample of the row; step: where the evaluation came due. Figures are "
            "of the scored prompts alone"
        ),
    )


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


def _evaluation_curves(lines: Sequence[Mapping[str, Any]]) -> str:
    drawn = []
    for place, source in enumerate(list_sources(lines)):
        points, band = [], []
        for line in lines:
            found = figure_value(line, source, "reward/mean", "")
            if found is not None:
                points.append((float(measured_version(line)), found[0]))
                band.append((found[0] - 2 * found[1], found[0] + 2 * found[1]))
        drawn.append(Line(source, points, COLOURS[place % len(COLOURS)], band))
    return (legend(drawn) if len(drawn) > 1 else "") + line_chart(drawn, width=1000, height=220)


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    head = ("step", "source", "mean@k", "best@k", "maj@k", "pass@k", "prompts", "version", "seconds", "not scored")
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
    texts = [f"{reason} {count}" for reason, count in sorted(reasons.items())]
    texts += [f"ended early: {line['why']}"] if line.get("why") else []
    version = name_version(line).removeprefix("version ") if line.get("evaluation_scored") else "-"
    scored, prompts, k = (int(line.get(f"evaluation_{name}", 0)) for name in ("scored", "prompts", "samples"))
    return [
        f"{scored} of {prompts} x {k}",
        version,
        short(float(line.get("evaluation_s", 0.0))),
        escape(", ".join(texts)),
    ]
