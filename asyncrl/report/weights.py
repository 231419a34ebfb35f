"""The chapter on weight sync: durations of rounds, and deliveries to each generator."""

from __future__ import annotations

from collections import Counter
from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card, table
from asyncrl.report.svg import Line, line_chart, short


def weights(data: RunData) -> str:
    """Rounds of the weight sync, and deliveries by generator."""
    points = [
        (float(line["version"]), float(line["round_s"]))
        for line in data.rounds
        if "round_s" in line and "version" in line
    ]
    deliveries = data.deliveries()
    note = (
        f"seconds from publish to the last acknowledgement, by version. {deliveries.matched} deliveries with the "
        f"right digest, {deliveries.wrong} with another, {deliveries.left_out} not in time"
    )
    rounds = [Line("round, s", points, "s5")]
    chart = line_chart(rounds, floor=0.0, x_label="version of the weights", bars=True)
    return card("Weight sync", chart, note=note) + _members(data)


def _members(data: RunData) -> str:
    """A row per generator: how its weights came, how many bytes, how many versions it acknowledged."""
    ways: dict[str, Counter[str]] = {}
    carried: Counter[str] = Counter()
    for line in data.rounds:
        for name, way in dict(line.get("ways") or {}).items():
            ways.setdefault(name, Counter())[f"{way.get('encoding', '')} by {way.get('transport', '')}"] += 1
            carried[name] += int(way.get("bytes", 0))
    names = sorted({name for line in data.rounds for name in dict(line.get("members") or {})})
    rows = [
        (
            escape(name),
            str(data.acknowledged(name)),
            f"{short(float(carried[name]))}B" if carried[name] else "-",
            escape(", ".join(f"{way} {count}" for way, count in ways.get(name, Counter()).most_common())),
        )
        for name in names
    ]
    head = ("generator", "versions acknowledged", "received", "how")
    return card("Generators", table(head, rows, classes=("short", "short number", "short number", "")))
