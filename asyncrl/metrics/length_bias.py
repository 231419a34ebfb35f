"""The length-bias alarm: compares the length of trained samples with the length of all samples.

Groups that are dropped for lateness have long answers, and the first samples of a young run are short. `asyncrl audit`
and the report use it on the whole log, and the buffer (`LengthWatch`) while it runs. Guarantees:
1. pure: the same lengths give the same verdict; an alarm names both means and the settings to change;
2. only finished samples are compared. Pending samples of a dropped group have an unknown length: they are counted
   (`unfinished`), and the alarm says so, since they are the longest.

>>> watch = LengthWatch()
>>> watch.take([{"e": "sample", "g": 0, "length": 10}, {"e": "sample", "g": 1, "length": 90}])
>>> watch.take([{"e": "commit", "groups": [0]}, {"e": "drop", "g": 1}])
>>> {name: round(value, 2) for name, value in watch.values().items()}
{'issued_length_mean': 50.0, 'trained_length_mean': 10.0, 'dropped_length_mean': 90.0, 'length_bias': -0.8}
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BUCKETS = 8
LIMIT = 0.1  # relative shift of the mean
KS_LIMIT = 0.05  # distance, plus noise; then a quarter of the shift is enough
ENOUGH = 64  # no verdict below this number of samples
NOISE = 1.63  # two-sample KS, 1 %
#: Reasons of a lost lease that also discard the group's samples.
DISCARDS = frozenset({"late", "payload_lost", "store_lost", "abandoned"})


class Bucket(msgspec.Struct):
    """Samples (or groups) with a length in `[low, high)` by outcome. `made` counts all of them."""

    low: int
    high: int
    made: int = 0
    trained: int = 0
    dropped: int = 0
    dead: int = 0


class Story(msgspec.Struct, frozen=True):
    """The lengths of one group's samples and its outcome: trained | dropped | dead | in_flight."""

    lengths: tuple[int, ...]
    fate: str
    steps: tuple[int, ...] = ()
    unfinished: int = 0
    version: int = 0  # its oldest weights


class Lengths(msgspec.Struct):
    """The distributions and the verdict. Means are 0 without samples."""

    samples: list[Bucket] = []
    groups: list[Bucket] = []  # by the mean length of a group
    made_mean: float = 0.0
    trained_mean: float = 0.0
    dropped_mean: float = 0.0
    dead_mean: float = 0.0
    ks: float = 0.0  # largest distance of the distribution functions of trained samples and of all finished ones
    ks_limit: float = 0.0
    shift: float = 0.0  # trained mean / mean of all finished samples - 1
    unfinished: int = 0  # pending samples of dropped groups
    early_mean: float = 0.0  # first step
    late_mean: float = 0.0  # samples of the same weights that later steps trained
    alarm: str = ""
    early: str = ""  # note about the first steps, if they differ


