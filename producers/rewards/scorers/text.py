"""Text comparison: `builtin:exact`, `builtin:qa`, `builtin:keyword`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from producers.rewards.sample import RewardSample
from producers.rewards.scorers.extract import find_between
from producers.rewards.scorers.ground_truth import require_truths

PUNCTUATION = str.maketrans("", "", string.punctuation)


class Exact:
    """1 if the response is the ground truth, or one of a list; white space at the ends is ignored.

    `case`: case-sensitive. `last_line`: compare only the last line of the response.
    """

    def __init__(self, *, case: bool = True, last_line: bool = False) -> None:
        self._case = case
        self._last_line = last_line

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score; the response is the answer."""
        said = sample.last_turn.strip()
        said = said.rpartition("\n")[2].strip() if self._last_line else said
        return {"score": float(self._key(said) in map(self._key, require_truths(sample))), "pred": said}

    def _key(self, text: str) -> str:
        return text.strip() if self._case else text.strip().casefold()


def normalise(text: str) -> str:
    """SQuAD: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(said: str, truth: str) -> float:
    """F1 of the common words of two texts; 1 if both have none."""
    left, right = normalise(said).split(), normalise(truth).split()
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(left), shared / len(right)
    return 2 * precision * recall / (precision + recall)


class QA:
    """F1 (or EM, by `metric`) of the response against the best of the ground truths, as in SQuAD.

    `tag`: only the text between <tag> and </tag> counts (the last one); without it the score is 0.
    """

    def __init__(self, *, metric: Literal["f1", "em"] = "f1", tag: str = "") -> None:
        if metric not in ("f1", "em"):
            raise ValueError(f"metric = {metric!r} is not f1 or em")
        self._metric = metric
        self._tag = tag

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and both figures."""
        said, truths = sample.last_turn, require_truths(sample)
        if self._tag:
            found = find_between(said, f"<{self._tag}>", f"</{self._tag}>")
            if not found:
                return {"score": 0.0, "f1": 0.0, "em": 0.0}
            said = found[-1]
        f1 = max(word_f1(said, truth) for truth in truths)
        em = max(float(normalise(said) == normalise(truth)) for truth in truths)
        return {"score": em if self._metric == "em" else f1, "f1": f1, "em": em, "pred": normalise(said)}


class Keyword:
    """Share of `words` in the response; 0 if it has one of `forbidden`. Without `words`: the ground truths.

    `whole`: only whole words; `case`: case-sensitive.
    """

    def __init__(
        self, *, words: Sequence[str] = (), forbidden: Sequence[str] = (), whole: bool = True, case: bool = False
    ) -> None:
        self._words = list(words)
        self._forbidden = list(forbidden)
        self._whole = whole
        self._flags = 0 if case else re.IGNORECASE

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and the number of forbidden words."""
        if not self._words and self._forbidden and sample.ground_truth is None:
            words: list[str] = []
        else:
            words = self._words or require_truths(sample)
        said = sample.last_turn
        bad = sum(self._has(said, word) for word in self._forbidden)
        share = sum(self._has(said, word) for word in words) / len(words) if words else 1.0
        return {"score": 0.0 if bad else share, "share": share, "forbidden": float(bad)}

    def _has(self, text: str, word: str) -> bool:
        pattern = re.escape(word)
        return bool(re.search(rf"(?<!\w){pattern}(?!\w)" if self._whole else pattern, text, self._flags))
