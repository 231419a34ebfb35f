"""Comparing texts: `builtin:exact`, `builtin:qa`, `builtin:keyword`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from producers.rewards.sample import RewardSample
from producers.rewards.scorers.extract import between
from producers.rewards.scorers.ground_truth import truths_of

PUNCTUATION = str.maketrans("", "", string.punctuation)


class Exact:
    """1 where the response is the ground truth, or one of its list; white space at the ends does not count.

    `case`: letters must agree in case. `last_line`: only the last line of the response is compared.
    """

    def __init__(self, *, case: bool = True, last_line: bool = False) -> None:
        self._case = case
        self._last_line = last_line

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score; the response is the answer."""
        said = sample.response.strip()
        said = said.rpartition("\n")[2].strip() if self._last_line else said
        return {"score": float(self._key(said) in map(self._key, truths_of(sample))), "pred": said}

    def _key(self, text: str) -> str:
        return text.strip() if self._case else text.strip().casefold()


def normalised(text: str) -> str:
    """SQuAD: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1_of(said: str, truth: str) -> float:
    """F1 of the words that two texts share; 1 where both have none."""
    left, right = normalised(said).split(), normalised(truth).split()
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(left), shared / len(right)
    return 2 * precision * recall / (precision + recall)


class QA:
    """F1 (or EM, by `metric`) of the response against the best of the ground truths, as SQuAD counts.

    `tag`: only what stands between <tag> and </tag> counts (the last such), and nothing without it.
    """

    def __init__(self, *, metric: Literal["f1", "em"] = "f1", tag: str = "") -> None:
        if metric not in ("f1", "em"):
            raise ValueError(f"metric = {metric!r} is not f1 or em")
        self._metric = metric
        self._tag = tag

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and both figures."""
        said, truths = sample.response, truths_of(sample)
        if self._tag:
            found = between(said, f"<{self._tag}>", f"</{self._tag}>")
            if not found:
                return {"score": 0.0, "f1": 0.0, "em": 0.0}
            said = found[-1]
        f1 = max(f1_of(said, truth) for truth in truths)
        em = max(float(normalised(said) == normalised(truth)) for truth in truths)
        return {"score": em if self._metric == "em" else f1, "f1": f1, "em": em, "pred": normalised(said)}


class Keyword:
    """Share of `words` that the response has; 0 where it has one of `forbidden`. Without `words`: the ground truths.

    `whole`: as whole words alone; `case`: letters must agree in case.
    """

    def __init__(
        self, *, words: Sequence[str] = (), forbidden: Sequence[str] = (), whole: bool = True, case: bool = False
    ) -> None:
        self._words = list(words)
        self._forbidden = list(forbidden)
        self._whole = whole
        self._flags = 0 if case else re.IGNORECASE

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and how many forbidden words there are."""
        if not self._words and self._forbidden and sample.ground_truth is None:
            words: list[str] = []
        else:
            words = self._words or truths_of(sample)
        bad = sum(self._has(sample.response, word) for word in self._forbidden)
        share = sum(self._has(sample.response, word) for word in words) / len(words) if words else 1.0
        return {"score": 0.0 if bad else share, "share": share, "forbidden": float(bad)}

    def _has(self, text: str, word: str) -> bool:
        pattern = re.escape(word)
        return bool(re.search(rf"(?<!\w){pattern}(?!\w)" if self._whole else pattern, text, self._flags))
