"""One TOML file for all roles: read, checked as a whole, frozen.

Sections are in `sections/`, the rules across them in `rules/`. A derived number is a property with its formula, never a
second setting. Nothing here imports a role, torch or redis; `asyncrl.preflight` checks the files that settings name.
"""

from asyncrl.config.loading import Loaded, all_keys, dump, find_conflicts, load, load_all, parse, redact, schema
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Section
from asyncrl.config.sections.buffer import BufferConfig
from asyncrl.config.sections.data import DataConfig, SamplingConfig
from asyncrl.config.sections.learner import (
    CompanionConfig,
    CriticConfig,
    LearnerConfig,
    MegatronConfig,
    OptimConfig,
    ParallelConfig,
    PreferenceConfig,
    ProcessRewardConfig,
)
from asyncrl.config.sections.model import ModelConfig
from asyncrl.config.sections.producers import ProducersConfig
from asyncrl.config.sections.reward import RewardFunctionConfig, RewardWorkersConfig
from asyncrl.config.sections.run import LogConfig, NetworkConfig, RunConfig
from asyncrl.config.sections.weightsync import WeightSyncConfig
from asyncrl.config.tree import Config

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "CompanionConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "LearnerConfig",
    "Loaded",
    "LogConfig",
    "MegatronConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "ParallelConfig",
    "PreferenceConfig",
    "ProcessRewardConfig",
    "ProducersConfig",
    "RewardFunctionConfig",
    "RewardWorkersConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "WeightSyncConfig",
    "all_keys",
    "dump",
    "find_conflicts",
    "load",
    "load_all",
    "parse",
    "redact",
    "schema",
]
