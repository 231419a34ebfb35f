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
from asyncrl.report import learning, operation, settings, timing
from asyncrl.report import samples as shown
from asyncrl.report import summary as verdict
from asyncrl.report.data import RunData
from asyncrl.report.html import SCRIPT, STYLE
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
    Chapter("samples", "Samples", "Answers of the model.", (shown.samples,)),
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
