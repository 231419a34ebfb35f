"""Decides which checkpoints stay: the last ones, and the best by a metric. Scores are stored in `best.json`.

Guarantees:
1. the newest `keep` checkpoints always stay, whatever their scores;
2. at most `keep + 2 * count` stay: the last, the best, and as many whose evaluation has not ended;
3. of equal scores the later step is better; NaN is no score;
4. an unreadable `best.json` loses the scores, with a warning, and the run continues.

A score by a step metric is its mean over the steps since the previous regular checkpoint, because the samples of a step
come from older weights. A score by an evaluation belongs to its step.
Example: steps 20, 40, 60, 80 with scores 0.5, 0.7, 0.6, 0.4, keep 1 and count 2: 40, 60 and 80 stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.config import Config
from asyncrl.config.mode import is_evaluation_due
from asyncrl.errors import UNREADABLE
from asyncrl.evaluation.ids import METRICS
from asyncrl.runtime.run_dir import write_atomic

BEST = "best.json"


class Ranking(msgspec.Struct, frozen=True):
    """Scores of checkpoints. `awaited`: steps whose evaluation has not ended; `count`: how many of the best stay."""

    count: int
    metric: str
    goal: Literal["max", "min"] = "max"
    scores: dict[int, float] = {}
    awaited: tuple[int, ...] = ()


class BestFile(msgspec.Struct, frozen=True):
    """Content of `best.json`: the best first."""

    metric: str
    goal: Literal["max", "min"]
    best: tuple[int, ...]
    scores: dict[int, float]


def best(steps: Iterable[int], ranking: Ranking) -> tuple[int, ...]:
    """Return the best of these steps, best first.

    >>> best([20, 40, 60, 80], Ranking(2, "reward_mean", scores={20: 0.5, 40: 0.7, 60: 0.7}))
    (60, 40)
    """
    sign = 1.0 if ranking.goal == "max" else -1.0
    scored = [step for step in steps if math.isfinite(ranking.scores.get(step, math.nan))]
    scored.sort(key=lambda step: (sign * ranking.scores[step], step), reverse=True)
    return tuple(scored[: ranking.count])


def select(steps: Iterable[int], *, newest: int, keep: int, ranking: Ranking | None = None) -> set[int]:
    """Return the steps that stay once `newest` is durable; none above it does.

    >>> sorted(select([20, 40, 60, 80], newest=60, keep=1))
    [60]
    """
    usable = sorted((step for step in steps if step <= newest), reverse=True)
    stay = set(usable[:keep])
    if ranking is not None:
        stay.update(best(usable, ranking))
        # Keep the oldest: otherwise slow evaluations would never find their checkpoint.
        stay.update(sorted(step for step in usable if step in ranking.awaited and step not in stay)[: ranking.count])
    return stay


def write(root: Path, steps: Iterable[int], ranking: Ranking) -> None:
    """Write `best.json` for these steps; drop scores of others."""
    known = {step: ranking.scores[step] for step in sorted(steps) if step in ranking.scores}
    found = BestFile(ranking.metric, ranking.goal, best(known, ranking), known)
    write_atomic(root / BEST, msgspec.json.encode(found))


def read(root: Path) -> BestFile | None:
    """Read `best.json`; None if there is none. Raises OSError or one of `UNREADABLE`."""
    path = root / BEST
    return msgspec.json.decode(path.read_bytes(), type=BestFile) if path.exists() else None


class Scores:
    """Scores of the checkpoints, on rank 0."""

    def __init__(self, root: Path, config: Config, *, say: Callable[[str], None]) -> None:
        learner = config.learner
        self._config = config
        self._metric, self._goal, self._count = (
            learner.checkpoint_metric,
            learner.checkpoint_goal,
            learner.checkpoint_best,
        )
        self._say = say
        self._window: list[float] = []  # metric of the steps since the last regular checkpoint
        self._evaluated = -1  # the newest step whose evaluation has ended
        self._scores: dict[int, float] = {}
        if not self._count:
            return
        try:
            found = read(root)
        except (OSError, *UNREADABLE) as error:
            say(f"warning: {BEST} cannot be read, the scores of earlier checkpoints are lost: {error}")
            return
        if found is not None and (found.metric, found.goal) == (self._metric, self._goal):
            self._scores = dict(found.scores)
        elif found is not None:
            say(f"checkpoints were ranked by {found.metric} ({found.goal}); their scores are forgotten")

    def forget_after(self, step: int) -> None:
        """Drop scores after this step: the run continues from it."""
        self._scores = {number: score for number, score in self._scores.items() if number <= step}

    def add_metrics(self, values: Mapping[str, float]) -> None:
        value = values.get(self._metric, math.nan)
        if self._count and math.isfinite(value):
            self._window.append(value)

    def add_checkpoint(self, step: int) -> None:
        """Score the regular checkpoint of this step."""
        if self._window:
            self._scores[step] = math.fsum(self._window) / len(self._window)
            self._window.clear()

    def add_evaluations(self, figures: Mapping[int, Mapping[str, float]]) -> bool:
        """Add finished evaluations by step. Return whether they changed a score."""
        if not self._count or not self._metric.startswith(METRICS):
            return False
        changed = False
        for step in sorted(step for step in figures if step > self._evaluated):
            self._evaluated, value = step, figures[step].get(self._metric, math.nan)
            if math.isfinite(value):
                changed = changed or self._scores.get(step) != value
                self._scores[step] = value
            else:
                has = ", ".join(name for name in sorted(figures[step]) if name.startswith("val-core/"))
                self._say(f"warning: the evaluation of step {step} has no {self._metric}; it has {has or 'no figures'}")
        return changed

    def ranking(self, steps: Iterable[int]) -> Ranking | None:
        """Return the ranking for `select`; None if only the last checkpoints stay."""
        if not self._count:
            return None
        awaited: tuple[int, ...] = ()
        if self._metric.startswith(METRICS):
            awaited = tuple(
                step
                for step in steps
                if step > self._evaluated and is_evaluation_due(self._config, step) and step not in self._scores
            )
        return Ranking(self._count, self._metric, self._goal, dict(self._scores), awaited)
