"""The chapter on time: activity of every process, the queue, and the learner's time."""

from __future__ import annotations

from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card
from asyncrl.report.svg import Line, Points, legend, line_chart, short, stacked_chart, thin
from asyncrl.report.svg_time import BINS, Lane, lanes

PARTS = (
    ("wait_s", "waited", "s2"),
    ("fetch_s", "fetched", "s7"),
    ("assemble_s", "assembled", "s6"),
    ("proximal_s", "forward only", "s8"),
    ("train_s", "trained", "s1"),
    ("publish_s", "published", "s3"),
    ("commit_s", "committed", "s5"),
    ("checkpoint_s", "checkpoint", "s4"),
)
#: Layers of the learner's lane: parts of its step, from the bottom up.
PHASES = (
    ("training", "s1", ("proximal_s", "train_s", "assemble_s")),
    ("weights, commit, checkpoint", "s5", ("publish_s", "commit_s", "checkpoint_s")),
    ("waiting", "s2", ("wait_s", "fetch_s")),
)
Pieces = list[tuple[float, float, dict[str, float]]]  # from, to, seconds by phase


def utilisation(data: RunData) -> str:
    """A lane of time per process."""
    start, end = data.span_of_time()
    rows = []
    learner = _learner_lane(data, start, end)
    if learner is not None:
        rows.append(learner)
    for name, lines in sorted(data.roles.items()):
        marks = [(float(line["t"]), float(line["busy_share"])) for line in lines if {"busy_share", "t"} <= set(line)]
        pieces = _pieces(marks, start, end)
        if pieces and lines[0].get("role") != "learner":
            titles = [f"{name}: {share:.0%} busy at {begin - start:.0f} s" for begin, _, share in pieces]
            columns = [(begin, until, [(share, "s3")]) for begin, until, share in pieces]
            rows.append(Lane(name, columns, _marks(data, name), titles))
    for name in ("buffer", "weightsync"):
        if marks_of := _marks(data, name):
            rows.append(Lane(name, (), marks_of))
    keys = [Line(name, [(0, 0)], colour) for name, colour, _ in PHASES] + [
        Line("busy (others)", [(0, 0)], "s3"),
        Line("ended with an error", [(0, 0)], "s6"),
        Line("started again", [(0, 0)], "s4"),
    ]
    note = "the height of a column is the share of its time; what is empty was waiting, or not there"
    return card("Work over time", legend(keys) + lanes(rows, start=start, end=end), wide=True, note=note)


def _learner_lane(data: RunData, start: float, end: float) -> Lane | None:
    """The learner's phases by bin, over all steps, including those that were trained again."""
    width = ((end - start) or 1.0) / BINS
    bins: dict[int, dict[str, float]] = {}
    for line in data.every_step:
        spent = {name: sum(float(line.get(part, 0.0)) for part in parts) for name, _, parts in PHASES}
        whole = float(line.get("step_s", 0.0)) or sum(spent.values())
        if not whole or "t" not in line:
            continue
        begin, until = float(line["t"]) - whole, float(line["t"])
        for place in range(max(0, int((begin - start) / width)), min(BINS - 1, int((until - start) / width)) + 1):
            left, right = start + place * width, start + (place + 1) * width
            share = max(0.0, min(until, right) - max(begin, left)) / whole
            kept = bins.setdefault(place, dict.fromkeys(spent, 0.0))
            for name, value in spent.items():
                kept[name] += value * share
    if not bins:
        return None
    columns, titles = [], []
    for place in sorted(bins):
        parts = [(bins[place][name] / width, colour) for name, colour, _ in PHASES]
        columns.append((start + place * width, start + (place + 1) * width, parts))
        words = ", ".join(f"{name} {bins[place][name] / width:.0%}" for name, _, _ in PHASES)
        titles.append(f"learner at {place * width:.0f} s: {words}")
    return Lane("learner", columns, _marks(data, "learner"), titles)


def _marks(data: RunData, name: str) -> list[tuple[float, str, str]]:
    """Failures and restarts of the process."""
    found = []
    for one in data.recoveries:
        if one.name == name:
            found.append((one.t, "s6", f"{name} ended with code {one.code}"))
            if one.start_s is not None:
                found.append((one.t + one.start_s, "s4", f"{name} was started again after {one.start_s:.2f} s"))
    return found


