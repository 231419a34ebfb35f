"""The chapter on samples: prompts, answers, rewards, and the difference of engine and learner per token.

The learner writes the samples (`samples.jsonl`). Guarantees:
1. every text of the model and of the prompts is escaped;
2. a token's colour is |engine - learner| of its log-probs, by `LEVELS`; tokens that the policy did not sample are grey;
3. images are thumbnails in the page itself, before prompt and response: pixels that were decoded and encoded here;
4. samples are those of the history that counts (`asyncrl.monitor.samples`); at most `SHOWN` in all.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem, thumbnail
from asyncrl.images.digests import IMAGES, image_digests
from asyncrl.images.folder import ImageFolder
from asyncrl.monitor.samples import drop_repeated_samples
from asyncrl.report.data import Line, RunData
from asyncrl.report.html import card, clip, table
from asyncrl.report.svg import short

SHOWN = 40
THUMBNAIL = 96  # pixels
MOST_IMAGES = 8  # of a prompt, or of a response
LEVELS = (0.01, 0.05, 0.2, 1.0)  # nats; a token's class is g1 from the first value on, and so on


def samples(data: RunData) -> str:
    """The first and the last recorded samples."""
    half = SHOWN // 2
    every = newest(data.samples)
    kept = every if len(every) <= SHOWN else every[:half] + every[-half:]
    rows, folder = [], ImageFolder(data.run.images)
    for line in kept:
        reward = line.get("reward")
        shown = short(float(reward)) if isinstance(reward, int | float) else "-"
        parts = dict(line.get("parts") or {})
        if len(parts) > 1:
            listed = ", ".join(f"{name} {short(float(value))}" for name, value in sorted(parts.items()))
            shown += f'<br><span class="usual">{escape(listed)}</span>'
        words = f"{_pictures(image_digests(line), folder)}<pre>{escape(clip(line.get('prompt')))}</pre>"
        numbers = (escape(str(line.get("step", ""))), shown, escape(str(line.get("lag", ""))), _gap_words(line))
        said = f"{_pictures(image_digests({IMAGES: line.get('shown')}), folder)}<pre>{answer(line)}</pre>"
        rows.append((*numbers, words, said))
    head = ("step", "reward", "lag", "mean gap", "prompt", "response")
    note = (
        "the best and the worst of some steps. A token's colour is the distance of the engine's log-prob from the "
        "learner's: what is left of it at lag 0 is numerical, more at larger lags is training"
    )
    return card(
        "Samples", _key() + table(head, rows, classes=(*("short number",) * 4, "text", "text")), wide=True, note=note
    )


def _pictures(digests: Sequence[str], folder: ImageFolder) -> str:
    """Thumbnails of images, or why there is none."""
    found = []
    for digest in digests[:MOST_IMAGES]:
        words = escape(folder.describe(digest), quote=True)
        try:
            body = base64.b64encode(thumbnail(folder.get(digest), side=THUMBNAIL)).decode()
            found.append(f'<img src="data:image/png;base64,{body}" alt="{words}" title="{words}"> ')
        except (ImageProblem, ConfigError):  # without pillow there are no pictures
            found.append(f'<span class="usual">{words}</span> ')
    return "".join(found)


def newest(lines: Sequence[Line]) -> list[Line]:
    """The last line of every step, group and sample that counts; by step."""
    kept = {
        str((line.get("step"), line.get("group"), line.get("index", place))): line
        for place, line in enumerate(drop_repeated_samples(lines))
    }
    return list(kept.values())


def gaps(line: Line) -> list[float | None]:
    """|engine - learner| of every token; None if one of them is unknown."""
    engine, learner = line.get("engine") or [], line.get("learner") or []
    if len(engine) != len(learner):
        return [None] * len(engine)
    return [abs(a - b) if _number(a) and _number(b) else None for a, b in zip(engine, learner, strict=True)]


def answer(line: Line) -> str:
    """The response as HTML: coloured tokens if their log-probs are known, else its text."""
    tokens = line.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return escape(clip(line.get("response")))
    engine, found = line.get("engine") or [], gaps(line)
    parts, plain = [], ""
    for place, token in enumerate(tokens):
        gap = found[place] if place < len(found) else None
        mine = level(gap)
        if not mine and place < len(engine) and engine[place] is not None:
            plain += str(token)
            continue
        parts.append(escape(plain))
        plain = ""
        if not mine:
            parts.append(f'<span class="env">{escape(str(token))}</span>')
            continue
        said = f"engine {engine[place]:g}, learner {line['learner'][place]:g}"
        parts.append(f'<span class="{mine}" title="{said}">{escape(str(token))}</span>')
    more = (
        f' <span class="usual">… {line["length"]} tokens</span>' if int(line.get("length") or 0) > len(tokens) else ""
    )
    return "".join([*parts, escape(plain), more])


def level(gap: float | None) -> str:
    """The class of a gap.

    >>> level(0.3), level(0.001), level(None)
    ('g3', '', '')
    """
    rank = sum(gap >= limit for limit in LEVELS) if gap is not None else 0
    return f"g{rank}" if rank else ""


def _gap_words(line: Line) -> str:
    known = [gap for gap in gaps(line) if gap is not None]
    return f"{sum(known) / len(known):.2g}" if known else "-"


def _key() -> str:
    names = [*(f"{low:g} to {high:g}" for low, high in pairwise(LEVELS)), f"{LEVELS[-1]:g} and more"]
    keys = "".join(f'<span><span class="g{n}">&nbsp;&nbsp;</span> {name}</span>' for n, name in enumerate(names, 1))
    return f'<p class="legend">nats: {keys}<span class="env">not sampled by the policy</span></p>'


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
