"""The section on lengths: issued, trained and dropped samples, and the length-bias alarm.

Numbers are those of `asyncrl audit` and the live metrics.
"""

from __future__ import annotations

from html import escape

from asyncrl.metrics.length_bias import Bucket
from asyncrl.report.data import RunData
from asyncrl.report.html import card, table
from asyncrl.report.svg import Line, legend, line_chart

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
