"""From a judge's settings to its scorer. Called by `producers.rewards.main` and `producers.rewards.rescore`."""

from __future__ import annotations

import os

from asyncrl.config import Config
from asyncrl.judge_config import Judge
from producers.rewards.pipe import FunctionSpec
from producers.rewards.scorer import Scorer


def half_of_memory() -> int:
    """Bytes; 0 where the system does not say how much it has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return 0


def scorer_of(config: Config, judge: Judge) -> Scorer:
    """The child process with the functions of a judge and its limits; not started."""
    functions = [FunctionSpec(item.function, item.label, item.weight, item.data_sources) for item in judge.rewards]
    return Scorer(
        functions, prompt_key=config.data.prompt_key, timeout_s=judge.timeout_s,
        memory_bytes=judge.memory_bytes or half_of_memory(), max_processes=config.reward_workers.max_processes,
    )  # fmt: skip
