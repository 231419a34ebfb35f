"""Figures of an evaluation: mean@k, best@n, maj@k and pass@n with standard errors, per data source and over all.

Pure. For every
prompt the figure of its k samples is exact (no resampling); over the prompts of a data source it is their mean. With
rewards `r_1 .. r_k` and answers `a_1 .. a_k` of one prompt:

    mean@k   the mean of the rewards
    best@n   the expected largest reward of n samples drawn without replacement: with r_(1) <= .. <= r_(k)
             `sum_i C(i - 1, n - 1) / C(k, n) * r_(i)`; n = k: the largest
    maj@k    the mean reward of the samples with the most frequent answer; of answers that tie, that with the lowest
             mean reward, then the first in the order of the alphabet: a tie never flatters
    pass@n   the chance that one of n samples is right: `1 - C(k - c, n) / C(k, n)`, c of k right
             (arXiv 2107.03374, eq. 1)

n = 1, 2, 4 .. up to k. Standard error: `s / sqrt(P)` over the P prompts, s their sample standard deviation (arXiv
2411.00640, section 2): what a bootstrap over prompts comes to. Guarantees:
1. only prompts with all k samples scored count, and each figure says how many: a prompt that failed or is missing is
   never a 0;
2. the order of prompts and of samples changes nothing but rounding in the last bits;
3. figures of no prompts are left out.

Names follow verl's (`val-core/<source>/reward/mean@k`, `.../best@n/mean`, `.../maj@k/mean`; smaller n and the parts of
the reward in `val-aux`), with two differences: best@n is exact, verl draws 1000 times with replacement; `se` is the
standard error over prompts, while verl's `std` is the spread between those draws.

Example: two prompts, k = 2, rewards (1, 0) and (0, 0).

>>> one, two = Outcome("gsm8k", (1.0, 0.0), ("4", "5")), Outcome("gsm8k", (0.0, 0.0), ("7", "7"))
>>> {name: round(value, 3) for name, value in figures([one, two], correct_above=0.5)["gsm8k"].items()}
{'mean@2': 0.25, 'mean@2/se': 0.25, 'best@2': 0.5, 'best@2/se': 0.5, 'maj@2': 0.0, 'maj@2/se': 0.0, 'pass@1': 0.25, \
'pass@1/se': 0.25, 'pass@2': 0.5, 'pass@2/se': 0.5}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from asyncrl.errors import ConfigError

ALL = "all"  # data source of the figures over all prompts
OWN = ("reward", "acc")  # variables of the figures; a part of this name, such as of a function `reward`, gets a prefix


class Outcome(msgspec.Struct, frozen=True):
    """One prompt with all samples scored. `parts`: parts of the reward by name, one value per sample that has it."""

    source: str
    rewards: tuple[float, ...]
    answers: tuple[str, ...]
    parts: dict[str, tuple[float, ...]] = {}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: `1 - C(n-c, k) / C(n, k)` (arXiv 2107.03374).

    Exact binomials, one division. `config.type` unless 0 <= c <= n and 1 <= k <= n.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 3, 2), pass_at_k(4, 0, 4)
    (0.5, 1.0, 0.0)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigError("config.type", f"pass@{k} of {n} samples with {c} right: wants 0 <= c <= n and 1 <= k <= n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def best_at_n(rewards: Sequence[float], n: int) -> float:
    """Expected largest of n rewards drawn without replacement. `config.type` unless 1 <= n <= their number.

    >>> best_at_n([0.0, 1.0, 0.5], 2)  # the pairs (0, 1), (0, 0.5), (1, 0.5)
    0.8333333333333334
    """
    ranked = sorted(rewards)
    if not 1 <= n <= len(ranked):
        raise ConfigError("config.type", f"best@{n} of {len(ranked)} samples")
    return sum(math.comb(place, n - 1) * reward for place, reward in enumerate(ranked)) / math.comb(len(ranked), n)


def majority(rewards: Sequence[float], answers: Sequence[str]) -> float:
    """Mean reward of the samples with the most frequent answer; ties: the lowest mean reward, then the alphabet.

    >>> majority([1.0, 0.0, 1.0], ["4", "5", "4"]), majority([1.0, 0.0], ["4", "5"])
    (1.0, 0.0)
    """
    by_answer: dict[str, list[float]] = {}
    for reward, answer in zip(rewards, answers, strict=True):
        by_answer.setdefault(answer, []).append(reward)
    return min((-len(mine), math.fsum(mine) / len(mine), answer) for answer, mine in by_answer.items())[1]


def sizes(k: int) -> list[int]:
    """1, 2, 4 .. below k, and k.

    >>> sizes(6), sizes(1)
    ([1, 2, 4, 6], [1])
    """
    return [*(2**power for power in range(k.bit_length()) if 2**power < k), k]


def figures(outcomes: Iterable[Outcome], *, correct_above: float) -> dict[str, dict[str, float]]:
    """Data source -> name -> value, and the same over all prompts under `all` if there are several sources.

    `correct_above`: a sample is correct if its reward is above it. All outcomes have the same number of samples.
    """
    every = list(outcomes)
    by_source: dict[str, list[Outcome]] = {}
    for outcome in every:
        by_source.setdefault(outcome.source, []).append(outcome)
    if len(by_source) > 1:
        by_source[ALL] = every
    return {source: _figures(mine, correct_above) for source, mine in sorted(by_source.items())}


def _figures(outcomes: Sequence[Outcome], correct_above: float) -> dict[str, float]:
    k = len(outcomes[0].rewards)
    found = _mean_with_error(f"mean@{k}", [math.fsum(one.rewards) / k for one in outcomes])
    for n in sizes(k)[1:]:
        found |= _mean_with_error(f"best@{n}", [best_at_n(one.rewards, n) for one in outcomes])
    if k > 1:
        found |= _mean_with_error(f"maj@{k}", [majority(one.rewards, one.answers) for one in outcomes])
    rights = [sum(reward > correct_above for reward in one.rewards) for one in outcomes]
    for n in sizes(k):
        found |= _mean_with_error(f"pass@{n}", [pass_at_k(k, right, n) for right in rights])
    for name in sorted({name for one in outcomes for name in one.parts}):
        values = [math.fsum(mine) / len(mine) for one in outcomes if (mine := one.parts.get(name))]
        found |= _mean_with_error(f"part:{name}/mean@{k}", values)
    return found


def _mean_with_error(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values), f"{name}/se": standard_error(values)}


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean: `sqrt(sum (x - mean)^2
    (P (P - 1)))`; 0 for a single value.

    >>> standard_error([0.0, 1.0]), standard_error([1.0])
    (0.5, 0.0)
    """
    count = len(values)
    if count < 2:
        return 0.0
    mean = math.fsum(values) / count
    # `hypot` does not overflow, unlike the square of a large reward
    return math.hypot(*(value - mean for value in values)) / math.sqrt(count * (count - 1))