def ks_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of the two empirical distribution functions.

    >>> ks_distance([1, 2, 3, 4], [3, 4, 5, 6])
    0.5
    """
    if not one or not other:
        return 0.0
    a, b = sorted(one), sorted(other)
    return max(abs(bisect.bisect_right(a, x) / len(a) - bisect.bisect_right(b, x) / len(b)) for x in sorted({*a, *b}))


def compare(stories: Iterable[Story]) -> Lengths:
    """The verdict over all groups of a run."""
    every = list(stories)
    by_fate: dict[str, list[int]] = {fate: [] for fate in ("trained", "dropped", "dead", "in_flight")}
    for story in every:
        by_fate[story.fate] += story.lengths
    trained, ended = by_fate["trained"], by_fate["trained"] + by_fate["dropped"] + by_fate["dead"]
    made = ended + by_fate["in_flight"]
    found = Lengths(
        samples=_buckets(every, each=True),
        groups=_buckets(every, each=False),
        made_mean=_mean(made),
        trained_mean=_mean(trained),
        dropped_mean=_mean(by_fate["dropped"]),
        dead_mean=_mean(by_fate["dead"]),
        ks=ks_distance(trained, ended),
        shift=_mean(trained) / _mean(ended) - 1 if trained and _mean(ended) else 0.0,
        unfinished=sum(story.unfinished for story in every if story.fate == "dropped"),
    )
    if trained:
        found.ks_limit = KS_LIMIT + NOISE * math.sqrt((len(trained) + len(ended)) / (len(trained) * len(ended)))
    _early(found, every)
    apart = abs(found.shift) > (LIMIT / 4 if found.ks > found.ks_limit else LIMIT)
    if apart and len(ended) >= ENOUGH:
        found.alarm = _alarm(found, _mean(ended))
    return found


def _alarm(found: Lengths, ended_mean: float) -> str:
    way = "shorter" if found.shift < 0 else "longer"
    text = (
        f"trained samples are {abs(found.shift):.0%} {way} than all that ended (mean {found.trained_mean:.1f} of "
        f"{ended_mean:.1f} tokens, KS {found.ks:.2f})"
    )
    if found.dropped_mean:
        text += f"; those dropped had {found.dropped_mean:.1f} tokens"
    if found.unfinished:
        text += f", and {found.unfinished} more were never finished: they are longer still"
    if found.shift > 0:  # not by lateness, which drops the long ones
        return f"{text}. Short answers were dropped, as buffer.filters do with prompts that are too easy or too hard"
    return f"{text}. The model does not learn from them: raise buffer.late_timeout_s or buffer.max_staleness"


def _early(found: Lengths, stories: Sequence[Story]) -> None:
    """Compare the first step with later samples of the same weights: everything else may have changed, the weights did
    not.
    """
    trained = [story for story in stories if story.steps]
    step = min((min(story.steps) for story in trained), default=0)
    version = min((story.version for story in trained if min(story.steps) == step), default=0)
    first: list[int] = []
    later: list[int] = []
    for story in trained:
        if story.version == version:
            (first if min(story.steps) == step else later).extend(story.lengths)
    found.early_mean, found.late_mean = _mean(first), _mean(later)
    enough = min(len(first), len(later)) >= ENOUGH // 2
    if enough and found.early_mean < (1 - LIMIT) * found.late_mean:
        found.early = (
            f"step {step} held samples of {found.early_mean:.1f} tokens, what the same weights made for "
            f"later steps {found.late_mean:.1f}: a young run trains what finishes first"
        )


def _buckets(stories: Sequence[Story], *, each: bool) -> list[Bucket]:
    longest = max((max(story.lengths, default=0) for story in stories), default=0)
    if not longest:
        return []
    width = max(1, -(-(longest + 1) // BUCKETS))
    buckets = [Bucket(low, low + width) for low in range(0, longest + 1, width)]
    for story in stories:
        values: Sequence[float] = story.lengths if each else [_mean(story.lengths)] * bool(story.lengths)
        for value in values:
            bucket = buckets[int(value) // width]
            bucket.made += 1
            bucket.trained += story.fate == "trained"
            bucket.dropped += story.fate == "dropped"
            bucket.dead += story.fate == "dead"
    return buckets


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_NONE = (0, 0)


class LengthWatch:
    """Running means of one life of the buffer, from the events of its history."""

    def __init__(self) -> None:
        self._live: dict[int, list[int]] = {}  # group -> tokens and number of its samples so far
        self._sums = {"issued": [0, 0], "trained": [0, 0], "dropped": [0, 0]}  # tokens, samples

    def take(self, events: Iterable[Any]) -> None:
        """Take some events (objects of the history, or structs with its fields)."""
        live, tokens, count = self._live, 0, 0
        for event in events:
            if type(event) is not dict:  # a sample: most events are of this kind, so this is short
                mine = live.get(event.g)
                if mine is None:
                    mine = live[event.g] = [0, 0]
                mine[0] += event.length
                mine[1] += 1
                tokens += event.length
                count += 1
            elif event["e"] == "commit":
                for number in event["groups"]:
                    self._add("trained", live.pop(number, _NONE))
            elif event["e"] in ("drop", "dead") or (event["e"] == "lost" and event["why"] in DISCARDS):
                self._add("dropped", live.pop(event["g"], _NONE))
            elif event["e"] == "sample":
                mine = live.setdefault(event["g"], [0, 0])
                mine[0] += event["length"]
                mine[1] += 1
                self._add("issued", (event["length"], 1))
        self._add("issued", (tokens, count))

    def values(self) -> dict[str, float]:
        """Metrics by catalogue name; `length_bias` is the trained mean over the issued mean, minus 1."""
        named = {f"{name}_length_mean": tokens / count for name, (tokens, count) in self._sums.items() if count}
        if "trained_length_mean" in named:
            named["length_bias"] = named["trained_length_mean"] / max(named["issued_length_mean"], 1e-9) - 1
        return named

    def _add(self, name: str, made: Sequence[int]) -> None:
        self._sums[name][0] += made[0]
        self._sums[name][1] += made[1]
