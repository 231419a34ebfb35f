"""A snapshot drawn on the terminal (rich).

Guarantees: pure; texts of the run are text, never markup.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.monitor import plain as render
from asyncrl.monitor.advice import advice
from asyncrl.monitor.snapshot import STATES, Row, Snapshot
from asyncrl.monitor.text import clean

COLOURS = {"leased": "blue", "unscored": "yellow", "ready": "green", "claimed": "magenta"}
BAR = 30
WORDS = frozenset({"producer", "reward worker", "judge", "host", "does"})  # columns with text


def screen(s: Snapshot) -> RenderableType:
    parts: list[RenderableType] = [_head(s), _facts(s)]
    if s.producers:
        parts.append(_producers(s))
    if s.rewards:
        parts.append(_rewards(s))
    if s.troubles:
        parts.append(_troubles(s))
    good = not s.silent and not s.fault and not s.exit_code
    parts.append(
        Panel(
            Text(clean(advice(s))),
            title="advice",
            title_align="left",
            border_style="green" if good else "red",
        )
    )
    return Group(*parts)


def _head(s: Snapshot) -> Text:
    style = "bold green" if not s.ended and not s.silent else "bold red" if s.silent or s.exit_code else "bold cyan"
    return Text(render.headline(s), style=style)


def _facts(s: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    table.add_row("queue", Text.assemble(_queue_bar(s), "  ", render.queue_words(s)))
    top = float(s.max_staleness) if s.max_staleness > 0 else None
    sparks = render.sparkline(s.values("lag_mean"), top=top)
    table.add_row("lag", Text.assemble((sparks, "cyan"), "  ", render.lag_words(s)))
    table.add_row("time", Text.assemble(_time_bar(s), "  ", render.time_words(s)))
    if s.why and s.live:
        table.add_row("waits for", Text(clean(s.why)))
    for one in s.judges:
        table.add_row("judge", Text(render.judge_words(one)))
    if s.parts:
        table.add_row("rewards", Text(render.part_words(s)))
    table.add_row("weights", Text(render.sync_words(s)))
    if s.evaluation:
        table.add_row("evaluation", Text(clean(s.evaluation)))
    return table


def _queue_bar(s: Snapshot) -> Text:
    text, whole = Text(), max(s.capacity, s.outstanding, 1)
    for state in STATES:
        text.append("█" * round(s.queue.get(state, 0) / whole * BAR), COLOURS[state])
    text.append("░" * max(0, BAR - len(text)), "dim")
    return text


def _time_bar(s: Snapshot) -> Text:
    parts = [(s.learner.training, "green"), (s.learner.other, "magenta"), (s.learner.waiting, "red")]
    text = Text()
    for value, colour in parts:
        text.append("█" * round((value or 0.0) * BAR), colour)
    text.append("░" * max(0, BAR - len(text)), "dim")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=name != "does")
    return table


def _producers(s: Snapshot) -> Table:
    table = _table("producer", "host", "behind", "tok/s", "in flight", "busy", "seen", "does")
    for one in s.producers:
        who = (Text(clean(one.name)), Text(clean(one.host)))
        table.add_row(
            *who,
            render.behind(s, one),
            render.count(one.rate),
            render.format_in_flight(one),
            render.share(one.busy),
            render.ago(one.seen_s),
            _does(s, one),
        )
    return table


def _rewards(s: Snapshot) -> Table:
    table = _table("reward worker", "judge", "host", "samples/s", "call ms", "failed", "busy", "seen", "does")
    for one in s.rewards:
        call = one.stat("reward_call_s")
        who = (Text(clean(one.name)), Text(clean(one.judge)), Text(clean(one.host)))
        table.add_row(
            *who,
            render.count(one.rate),
            "-" if call is None else f"{1000 * call:.1f}",
            render.count(one.stat("failed_rewards")),
            render.share(one.busy),
            render.ago(one.seen_s),
            _does(s, one),
        )
    return table


def _does(s: Snapshot, one: Row) -> Text:
    words = render.format_activity(s, one)
    bad = words.startswith(("silent", "is stopped", "has ended"))
    return Text(words, style="" if not bad or s.ended else "red")


def _troubles(s: Snapshot) -> Any:
    table = Table.grid(padding=(0, 2))
    for one in s.troubles:
        colour = "green" if one.what in ("back", "restart") else "red"
        table.add_row(
            Text("fault", style="dim"),
            render.clock(one.t),
            Text(one.what, style=colour),
            Text(clean(one.text)),
        )
    return table