def metric_names(found: Mapping[str, Mapping[str, float]], *, k: int) -> dict[str, float]:
    """The figures under flat names, as they stand in the metrics and in TensorBoard: no two figures share one.

    >>> found = {"mean@2": 0.5, "mean@2/se": 0.1, "best@2": 1.0, "pass@1": 0.5, "part:f/x/mean@2": 3.0}
    >>> metric_names({"a": found}, k=2)
    {'val-core/a/reward/mean@2': 0.5, 'val-aux/a/reward/mean@2/se': 0.1, 'val-core/a/reward/best@2/mean': 1.0, \
'val-aux/a/acc/pass@1/mean': 0.5, 'val-aux/a/f/x/mean@2': 3.0}
    """
    named = {}
    for source, mine in found.items():
        for name, value in mine.items():
            base, error = name.removesuffix("/se"), name.endswith("/se")
            part = base.startswith("part:")
            what, _, figure = base.removeprefix("part:").rpartition("/")
            what = f"part/{what}" if what.partition("/")[0] in OWN else what
            variable = what if part else "acc" if base.startswith("pass@") else "reward"
            core = not part and not error and figure.endswith(f"@{k}")
            mean = "/se" if error else "" if figure.startswith("mean@") else "/mean"
            named[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{figure}{mean}"] = value
    return named
