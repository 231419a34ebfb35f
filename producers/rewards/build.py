"""Makes the scorer of a judge from its settings."""

from __future__ import annotations

import os

from asyncrl.config import Config
from asyncrl.config.judges import Judge
from asyncrl.images.rows import takes_images
from producers.rewards.outcome import JudgeSettings, TeacherSettings
from producers.rewards.pipe import FunctionSpec, SandboxSpec
from producers.rewards.scorer import Scorer
from producers.sandbox import configured_limits


def half_of_memory() -> int:
    """Bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return 0


def make_scorer(config: Config, judge: Judge) -> Scorer:
    """The scorer of a judge. Only functions have a default memory limit, models have none."""
    functions = [
        FunctionSpec(item.function, item.label, item.weight, item.data_sources, item.args) for item in judge.rewards
    ]
    model = judge.table.is_model
    return Scorer(
        functions,
        prompt_key=config.data.prompt_key,
        timeout_s=judge.timeout_s,
        memory_bytes=judge.table.memory_bytes if model else judge.memory_bytes or half_of_memory(),
        max_processes=config.reward_workers.max_processes,
        sandbox=None if model else SandboxSpec(config.sandbox.kind, configured_limits(config.sandbox)),
        judge=judge_settings(config, judge) if model else None,
        env=judge.env,
    )


def judge_settings(config: Config, judge: Judge) -> JudgeSettings:
    """The settings for a judge that is a model."""
    dtype = config.model.dtype if judge.table.dtype == "auto" else judge.table.dtype
    return JudgeSettings(
        judge.table,
        judge.timeout_s,
        config.model.path,
        dtype,
        config.data.prompt_key,
        teacher_settings(config, judge),
        config.data.max_image_pixels,
    )


def teacher_settings(config: Config, judge: Judge) -> TeacherSettings | None:
    """What a teacher is asked; None for a judge that gives rewards."""
    if judge.teacher is None:
        return None
    asked = config.learner.distillation.asked_top_k
    sees = not judge.teacher.url and takes_images(judge.teacher.model)
    return TeacherSettings(judge.teacher.api, config.sampling.temperature, asked, judge.data_sources, sees)
