"""The sections of the report: each is a pure function from the run's data to HTML text.

Called by `asyncrl.report.html`. Guarantees: every text that comes from the run is escaped (samples are the words of a
model); a section without data says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asyncrl.config import Config, all_keys
from asyncrl.report.data import ENDS, RunData
from asyncrl.report.svg import Line, Points, bar_chart, lanes, legend, line_chart, short, stacked_chart, thin

SHOWN_SAMPLES = 40
TROUBLE = frozenset({"exit", "restart", "kill", "given up", "lost", "drop", "dead", "silent"})
SHOWN_EVENTS = 200
BINS = 160
PACKAGES = (
    "asyncrl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq", "redis", "vllm",
)  # fmt: skip
PARTS = (
    ("wait_s", "waited", "s2"), ("fetch_s", "fetched", "s7"), ("assemble_s", "assembled", "s6"),
    ("proximal_s", "forward only", "s8"), ("train_s", "trained", "s1"), ("publish_s", "published", "s3"),
    ("commit_s", "committed", "s5"), ("checkpoint_s", "checkpoint", "s4"),
)  # fmt: skip
SMALL = (
    ("loss", "policy loss"), ("grad_norm", "gradient norm"), ("entropy", "entropy, nats"),
    ("ess", "effective sample size"), ("kl_behaviour", "KL to the behaviour policy"),
    ("clip_share", "clipped tokens, share"), ("response_length_mean", "response length, tokens"),
    ("zero_advantage_share", "groups without a signal, share"),
)  # fmt: skip


def card(title: str, body: str, *, note: str = "", wide: bool = False) -> str:
    """A titled box."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" full" if wide else ""}"><h2>{escape(title)}</h2>{below}{body}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Sequence[str] = ()) -> str:
    """A table; cells are HTML already."""
    cells = list(rows)
    if not cells:
        return '<p class="none">none</p>'
    names = [*classes, *[""] * len(head)]
    body = "".join(
        "<tr>" + "".join(f'<td class="{name}">{cell}</td>' for cell, name in zip(row, names, strict=False)) + "</tr>"
        for row in cells
    )
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{body}</table></div>'


# ---------------------------------------------------------------- verdict


def verdict(data: RunData) -> str:
    """The one-line verdict and the tiles."""
    audit, result = data.audit, data.result
    steps = data.config.learner.steps if data.config else data.last_step
    complete = bool(result.get("done")) or (audit.done and data.last_step >= steps)
    sound = audit.ok
    word = "complete" if complete else "failed" if result.get("code") else "stopped before its end"
    if not result and not audit.ended:
        word = "not ended"
    kind = "good" if sound and complete else "bad" if not sound or result.get("code") else "open"
    proof = "nothing lost, nothing trained twice, every lag within its bound" if sound else "the audit found violations"
    early, late = data.reward_ends()
    deliveries = data.deliveries()
    tokens = [value for _, value in data.values("tokens_per_s")]
    bound = audit.bound_max or (data.config.buffer.max_staleness if data.config else 0)
    gaps = [data.values(f"lag/0/logprob_gap_{name}") for name in ("mean", "max")]
    gap, most = (f"{max(value for _, value in found):.1e}" if found else "-" for found in gaps)
    tiles = [
        ("reward", f"{early:.3f} → {late:.3f}", f"mean of the first and last {ENDS} steps"),
        ("lag", f"{audit.lag_mean:.2f}", f"steps, mean; largest {audit.lag_max}, bound {bound}"),
        ("steps", f"{data.last_step} / {steps}", f"{audit.trained} groups trained"),
        ("tokens/s", short(sum(tokens) / len(tokens)) if tokens else "-", "response tokens trained, mean"),
        ("weights", f"{deliveries.matched}", f"deliveries with the right digest, {deliveries.wrong} wrong"),
        ("engine", gap, f"nats, mean gap of its log-probs to the learner's; largest {most}"),
        ("wall time", duration(_wall(data)), f"{len(data.processes)} process starts"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(text)}</small></div>'
        for name, value, text in tiles
    )
    bad = "".join(f"<li>{escape(text)}</li>" for text in audit.violations[:12])
    without = ", ".join(f"{name} (code {code})" for name, code in dict(result.get("given_up") or {}).items())
    if without:
        proof += f"; went on without {without}, which ended more often than it may be restarted"
    reason = f" ({escape(str(result.get('reason')))})" if result.get("reason") else ""
    return (f'<p class="verdict {kind}"><b>{escape(word)}{reason}</b> {escape(proof)}</p>'
            f'{f"<ul class=violations>{bad}</ul>" if bad else ""}<div class="tiles">{boxes}</div>')  # fmt: skip


