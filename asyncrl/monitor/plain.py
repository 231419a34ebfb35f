"""A snapshot as plain lines: `asyncrl top --plain`, and output that is not a terminal.

`asyncrl.monitor.screen` uses the same texts. Guarantees:
1. pure, and the same facts as on the screen; lines have at most `WIDTH` characters unless a text needs more;
2. texts of the run contain no control characters: a name or a reason cannot move the cursor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.monitor.advice import advice
from asyncrl.monitor.snapshot import STATES, Row, Snapshot
from asyncrl.monitor.status_schema import Judge
from asyncrl.monitor.text import clean

WIDTH = 120
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 30


def sparkline(values: Sequence[float], *, top: float | None = None, width: int = SPARKS) -> str:
    """The newest values as blocks.

    >>> sparkline([0, 1, 2], top=2)
    '▁▅█'
    """
    shown = list(values)[-width:]
    if not shown:
        return ""
    high = max([*shown, top or 0.0]) or 1.0
    return "".join(BARS[min(len(BARS) - 1, round(max(0.0, value) / high * (len(BARS) - 1) + 1e-9))] for value in shown)


def bar(shares: Sequence[tuple[str, float]], *, width: int = 40) -> str:
    """Parts of a whole as letters.

    >>> bar([("t", 0.5), ("w", 0.25)], width=8)
    'ttttww..'
    """
    text = "".join(sign * round(share * width) for sign, share in shares)[:width]
    return text.ljust(width, ".")


def share(value: float | None) -> str:
    """`41 %`, or `-`."""
    return "-" if value is None else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def ago(seconds: float) -> str:
    """`3 s`, `5 min`, `2 h`."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def headline(s: Snapshot) -> str:
    """Name, step and end of the run."""
    state = f"ended: {s.ended}" if s.ended else "no answer" if s.silent else "running"
    reward = s.newest("reward_mean")
    texts = [f"step {s.step}" + (f" of {s.steps}" if s.steps else "")]
    texts += [f"reward {reward:.3f}"] if reward is not None else []
    speed = s.recent("tokens_per_s")
    texts += [f"{speed:.0f} tok/s trained"] if speed is not None else []
    return clean(f"{s.name or s.folder}  {state}  {'  '.join(texts)}")


def queue_words(s: Snapshot) -> str:
    """Groups by state against the capacity."""
    parts = " · ".join(f"{state} {s.queue.get(state, 0)}" for state in STATES)
    whole = f"{s.outstanding} of {s.capacity}" if s.capacity else str(s.outstanding)
    rest = [f"{name} {s.queue[name]}" for name in ("dropped", "dead") if s.queue.get(name)]
    done = s.queue.get("trained", 0) + s.queue.get("retired", 0)
    return f"{whole} under way: {parts}; trained {done}" + "".join(f", {one}" for one in rest)


def lag_words(s: Snapshot) -> str:
    """The newest lag under its bound, and the curve of means."""
    mean, most, bound = s.newest("lag_mean"), s.newest("lag_max"), s.newest("bound_max")
    bound = bound if bound is not None else float(s.max_staleness) if s.max_staleness >= 0 else None
    return f"mean {'-' if mean is None else f'{mean:.2f}'}, max {count(most)} of {count(bound)}"


def time_words(s: Snapshot) -> str:
    """Shares of the time of producers and learner."""
    busy = [one.busy for one in s.producers if one.busy is not None]
    made = share(sum(busy) / len(busy) if busy else None)
    learner = s.learner
    return (
        f"producers generate {made} | learner trains {share(learner.training)}, waits {share(learner.waiting)}, "
        f"publishes and saves {share(learner.other)}"
    )


def format_activity(s: Snapshot, one: Row) -> str:
    """`works`, `waits 3 s for a lease`, `silent for 40 s`."""
    if s.ended or one.state == "ended":
        return "has ended"
    if one.state and one.state in "Tt":
        return f"is stopped (state {one.state})"
    if one.seen_s >= s.silent_timeout_s:
        return f"silent for {ago(one.seen_s)}"
    waited = f" {one.waiting_s:.0f} s" if one.waiting_s else ""
    return clean(f"waits{waited} for {one.waiting_for}") if one.waiting_for else "works"


