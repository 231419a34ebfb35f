"""Plugins of third parties, found by name: engines (`asyncrl.engine`), environments (`asyncrl.environment`), rewards,
prompt sources, trackers.

Guarantees:
1. a name is looked up in the built-in table first, then in the entry-point group; an unknown name is an error that
   lists the known ones;
2. nothing heavy is imported before a plugin is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.errors import ConfigError

RewardFunction = Callable[..., Any]


class TrackerRun(msgspec.Struct, frozen=True):
    """Argument of a tracker's factory (entry-point group `asyncrl.trackers`)."""

    project: str
    name: str  # name of the run
    id: str  # constant for a run folder: a restarted tracker continues its run
    folder: Path  # folder for the tracker's own files; it exists
    config: dict[str, Any] = {}  # the resolved configuration
    options: dict[str, Any] = {}  # `trackers.options` of this tracker
    secret: str = ""  # from `trackers.key_file`; empty: the tracker's own variable
    offline: bool = False  # write only to this machine


class Tracker(Protocol):
    """Destination of metrics in addition to the JSONL files. Names are tags: `health/lag_mean`
    (`asyncrl.metrics.pages`).

    A step may be logged again after a restart of the tracker or the learner; the last values count. Each call may
    raise or take long: it runs in a separate process.
    """

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Log the numbers of one step; all are finite."""

    def close(self) -> None:
        """Flush and close."""


BUILT_IN: dict[str, dict[str, str]] = {
    "asyncrl.engines": {
        "hf": "producers.engines.hf.engine:HFEngine",
        "vllm": "producers.engines.vllm.engine:VLLMEngine",
        "vllm_http": "producers.engines.vllm.http_engine:VLLMHTTPEngine",
        "sglang": "producers.engines.sglang.engine:SGLangEngine",
        "dataset": "producers.engines.dataset:DatasetEngine",
    },
    "asyncrl.backends": {
        "fsdp2": "learners.backends.fsdp2.backend:FSDP2Backend",
        "megatron": "learners.backends.megatron.backend:MegatronBackend",
    },
    "asyncrl.environments": {
        "single_turn": "producers.environments.single_turn:SingleTurn",
        "chat": "producers.environments.scripted_chat:play",
        "tools": "producers.environments.tools:play",
        "gymnasium": "producers.environments.gymnasium:GymEnvironment",
        "verifiers": "producers.environments.verifiers:VerifiersRollout",
        "agent": "producers.agents.environment:Agents",
    },
    "asyncrl.tools": {
        "calculator": "producers.tools.calculator:calculator",
        "python": "producers.tools.python:PythonTool",
        "search": "producers.tools.search:SearchTool",
        "mcp": "producers.tools.mcp:MCPTools",
    },
    "asyncrl.tool_parsers": {
        "hermes": "producers.tools.parsers:hermes",
        "qwen3": "producers.tools.parsers:hermes",
        "json": "producers.tools.parsers:plain_json",
    },
    "asyncrl.trackers": {
        "tensorboard": "learners.trackers.tensorboard:TensorBoardTracker",
        "wandb": "learners.trackers.wandb:WandbTracker",
        "mlflow": "learners.trackers.mlflow:MlflowTracker",
        "swanlab": "learners.trackers.swanlab:SwanLabTracker",
        "trackio": "learners.trackers.trackio:TrackioTracker",
    },
}


def known_plugins(group: str) -> dict[str, str]:
    """Name -> 'module:name' of the plugins of a group: the built-in ones, then those that are installed."""
    return BUILT_IN.get(group, {}) | {point.name: point.value for point in entry_points(group=group)}


def find(group: str, name: str) -> Any:
    """The plugin of that name in the group. Raises `config.type` with the known names."""
    known = known_plugins(group)
    if name not in known:
        raise ConfigError("config.type", f"{name!r} is not in {group}: one of {', '.join(sorted(known))}")
    return load_object(known[name], code="config.extra")


#: Modules that configurations of earlier versions name.
MOVED = {f"asyncrl.recipes.{name}": f"asyncrl.demo.{name}" for name in ("tasks", "calculator", "code")}


def load_object(dotted: str, *, code: str, where: str = "") -> Any:
    """The object behind 'module:name'. Raises an error with `code` that says which half is missing."""
    module_name, _, name = dotted.partition(":")
    module_name = MOVED.get(module_name, module_name)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(code, f"{dotted!r}: {error}", where=where) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(code, f"{dotted!r}: module {module_name} has no {part!r}", where=where)
        found = getattr(found, part)
    return found
