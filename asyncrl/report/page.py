"""The page of the report: its head (whether the run is complete and sound, and its main numbers) and its chapters.

Guarantees:
1. one self-contained file: no network, fonts or scripts from elsewhere (enforced by a Content-Security-Policy);
2. light and dark follow the reader's system; without JavaScript only tooltips and the smoothing slider are missing;
3. nothing from the run reaches the page unescaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from asyncrl import __version__
from asyncrl.report import learning, operation, samples, settings, timing
from asyncrl.report.data import ENDS, RunData
from asyncrl.report.html import SCRIPT, STYLE, duration, seconds
from asyncrl.report.svg import SMOOTHING, short

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Chapter(NamedTuple):
    """A part of the page with an entry in the navigation. `bad`: it needs attention."""

    key: str
    title: str
    lead: str
    cards: Sequence[Callable[[RunData], str]]
    bad: Callable[[RunData], bool] = lambda data: False


CHAPTERS = (
    Chapter("learning", "Learning", "Rewards of the trained batches, and metrics of the algorithm.",
            (learning.learning,)),
    Chapter("evaluation", "Evaluation", "Held-out prompts, never trained.", (learning.evaluations,)),
    Chapter("staleness", "Staleness", "The lag of the trained groups, against its bound.",
            (learning.staleness, learning.lengths),
            lambda data: bool(data.audit.over_bound or data.audit.lengths.alarm)),
    Chapter("time", "Time", "Work and waits of every process, and the content of the queue.",
            (timing.utilisation, timing.queue, timing.throughput)),
    Chapter("weights", "Weights", "How new weights reached the generators.", (operation.weights,),
            lambda data: bool(data.deliveries().wrong)),
    Chapter("data", "Data", "The outcome of every issued prompt, and the audit of the log.", (operation.ledger,),
            lambda data: not data.audit.ok or bool(data.audit.dead)),
    Chapter("faults", "Faults", "Failed processes, and the time to recovery.", (operation.faults,),
            lambda data: bool(data.recoveries)),
    Chapter("samples", "Samples", "Answers of the model.", (samples.samples,)),
    Chapter("setup", "Setup", "Settings, processes and versions.",
            (settings.configuration, settings.processes, settings.versions)),
)  # fmt: skip


def page(data: RunData) -> str:
    """The report of one run."""
    links, parts = [], []
    for chapter in CHAPTERS:
        cards = "".join(make(data) for make in chapter.cards)
        if cards:
            links.append((chapter.key, chapter.title, chapter.bad(data)))
            parts.append(heading(chapter.key, chapter.title, chapter.lead) + f'<div class="cards">{cards}</div>')
    return frame(data.name, str(data.run.root), links, verdict(data) + "".join(parts))


def heading(key: str, title: str, lead: str) -> str:
    """The head of a chapter."""
    return f'<h2 id="{escape(key)}">{escape(title)}</h2><p class="lead">{escape(lead)}</p>'


def frame(title: str, where: str, links: Sequence[tuple[str, str, bool]], body: str) -> str:
    """A page around a body. `links`: key, title and whether it needs attention."""
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    entries = "".join(
        f'<a href="#{escape(key)}"{" class=bad" if bad else ""}>{escape(name)}</a>'
        for key, name, bad in (("top", "Verdict", False), *links)
    )
    slider = (
        f'<label>smoothing<input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="{SMOOTHING}">'
        "</label>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · asyncrl</title><style>{STYLE}</style></head><body>"
        f'<div class="page"><nav aria-label="chapters">{entries}{slider}</nav><main id="top">'
        f'<h1>{escape(title)}</h1><p class="sub">{escape(where)} · asyncrl {escape(__version__)} · written {written}'
        f'</p>{body}</main></div><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def grade(data: RunData) -> tuple[str, str, str]:
    """Grade (good, bad or open), verdict, and reason."""
    audit, result = data.audit, data.result
    steps = data.config.learner.steps if data.config else data.last_step
    complete = bool(result.get("done")) or (audit.done and data.last_step >= steps)
    word = "complete" if complete else "failed" if result.get("code") else "stopped before its end"
    if not result and not audit.ended:
        word = "not ended"
    kind = "good" if audit.ok and complete else "bad" if not audit.ok or result.get("code") else "open"
    proof = (
        "nothing lost, nothing trained twice, every lag within its bound" if audit.ok else "the audit found violations"
    )
    proof += _faults(data)
    without = ", ".join(f"{name} (code {code})" for name, code in dict(result.get("given_up") or {}).items())
    if without:
        proof += f"; went on without {without}, which ended more often than it may be restarted"
    reason = f" ({result['reason']})" if result.get("reason") else ""
    return kind, word + reason, proof


def _faults(data: RunData) -> str:
    """`; 3 processes ended with an error, after at most 12 s the run took a new step`."""
    if not data.recoveries:
        return ""
    times = [one.progress_s for one in data.recoveries if one.progress_s is not None]
    count = len(data.recoveries)
    text = f"; {count} process{'es' if count > 1 else ''} ended with an error"
    return text + (f", after at most {seconds(max(times))} the run took a new step" if len(times) == count else "")


def verdict(data: RunData) -> str:
    """The one-line verdict and the tiles."""
    kind, word, proof = grade(data)
    boxes = "".join(
        f'<div class="tile"><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(text)}</small></div>'
        for name, value, text in tiles(data)
    )
    bad = "".join(f"<li>{escape(text)}</li>" for text in data.audit.violations[:12])
    return (
        f'<p class="verdict {kind}"><b>{escape(word)}</b>{escape(proof)}</p>'
        f'{f"<ul class=violations>{bad}</ul>" if bad else ""}<div class="tiles">{boxes}</div>'
    )


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Name, number and what it is."""
    audit = data.audit
    steps = data.config.learner.steps if data.config else data.last_step
    early, late = data.reward_ends()
    deliveries = data.deliveries()
    tokens = [value for _, value in data.values("tokens_per_s")]
    bound = audit.bound_max or (data.config.buffer.max_staleness if data.config else 0)
    gaps = [data.values(f"lag/0/logprob_gap_{name}") for name in ("mean", "max")]
    gap, most = (f"{max(value for _, value in found):.1e}" if found else "-" for found in gaps)
    whole = sum(value for _, value in data.values("step_s"))
    waited = sum(value for _, value in data.values("wait_s"))
    return [
        ("reward", f"{early:.3f} → {late:.3f}", f"mean of the first and last {ENDS} steps"),
        ("lag", f"{audit.lag_mean:.2f}", f"steps, mean; largest {audit.lag_max}, bound {bound}"),
        ("steps", f"{data.last_step} / {steps}", f"{audit.trained} groups trained"),
        ("tokens/s", short(sum(tokens) / len(tokens)) if tokens else "-", "response tokens trained, mean"),
        ("learner waited", f"{waited / whole:.1%}" if whole else "-", "of the time of its steps"),
        ("weights", f"{deliveries.matched}", f"deliveries with the right digest, {deliveries.wrong} wrong"),
        ("engine", gap, f"nats, mean gap of its log-probs to the learner's; largest {most}"),
        ("wall time", duration(data.wall_s), f"{len(data.processes)} process starts"),
    ]
