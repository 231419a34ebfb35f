"""The whole configuration: one struct with a field for each section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from asyncrl.config.sections.base import Section
from asyncrl.config.sections.buffer import BufferConfig
from asyncrl.config.sections.cluster import ClusterConfig
from asyncrl.config.sections.data import DataConfig, SamplingConfig
from asyncrl.config.sections.environment import EnvironmentConfig, RowEnvironmentConfig
from asyncrl.config.sections.evaluation import EvaluationConfig
from asyncrl.config.sections.learner import LearnerConfig
from asyncrl.config.sections.model import ModelConfig
from asyncrl.config.sections.producers import ProducersConfig
from asyncrl.config.sections.reward import JudgeConfig, RewardFunctionConfig, RewardWorkersConfig
from asyncrl.config.sections.run import LogConfig, NetworkConfig, RunConfig, ServiceConfig
from asyncrl.config.sections.sandbox import SandboxConfig
from asyncrl.config.sections.teacher import TeacherConfig
from asyncrl.config.sections.tracker import TrackersConfig
from asyncrl.config.sections.weightsync import WeightSyncConfig


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration file."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    producers: ProducersConfig = field(default_factory=ProducersConfig)
    reward: tuple[RewardFunctionConfig, ...] = ()
    reward_workers: RewardWorkersConfig = field(default_factory=RewardWorkersConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    weightsync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    log: LogConfig = field(default_factory=LogConfig)
    judge: tuple[JudgeConfig, ...] = ()
    teacher: tuple[TeacherConfig, ...] = ()
    row_environment: tuple[RowEnvironmentConfig, ...] = ()
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @property
    def total_groups(self) -> int:
        """learner.steps * buffer.batch_groups: groups that the whole run trains."""
        return self.learner.steps * self.buffer.batch_groups

    @property
    def longest_response(self) -> int:
        """The longest response that an engine must hold, in training and evaluations."""
        return max(self.sampling.max_new_tokens, self.evaluation.enabled * self.evaluation.max_new_tokens)

    @property
    def training_sampling(self) -> SamplingConfig:
        """`[sampling]` as producers use it: only mode rl trains on log-probs of draws, and needs their supports."""
        return self.sampling if self.learner.mode == "rl" else replace(self.sampling, truncation="biased")

    @property
    def held_out_prompts(self) -> int:
        """Held-out prompts that a producer may hold in addition to its training groups."""
        asked = self.sampling.asked_samples
        return self.evaluation.held_groups(training_samples=self.producers.groups_in_flight(asked) * asked)

    @property
    def held_out_slots(self) -> int:
        """Held-out samples that an engine decodes at once next to its `producers.slots`; 0 without second weights."""
        held = min(self.producers.slots, self.held_out_prompts * self.evaluation.samples)
        return held if self.evaluation.second_weights else 0

    @property
    def kept_sessions(self) -> int:
        """Ended turns, of the longest length, whose K and V engine `hf` keeps for the next turns of their sessions."""
        turns = any(not one.is_single_turn for one in self.environments)
        return self.producers.slots // 2 if turns and not self.learner.router_replay else 0

    @property
    def environments(self) -> tuple[EnvironmentConfig, ...]:
        """`[environment]`, then those that rows name."""
        return (self.environment, *self.row_environment)

    @property
    def environment_variables(self) -> tuple[str, ...]:
        """The variables that producers get in addition, for all environments."""
        return tuple(dict.fromkeys(name for one in self.environments for name in one.env))

    def environment_for(self, row: Mapping[str, Any]) -> EnvironmentConfig | None:
        """The environment of a row of the data; None if it names one that does not exist. Without a
        `[[row_environment]]` names are not read.
        """
        name = row.get("agent_name") if self.row_environment else None
        if not name:
            return self.environment
        return next((one for one in self.row_environment if one.agent_name == name), None)

    def replace_environment(self, environment: EnvironmentConfig) -> Config:
        """The configuration of a run whose rows all have this environment."""
        return replace(self, environment=environment, row_environment=())

    @property
    def cluster_name(self) -> str:
        """`cluster.name`, or `run.name` as DNS allows it: `My run_3` becomes `my-run-3`."""
        name = self.cluster.name or re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:40].strip("-")
        return name or "run"

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir)
