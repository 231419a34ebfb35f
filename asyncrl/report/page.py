"""The page of the report: style, script and chapters in one text.

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
from asyncrl.report import evaluation, faults, learning, ledger, settings, staleness, timing, weights
from asyncrl.report import length_bias as bias
from asyncrl.report import samples as shown
from asyncrl.report import summary as verdict
from asyncrl.report.data import RunData
from asyncrl.report.style import SCRIPT, STYLE
from asyncrl.report.svg import SMOOTHING

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Chapter(NamedTuple):
    """A part of the page with an entry in the navigation. `bad`: it needs attention."""

    key: str
    title: str
    lead: str
    cards: Sequence[Callable[[RunData], str]]
    bad: Callable[[RunData], bool] = lambda data: False


CHAPTERS = (
    Chapter("learning", "Learning", "Does it learn: the reward of trained batches, and what the algorithm did.",
            (learning.learning,)),
    Chapter("evaluation", "Evaluation", "Held-out prompts, never trained.", (evaluation.section,)),
    Chapter("staleness", "Staleness", "How old the weights were that made what was trained, against the bound.",
            (staleness.staleness, bias.lengths), lambda data: bool(data.audit.over_bound or data.audit.lengths.alarm)),
    Chapter("time", "Time", "Who worked and who waited, and what the queue held.",
            (timing.utilisation, timing.queue, timing.throughput)),
    Chapter("weights", "Weights", "How new weights came to the generators.", (weights.weights,),
            lambda data: bool(data.deliveries().wrong)),
    Chapter("data", "Data", "Where every issued prompt went, and what the log proves.", (ledger.ledger,),
            lambda data: not data.audit.ok or bool(data.audit.dead)),
    Chapter("faults", "Faults", "What ended, and how long it took until the run went on.", (faults.faults,),
            lambda data: bool(data.recoveries)),
    Chapter("samples", "Samples", "What the model wrote.", (shown.samples,)),
    Chapter("setup", "Setup", "What was asked for, and what it ran on.",
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
    return frame(data.name, str(data.run.root), links, verdict.verdict(data) + "".join(parts))


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
