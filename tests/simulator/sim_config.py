"""The configuration of a schedule: one file, read once, with what differs between schedules replaced."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from bare_config import BARE

from asyncrl.config import Config, RewardFunctionConfig, parse
from asyncrl.config.sections.reward import JudgeConfig

TOML = f"""{BARE}
lease_timeout_s = 4.0
max_poison_rate = 1.0
[run]
name = "sim"
dir = "/nonexistent/sim"
[reward_workers]
max_failed_groups = 1000
[network]
buffer = "tcp://127.0.0.1:1"
weightsync = "tcp://127.0.0.1:2"
"""


@lru_cache(maxsize=4096)
def config_of(
    *,
    group_size: int,
    batch: int,
    eta: int,
    depth: int,
    on_late: str,
    steps: int,
    reissue: int,
    max_reuse: int,
    judges: bool = False,
    chooses: bool = False,
) -> Config:
    """The configuration of a schedule."""
    config = _base()
    replace = msgspec.structs.replace
    if judges:
        more = RewardFunctionConfig(function="m:deep", judge="deep")
        config = replace(config, reward=(*config.reward, more), judge=(JudgeConfig("deep"),))
    return replace(
        config,
        data=replace(config.data, sampler="difficulty" if chooses else ""),
        sampling=replace(config.sampling, group_size=group_size),
        buffer=replace(
            config.buffer,
            batch_groups=batch,
            max_staleness=eta,
            pipeline_depth=depth,
            on_late=on_late,
            late_timeout_s=8.0,
            max_reissue=reissue,
            max_reuse=max_reuse,
        ),
        learner=replace(config.learner, steps=steps),
    )


@lru_cache(maxsize=1)
def _base() -> Config:
    return parse(TOML)
