"""The question for a judge, and the number in its answer. Pure.

Guarantees:
1. `{prompt}`, `{response}`, `{ground_truth}`, `{columns}` (the row as JSON, without its images) and names of columns
   are replaced; other braces are text, and so are braces in a response. `{images}` stands for the pictures of the
   prompt and those that an environment showed later;
2. an answer without a number, or with one outside of the range, is `unparsed`; it is never 0;
3. so is an answer that was cut if, with the default pattern, it has several numbers, or text after its number.

Example: pattern `Score: (\\d+)` in "Score: 3 ... no, Score: 7" gives 7: the last match counts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config.sections.reward import ANY_NUMBER, FIELD, JudgeConfig
from asyncrl.images.decoding import data_uri
from asyncrl.images.digests import IMAGES, image_digests
from producers.rewards.outcome import Problem, Verdict
from producers.rewards.sample import RewardSample

SHOWN = 120  # characters of an answer in a failure


def render(template: str, sample: RewardSample) -> str:
    """The template with the sample in it. Raises Problem if a column is missing."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "response":
            return sample.response
        if name == "prompt":
            return sample.prompt
        if name == "ground_truth":
            return column_text(sample.ground_truth)
        if name == "columns" and name not in sample.row:
            return column_text({key: item for key, item in sample.row.items() if key != IMAGES})
        if name not in sample.row:
            columns = ", ".join(sorted(sample.row)) or "none"
            raise Problem("raised", f"the judge's prompt names column {name!r}; the row has: {columns}")
        return column_text(sample.row[name])

    return FIELD.sub(value, template)


def column_text(value: object) -> str:
    """A column as text: JSON unless it is text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def judge_messages(table: JudgeConfig, sample: RewardSample) -> list[dict[str, Any]]:
    """The question as chat messages. Images of the sample are encoded bytes here (`open_references`)."""
    system = [{"role": "system", "content": table.system}] if table.system else []
    by_url = table.kind == "url"
    shows, template = table.sees_images, table.prompt
    content: Any = _content(template, sample, by_url=by_url) if shows else render(template, sample)
    return [*system, {"role": "user", "content": content}]


def sample_images(sample: RewardSample) -> tuple[bytes, ...]:
    """The encoded images of a sample, those of later turns at the end. Raises Problem if one is missing: its sample is
    never judged without."""
    shown = (*(sample.row.get(IMAGES) or ()), *sample.images)
    if missing := next((image for image in shown if isinstance(image, str)), ""):
        raise Problem("raised", f"image {missing[:8]} is missing")
    return shown


def _content(template: str, sample: RewardSample, *, by_url: bool) -> list[dict[str, Any]]:
    """The parts of a message with pictures; a template of a model on this host gets places alone."""
    shown = sample_images(sample)
    pictures: list[dict[str, Any]] = [{"type": "image"} for _ in shown]
    if by_url:
        pictures = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in shown]
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(template.split("{images}")):
        parts += pictures if number else []
        parts += [{"type": "text", "text": render(piece, sample)}] if piece else []
    return parts


def open_references(sample: RewardSample, images: Mapping[str, bytes]) -> RewardSample:
    """The sample with encoded images instead of their digests; one that is missing stays a digest, and its question is
    a failure.
    """
    row = {**sample.row, IMAGES: [images.get(digest, digest) for digest in image_digests(sample.row)]}
    return msgspec.structs.replace(sample, row=row, images=[images.get(digest, digest) for digest in sample.images])


def number_in(table: JudgeConfig, text: str, *, cut: bool = False) -> Verdict:
    """The number of the last match of the pattern. `cut`: the answer ended by its length. Raises Problem `unparsed`."""
    found = list(re.finditer(table.pattern, text))
    if not found:
        raise Problem("unparsed", f"the answer has no match of {table.pattern!r}: {text[:SHOWN]!r}")
    try:
        value = float(found[-1][1])
    except (TypeError, ValueError):
        raise Problem("unparsed", f"the match {found[-1][0][:SHOWN]!r} of {table.pattern!r} is no number") from None
    if not math.isfinite(value):
        raise Problem("unparsed", f"the match {found[-1][0][:SHOWN]!r} is no finite number")
    if cut and table.pattern == ANY_NUMBER and (len(found) > 1 or text[found[-1].end() :].strip()):
        where = f"the answer was cut after max_new_tokens = {table.max_new_tokens}"
        raise Problem("unparsed", f"{where}, {found[-1][0][:SHOWN]!r} may not be its number: {text[:SHOWN]!r}")
    if table.range and not table.range[0] <= value <= table.range[1]:
        raise Problem("unparsed", f"{value:g} is outside of {list(table.range)}: {text[:SHOWN]!r}")
    return Verdict(value)


def yes_share(table: JudgeConfig, logprobs: Mapping[str, float]) -> Verdict:
    """P(yes) / (P(yes) + P(no)) from log-probs by word. Raises Problem `unparsed` without either."""
    yes, no = (sum(math.exp(logprobs[word]) for word in words if word in logprobs) for words in (table.yes, table.no))
    if not yes + no > 0:
        seen = ", ".join(repr(word) for word in list(logprobs)[:8])
        raise Problem("unparsed", f"neither yes nor no is among its likeliest words: {seen}")
    return Verdict(yes / (yes + no), {"yes": yes, "no": no})


def sum_logprobs(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Log-probs by word without the space around it: " yes" and "yes" are the same word.

    >>> {word: round(value, 3) for word, value in sum_logprobs([(" yes", -1.0), ("yes", -1.0), ("no", -2.0)]).items()}
    {'yes': -0.307, 'no': -2.0}
    """
    found: dict[str, float] = {}
    for word, logprob in pairs:
        name = word.strip()
        # Not by exp alone: it is 0 for -9999, which servers send for a word without a probability.
        high, low = max(found.get(name, logprob), logprob), min(found.get(name, logprob), logprob)
        found[name] = high + math.log1p(math.exp(low - high)) if name in found else logprob
    return found


def question_digest(table: JudgeConfig, *origin: str) -> str:
    """Digest of the question and of the origin of the answers (a server and its model, or files)."""
    question = [
        *origin,
        table.system,
        table.prompt,
        table.answer,
        table.pattern,
        table.range,
        table.yes,
        table.no,
        table.temperature,
        table.max_new_tokens,
    ]
    return hashlib.blake2b(msgspec.json.encode(question), digest_size=8).hexdigest()