def _pieces(marks: Points, start: float, end: float) -> list[tuple[float, float, float]]:
    """Mean share per bin of time."""
    width = ((end - start) or 1.0) / BINS
    bins: dict[int, list[float]] = {}
    for t, share in marks:
        bins.setdefault(min(BINS - 1, max(0, int((t - start) / width))), []).append(share)
    # A heartbeat covers the time since the previous one.
    pieces, previous = [], None
    for place in sorted(bins):
        share = sum(bins[place]) / len(bins[place])
        first = place if previous is None or place - previous > 8 else previous + 1
        pieces.append((start + first * width, start + (place + 1) * width, share))
        previous = place
    return pieces


def queue(data: RunData) -> str:
    """Groups by state over time, under the limit."""
    start, _ = data.span_of_time()
    states = (("claimed", "s4"), ("ready", "s3"), ("unscored", "s2"), ("leased", "s1"))
    lines = [line for line in data.buffer if "t" in line and any(state in line for state, _ in states)]
    areas = [
        Line(state, thin([(float(line["t"]) - start, float(line.get(state, 0))) for line in lines]), colour)
        for state, colour in states
    ]
    limit = None
    if data.config and lines:
        top = float(data.config.buffer.max_in_flight_groups)
        ends = (float(lines[0]["t"]) - start, float(lines[-1]["t"]) - start)
        limit = Line("max in flight", [(ends[0], top), (ends[1], top)], "s6", dashed=True)
    shown = areas if lines else []
    chart = stacked_chart(shown, limit=limit, x_label="seconds since the start", width=1000, height=220)
    return card(
        "Queue",
        legend([*shown, *([limit] if limit else [])]) + chart,
        wide=True,
        note="prompts (groups) under way, by state; backpressure keeps their sum under the limit",
    )


def throughput(data: RunData) -> str:
    """Tokens per second and where the time of a step went."""
    areas = [
        Line(name, thin([(float(line["step"]), float(line.get(key, 0.0))) for line in data.steps]), colour)
        for key, name, colour in PARTS
        if any(line.get(key) for line in data.steps)
    ]
    speed = line_chart([Line("tokens/s", data.values("tokens_per_s"), "s1")], floor=0.0, smooth=True)
    times = _time_bar(data) + stacked_chart(areas, x_label="step")
    return card(
        "Throughput", speed, note="response tokens trained per second of the step" + _format_compute(data)
    ) + card("Where the learner's time went", times, note="share of all steps, and seconds of each")


def _time_bar(data: RunData) -> str:
    """One stacked bar of the parts of all steps, with their shares as its legend."""
    totals = [(sum(value for _, value in data.values(key)), name, colour) for key, name, colour in PARTS]
    whole = sum(seconds for seconds, _, _ in totals)
    pieces, words, place = [], [], 0.0
    for seconds, name, colour in totals:
        if seconds > 0:
            wide = 1000 * seconds / whole
            pieces.append(
                f'<rect class="bar {colour}" x="{place:.2f}" width="{wide:.2f}" height="14">'
                f"<title>{escape(name)}: {seconds / whole:.1%}</title></rect>"
            )
            words.append(f'<span><i class="key {colour}"></i>{escape(name)} {seconds / whole:.1%}</span>')
            place += wide
    bar = f'<svg class="wide" viewBox="0 0 1000 14" role="img">{"".join(pieces)}</svg>'
    return f'<p class="legend">{"".join(words)}</p>{bar}' if pieces else ""


def _format_compute(data: RunData) -> str:
    """`; 212 TFLOP/s per device while it computes, MFU 0.21 (0.18 of the whole step)`, if it was measured."""
    speeds, used, whole = (data.values(key) for key in ("tflops_per_device", "mfu", "mfu_step"))
    if not speeds:
        return ""
    said = f"; {short(_mean(speeds))} TFLOP/s per device while it computes"
    return said + (f", MFU {_mean(used):.3f} ({_mean(whole):.3f} of whole steps)" if used and whole else "")


def _mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)
