"""Why the reward does not move: the likely cause, from the metrics of the last steps and the settings.

Pure functions. Example: 20 steps at reward 0.02 +- 0.01 with 92 % of the groups without a signal: "the reward has not
moved in 20 steps (0.02): 92% of the groups have one reward for all their samples; take easier prompts".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config import Config

STEPS = 20  # that have to pass
SOLVED = 0.95  # of the largest reward: nothing is left to move
FLAT_SHARE, CUT_SHARE = 0.7, 0.3
LOW_RATE = 1e-6
MOVES = 2.0  # standard errors


def flat_reward(lines: Sequence[Mapping[str, Any]], config: Config) -> str:
    """The likely cause, with a remedy; empty while the reward moves or after it has moved, or before `STEPS` steps.

    Args:
        lines: lines of the learner's metrics, one per step, oldest first. The last `STEPS` must be flat, and no other
            than the first ones.
        config: of the run.
    """
    if config.learner.mode != "rl" or (config.teacher and not config.reward):
        return ""
    earlier, lines = list(lines)[:-STEPS], list(lines)[-STEPS:]
    rewards, first = _values(lines, "reward_mean"), _values(earlier, "reward_mean")[: STEPS // 2]
    if len(rewards) < STEPS or not is_flat(rewards):
        return ""
    if len(first) > 1 and not is_flat([*first, *rewards[-len(first) :]]):
        return ""  # a plateau, after the reward has moved
    return f"the reward has not moved in {STEPS} steps ({statistics.fmean(rewards):.3g}): {_cause(lines, config)}"


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether the second half differs from the first by less than `MOVES` standard errors; a solved task is not flat.

    >>> is_flat([0.1, 0.12] * 10), is_flat([step / 20 for step in range(20)]), is_flat([1.0] * 20)
    (True, False, False)
    """
    half = len(rewards) // 2
    first, last = rewards[:half], rewards[half:]
    error = math.sqrt(statistics.variance(first) / half + statistics.variance(last) / (len(rewards) - half))
    gap = statistics.fmean(last) - statistics.fmean(first)
    return abs(gap) <= max(MOVES * error, 1e-9) and statistics.fmean(last) < SOLVED


def _cause(lines: Sequence[Mapping[str, Any]], config: Config) -> str:
    flat, cut = (_mean(lines, name) for name in ("zero_advantage_share", "truncated_share"))
    if cut >= CUT_SHARE and cut >= flat / 2:
        return f"{cut:.0%} of the answers are cut; raise sampling.max_new_tokens ({config.sampling.max_new_tokens})"
    if flat >= FLAT_SHARE:
        easier = "take easier prompts, or a larger sampling.group_size"
        return f"{flat:.0%} of the groups have one reward for all their samples; {easier}"
    rate = config.learner.optim.lr
    if rate <= LOW_RATE:
        return (
            f"learner.optim.lr = {rate:g} is for billions of parameters; smaller models and adapters take 1e-5 to 1e-4"
        )
    return "look at what is rewarded (`asyncrl samples RUN`), then at learner.optim.lr"


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = [line.get(name) for line in lines]
    return [float(value) for value in found if isinstance(value, int | float)]


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    values = _values(lines, name)
    return statistics.fmean(values) if values else 0.0