def _wall(data: RunData) -> float:
    start, end = data.span_of_time()
    return end - start


def duration(seconds: float) -> str:
    """`2 h 03 min`, `4 min 12 s`, `38 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.0f} s"


# ---------------------------------------------------------------- curves


def learning(data: RunData) -> str:
    """Reward with its spread, and the small multiples."""
    spread = {float(line["step"]): float(line.get("reward_std", 0.0)) for line in data.steps}
    rewards = data.values("reward_mean")
    band = [(y - spread.get(x, 0.0), y + spread.get(x, 0.0)) for x, y in rewards]
    curve = line_chart([Line("reward", rewards, "s1", band)], width=1000, height=260)
    note = "mean of the batch by step; the band is one standard deviation of its samples"
    reward = card("Reward", curve, note=note, wide=True)
    small = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"{line_chart([Line(title, data.values(key), 's1')], width=320, height=150, x_label='')}</figure>"
        for key, title in SMALL if data.values(key)
    )  # fmt: skip
    return reward + (card("Training", f'<div class="small">{small}</div>', wide=True) if small else "")


def staleness(data: RunData) -> str:
    """Lag by step under its bound, and how many groups had which lag."""
    bound = Line("bound", data.values("bound_max"), "s6", dashed=True)
    lines = [Line("largest lag", data.values("lag_max"), "s2"), Line("mean lag", data.values("lag_mean"), "s1"), bound]
    counts = data.audit.lag_counts
    top = max([*counts, data.audit.bound_max], default=0)
    bars = [(str(lag), float(counts.get(lag, 0))) for lag in range(top + 1)] if counts else []
    mark = data.audit.bound_max if bars else None
    return card("Staleness by step", legend(lines) + line_chart(lines, floor=0.0),
                note="lag: steps between the oldest weights that made a group and those its step starts from") + card(
        "Staleness of groups", bar_chart(bars, mark=mark, mark_text=f"bound {data.audit.bound_max}",
                  x_label="lag, steps"),
        note="number of trained groups by lag, counted in the log")  # fmt: skip


def utilisation(data: RunData) -> str:
    """Lanes of busy time per process."""
    start, end = data.span_of_time()
    rows: list[tuple[str, list[tuple[float, float, float]]]] = []
    learner = [(float(line["t"]) - float(line.get("step_s", 0)), float(line["t"]), _busy(line)) for line in data.steps]
    if learner:
        rows.append(("learner", learner))
    for name, lines in sorted(data.roles.items()):
        marks = [(float(line["t"]), float(line["busy_share"])) for line in lines if {"busy_share", "t"} <= set(line)]
        pieces = _pieces(marks, start, end)
        if pieces and lines[0].get("role") != "learner":
            rows.append((name, pieces))
    return card(
        "Who worked when",
        lanes(rows, start=start, end=end),
        wide=True,
        note="the stronger the colour, the larger the share of time spent working; pale is waiting",
    )


def _busy(line: dict[str, Any]) -> float:
    return 1.0 - float(line.get("wait_s", 0.0)) / (float(line.get("step_s", 0.0)) or 1.0)


def _pieces(marks: Points, start: float, end: float) -> list[tuple[float, float, float]]:
    """Mean share per bin of time."""
    width = ((end - start) or 1.0) / BINS
    bins: dict[int, list[float]] = {}
    for t, share in marks:
        bins.setdefault(min(BINS - 1, max(0, int((t - start) / width))), []).append(share)
    # A heartbeat speaks for the time since the one before: fill what lies between two of them.
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
    areas = [Line(state, thin([(float(line["t"]) - start, float(line.get(state, 0))) for line in lines]), colour)
             for state, colour in states]  # fmt: skip
    limit = None
    if data.config and lines:
        top = float(data.config.buffer.max_in_flight_groups)
        ends = (float(lines[0]["t"]) - start, float(lines[-1]["t"]) - start)
        limit = Line("max in flight", [(ends[0], top), (ends[1], top)], "s6", dashed=True)
    shown = areas if lines else []
    chart = stacked_chart(shown, limit=limit, x_label="seconds since the start")
    return card("Queue", legend([*shown, *([limit] if limit else [])]) + chart,
                note="prompts (groups) under way, by state; backpressure keeps their sum under the limit")  # fmt: skip


def throughput(data: RunData) -> str:
    """Tokens per second and where the time of a step went."""
    areas = [Line(name, thin([(float(line["step"]), float(line.get(key, 0.0))) for line in data.steps]), colour)
             for key, name, colour in PARTS if any(line.get(key) for line in data.steps)]  # fmt: skip
    speed = line_chart([Line("tokens/s", data.values("tokens_per_s"), "s1")], floor=0.0)
    times = _time_bar(data) + stacked_chart(areas, x_label="step")
    return card("Throughput", speed, note="response tokens trained per second of the step" + _computed(data)) + card(
        "Where the learner's time went", times, note="share of all steps, and seconds of each"
    )


def _time_bar(data: RunData) -> str:
    """One stacked bar of the parts of all steps, with their shares as its legend."""
    totals = [(sum(value for _, value in data.values(key)), name, colour) for key, name, colour in PARTS]
    whole = sum(seconds for seconds, _, _ in totals)
    pieces, words, place = [], [], 0.0
    for seconds, name, colour in totals:
        if seconds > 0:
            wide = 1000 * seconds / whole
            pieces.append(f'<rect class="bar {colour}" x="{place:.2f}" width="{wide:.2f}" height="14">'
                          f"<title>{escape(name)}: {seconds / whole:.1%}</title></rect>")  # fmt: skip
            words.append(f'<span><i class="key {colour}"></i>{escape(name)} {seconds / whole:.1%}</span>')
            place += wide
    bar = f'<svg class="wide" viewBox="0 0 1000 14" role="img">{"".join(pieces)}</svg>'
    return f'<p class="legend">{"".join(words)}</p>{bar}' if pieces else ""


def _computed(data: RunData) -> str:
    """`; 212 TFLOP/s per device while it computes, MFU 0.21 (0.18 of the whole step)`, as far as it was measured."""
    speeds, used, whole = (data.values(key) for key in ("tflops_per_device", "mfu", "mfu_step"))
    if not speeds:
        return ""
    said = f"; {short(_mean(speeds))} TFLOP/s per device while it computes"
    return said + (f", MFU {_mean(used):.3f} ({_mean(whole):.3f} of whole steps)" if used and whole else "")


def _mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)


def weights(data: RunData) -> str:
    """Rounds of the weight sync."""
    points = [(float(line["version"]), float(line["round_s"])) for line in data.rounds
              if "round_s" in line and "version" in line]  # fmt: skip
    deliveries = data.deliveries()
    note = (f"seconds from publish to the last acknowledgement, by version. {deliveries.matched} deliveries with the "
            f"right digest, {deliveries.wrong} with another, {deliveries.left_out} not in time")  # fmt: skip
    rounds = [Line("round, s", points, "s5")]
    chart = line_chart(rounds, floor=0.0, x_label="version of the weights", bars=True)
    return card("Weight sync", chart, note=note)


# ---------------------------------------------------------------- tables


def ledger(data: RunData) -> str:
    """Where every issued group ended."""
    audit = data.audit
    rows = [("issued", audit.issued), ("trained", audit.trained)]
    rows += [(f"dropped: {reason}", count) for reason, count in sorted(audit.dropped.items())]
    rows += [(f"dead: {reason}", count) for reason, count in sorted(audit.dead.items())]
    rows += [("superseded", audit.superseded)] if audit.superseded else []
    rows += [("in flight", audit.in_flight), ("lost", audit.lost), ("doubled", audit.doubled)]
    text = [(escape(name), str(count)) for name, count in rows]
    spans = f"{audit.spans_matched} of {audit.spans} spans of tokens carry the committed digest"
    return card("Ledger", table(("state", "groups"), text, classes=("", "number")),
                note=f"where every issued prompt (group) ended; {spans}")  # fmt: skip


def processes(data: RunData) -> str:
    """Every process that worked for the run."""
    last = {name: lines[-1] for name, lines in data.roles.items()}
    rows = []
    for line in data.processes:
        beat = last.get(str(line.get("name")), {})
        same = beat.get("pid") == line.get("pid")
        what = ", ".join(f"{key.replace('_', ' ')} {short(float(beat[key]))}" for key in
                         ("generated_tokens", "scored_samples", "swaps") if same and key in beat)  # fmt: skip
        rows.append((escape(str(line.get("role"))), escape(str(line.get("name"))), escape(str(line.get("pid"))),
                     escape(str(line.get("host"))), clock(line.get("t")), escape(what)))  # fmt: skip
    return card("Processes", table(("role", "name", "pid", "host", "started", "did"), rows,
                                   classes=("short", "short", "short number", "short", "short")))  # fmt: skip


def faults(data: RunData) -> str:
    """Restarts, kills, lost leases, drops and dead letters in the order of time."""
    entries: list[tuple[float, str, str]] = []
    for event in data.events:
        kind = str(event.get("event"))
        if kind == "start" or (kind == "exit" and event.get("code") == 0):
            continue
        text = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("t", "event", "role"))
        entries.append((float(event.get("t", 0)), kind, text))
    for event in data.history:
        text = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("t", "e"))
        entries.append((float(event.get("t", 0)), str(event["e"]), text))
    entries.sort()
    trouble = [kind for _, kind, _ in entries if kind in TROUBLE]
    said = "" if trouble else '<p class="note">No faults. What the launcher and the buffer noted:</p>'
    shown = [(clock(t), escape(kind), escape(text)) for t, kind, text in entries[:SHOWN_EVENTS]]
    more = f"{len(entries) - SHOWN_EVENTS} more are left out" if len(entries) > SHOWN_EVENTS else ""
    return card("Faults and restarts", said + table(("time", "what", "detail"), shown, classes=("short", "short")),
                note=more)  # fmt: skip


def samples(data: RunData) -> str:
    """Some samples: the first and the last that were kept."""
    half = SHOWN_SAMPLES // 2
    kept = data.samples if len(data.samples) <= SHOWN_SAMPLES else data.samples[:half] + data.samples[-half:]
    rows = []
    for line in kept:
        reward = line.get("reward")
        shown = short(float(reward)) if isinstance(reward, int | float) else "-"
        words = (f"<pre>{escape(_clip(line.get(key)))}</pre>" for key in ("prompt", "response"))
        rows.append((escape(str(line.get("step", ""))), shown, escape(str(line.get("lag", ""))), *words))
    return card("Samples", table(("step", "reward", "lag", "prompt", "response"), rows,
                                 classes=("short number",) * 3), wide=True,
                note="the best and the worst of some steps")  # fmt: skip


def _clip(text: Any, limit: int = 600) -> str:
    whole = text if isinstance(text, str) else str(text)
    return whole if len(whole) <= limit else whole[:limit] + " …"


def configuration(data: RunData) -> str:
    """Every setting; what differs from the default is marked."""
    if data.config is None:
        return card("Configuration", '<p class="none">config.toml cannot be read</p>')
    default = Config(model=type(data.config.model)(path=""))
    rows: list[tuple[str, ...]] = []
    same: list[tuple[str, ...]] = []
    for key in all_keys():
        if "." not in key or key.startswith(("reward.", "judge.")):
            continue
        value, usual = _at(data.config, key), _at(default, key)
        row = (escape(key), escape(repr(value)), escape(repr(usual)))
        (same if value == usual else rows).append(row)
    rows += [(f"judge[{n}]", escape(f"{j.name} x {j.count}"), "-") for n, j in enumerate(data.config.judge)]
    rows += [
        (f"reward[{n}]", escape(f"{r.function or r.judge} x {r.weight:g}"), "-")
        for n, r in enumerate(data.config.reward)
    ]
    changed = table(("changed setting", "value", "default"), rows, classes=("changed", "changed", "usual"))
    rest = table(("setting", "value (default)"), [row[:2] for row in same])
    return card("Configuration", f"{changed}<details><summary>{len(same)} settings have their default</summary>{rest}"
                "</details>", wide=True)  # fmt: skip


def _at(value: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def versions(data: RunData) -> str:
    """Python, packages and the machine."""
    import platform

    rows = [("python", platform.python_version()), ("system", platform.platform())]
    for name in PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            continue
    rows.append(("run folder", str(Path(data.run.root))))
    return card("Versions", table(("what", "version"), [(escape(a), escape(b)) for a, b in rows]),
                note="of the environment that wrote this report")  # fmt: skip


def clock(t: Any) -> str:
    """`14:03:59` of a wall time."""
    return time.strftime("%H:%M:%S", time.localtime(float(t))) if isinstance(t, int | float) else "-"
