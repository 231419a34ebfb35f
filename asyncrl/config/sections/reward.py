"""`[[reward]]` and `[reward_workers]`: reward functions, and the processes that score.

`function` names a reward in one of four ways:

    my_rewards:exact                a module on the Python path, and a name in it
    rewards/gsm8k.py:compute_score  a file, from the folder of the launch, and a name in it
    builtin:gsm8k                   a scorer that ships (docs/rewards.md)
    http://host:5000/get_reward     a server that answers POST {"query", "prompts", "labels"} with {"rewards"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

Kind = Literal["module", "file", "builtin", "url", ""]
FORMS = "'module:name', 'path/file.py:name', 'builtin:name' or an http address"


def reward_kind(function: str) -> Kind:
    """Which of the four ways it is; empty: none."""
    if function.startswith(("http://", "https://")):
        return "url" if urlsplit(function).hostname else ""
    if re.fullmatch(r"builtin:\w+", function):
        return "builtin"
    if re.fullmatch(r"[^:]*\.py:[\w.]+", function):
        return "file"
    return "module" if re.fullmatch(r"[\w.]+:[\w.]+", function) else ""


def reward_label(function: str) -> str:
    """A short name for metrics: the part after the colon; for an address its last part, or its host."""
    if reward_kind(function) != "url":
        return function.rpartition(":")[2]
    address = urlsplit(function)
    return address.path.rstrip("/").rpartition("/")[2] or address.hostname or function


class RewardFunctionConfig(Section, frozen=True):
    """`[[reward]]`: one reward function; several are summed by weight."""

    function: str = ""  # module:name, path/file.py:name, builtin:name, an address; empty if its judge is a model
    name: str = ""  # empty: the function's name, or the judge's
    weight: float = 1.0  # factor in the sum
    data_sources: tuple[str, ...] = ()  # score only rows of these; empty: all
    judge: str = ""  # name of the [[judge]] whose workers score it; empty: reward_workers
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function, class or scorer

    @classmethod
    def also_required(cls, tree: Mapping[str, Any]) -> tuple[str, ...]:
        """Without a judge, which may be a model, a function is required."""
        return () if "judge" in tree else ("function",)

    @property
    def label(self) -> str:
        """The name in metrics: `name`, or the last part of `function`, or the judge's name."""
        return self.name or reward_label(self.function) or self.judge


class RewardWorkersConfig(Section, frozen=True):
    """`[reward_workers]`: processes that score."""

    count: Positive = 1  # processes on this host
    timeout_s: Seconds = 30.0  # time limit of one call
    retries: Count = 2  # on other workers; then the group is quarantined with the reason
    batch_samples: Positive = 64  # samples leased at once
    memory_bytes: Count = 0  # limit of one process that runs functions; 0: half of the machine's memory
    max_processes: Positive = 512  # processes that the functions of one worker may start; more fails the sample
    max_failed_groups: Count = 64  # failed groups of the run, each by rewards, filters or environments; then it ends
    restarts: Count = 5  # in 10 minutes
