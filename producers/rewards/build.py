"""Makes the scorer of a judge from its settings."""

from __future__ import annotations

import os

from asyncrl.config import Config
from asyncrl.config.judges import Judge
from asyncrl.config.sections.run import SandboxConfig
from producers.rewards.outcome import JudgeSettings
from producers.rewards.pipe import FunctionSpec, SandboxSpec
from producers.rewards.scorer import Scorer
from producers.sandbox import SandboxLimits


def half_of_memory() -> int:
    """Bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return 0


def sandbox_spec(config: SandboxConfig) -> SandboxSpec:
    """The settings of `[sandbox]` for the child."""
    limits = SandboxLimits(
        timeout_s=config.timeout_s,
        memory_bytes=config.memory_bytes,
        output_bytes=config.output_bytes,
        disk_bytes=config.disk_bytes,
        max_processes=config.max_processes,
        paths=config.paths,
    )
    return SandboxSpec(config.kind, limits)


def make_scorer(config: Config, judge: Judge) -> Scorer:
    """The scorer of a judge. Only functions have a default memory limit, models have none."""
    functions = [
        FunctionSpec(item.function, item.label, item.weight, item.data_sources, item.args) for item in judge.rewards
    ]
    limits = config.reward_workers
    if not judge.table.is_model:
        return Scorer(
            functions,
            prompt_key=config.data.prompt_key,
            timeout_s=judge.timeout_s,
            memory_bytes=judge.memory_bytes or half_of_memory(),
            max_processes=limits.max_processes,
            sandbox=sandbox_spec(config.sandbox),
        )
    return Scorer(
        functions,
        prompt_key=config.data.prompt_key,
        timeout_s=judge.timeout_s,
        memory_bytes=judge.table.memory_bytes,
        max_processes=limits.max_processes,
        judge=judge_settings(config, judge),
    )


def judge_settings(config: Config, judge: Judge) -> JudgeSettings:
    """The settings for a judge that is a model."""
    dtype = config.model.dtype if judge.table.dtype == "auto" else judge.table.dtype
    return JudgeSettings(judge.table, judge.timeout_s, config.model.path, dtype, config.data.prompt_key)