def sync_words(s: Snapshot) -> str:
    """Versions, the newest round, and generators that do not serve."""
    if not s.syncs:
        return "none in this mode"
    if s.sync_error:
        return clean(f"no answer: {s.sync_error}")
    last = s.rounds[-1] if s.rounds else {}
    version = s.version if s.version >= 0 else int(last.get("version", -1))
    if version < 0:
        return "no version was published yet"
    held = s.committed if s.committed >= 0 else version
    words = f"version {version}, held by generators {held}"
    if "round_s" in last:
        how = f"{last.get('encoding', '')} by {last.get('transport', '')}"
        words += f"; last round {1000 * float(last['round_s']):.0f} ms, {how}"
    away = [
        f"{name} {member.state} at {member.version}"
        for name, member in sorted(s.members.items())
        if member.state != "serving"
    ]
    return clean(words + (f"; {', '.join(away)}" if away else ""))


def judge_words(one: Judge) -> str:
    """`default: 3 waiting, 2 with 1 workers, 120 scored, 4 failures`."""
    more = [f"{number} {what}" for what, number in (("failures", one.failures), ("late", one.late)) if number]
    call = f", {1000 * one.call_s:.1f} ms a call" if one.call_s is not None else ""
    counts = ", ".join([f"{one.waiting} waiting, {one.leased} with {one.workers} workers, {one.scored} scored", *more])
    return clean(f"{one.judge}: {counts}{call}")


def part_words(s: Snapshot) -> str:
    """The mean of each reward function."""
    return clean(", ".join(f"{name} {value:.3f}" for name, value in sorted(s.parts.items())))


def format_in_flight(one: Row) -> str:
    """`12 samples`, if the engine reports them."""
    return count(one.stat("samples_in_flight") if "samples_in_flight" in one.stats else one.stat("groups_in_flight"))


def clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def plain(s: Snapshot) -> list[str]:
    """All lines."""
    lag = f"{lag_words(s)}  {sparkline(s.values('lag_mean'))}"
    lines = [headline(s), f"{'queue':<10}{queue_words(s)}", f"{'lag':<10}{lag}", f"{'time':<10}{time_words(s)}"]
    if s.why and s.live:
        lines.append(f"{'waits for':<10}{clean(s.why)}")
    for one in s.producers:
        lines.append(
            f"{one.name:<14}{one.host:<10} lag {behind(s, one):<4}{count(one.rate):>6} tok/s  in flight "
            f"{format_in_flight(one):<5}busy {share(one.busy):<6}seen {ago(one.seen_s):<7}"
            f"{format_activity(s, one)}"
        )
    for one in s.rewards:
        call = one.stat("reward_call_s")
        took = "-" if call is None else f"{1000 * call:.1f} ms"
        who = f" for {clean(one.judge)}" if one.judge and len(s.judges) > 1 else ""
        lines.append(
            f"{one.name:<14}{one.host:<10}{who} {count(one.rate):>6} samples/s  call {took}  failed "
            f"{count(one.stat('failed_rewards'))}  seen {ago(one.seen_s):<7}{format_activity(s, one)}"
        )
    lines += [f"{'judge':<10}{judge_words(one)}" for one in s.judges]
    if s.parts:
        lines.append(f"{'rewards':<10}{part_words(s)}")
    lines.append(f"{'weights':<10}{sync_words(s)}")
    if s.evaluation:
        lines.append(f"{'evaluation':<10} {clean(s.evaluation)}")
    lines += [f"{'fault':<10}{clock(one.t)} {one.what} {clean(one.text)}" for one in s.troubles]
    return [clean(line) for line in (*lines, f"{'advice':<10}{advice(s)}")]


def behind(s: Snapshot, one: Row) -> str:
    """How many versions the engine's weights are behind the newest step."""
    held = one.stat("engine_version")
    return "-" if held is None else str(max(0, s.step - int(held)))
