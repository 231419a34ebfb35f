"""Plugins of third parties, found by name: engines (`asyncrl.engine`), environments (`asyncrl.environment`), rewards,
prompt sources, trackers.

Guarantees:
1. a name is looked up in the built-in table first, then in the entry-point group; an unknown name is an error that
   lists the known ones;
2. 'module:name' and 'file.py:name' name a user's own part wherever a plugin has a name;
3. nothing heavy is imported before a plugin is needed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from asyncrl.errors import ConfigError

RewardFunction = Callable[..., Any]
#: 'module:name' or 'file.py:name'.
PLACE = re.compile(r"(?:[\w.]+|[^:]*\.py):[A-Za-z_][\w.]*")


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
        "openenv": "producers.environments.openenv:OpenEnvironment",
        "nemo_gym": "producers.environments.nemo_gym:NemoGym",
        "verifiers": "producers.environments.verifiers:VerifiersRollout",
        "agent": "producers.agents.environment:Agents",
    },
    "asyncrl.tools": {
        "calculator": "producers.tools.calculator:calculator",
        "python": "producers.tools.python:PythonTool",
        "shell": "producers.tools.python:ShellTool",
        "search": "producers.tools.search:SearchTool",
        "browser": "producers.tools.browser:BrowserTools",
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
        "callbacks": "learners.trackers.callbacks:Callbacks",
    },
}


def known_plugins(group: str) -> dict[str, str]:
    """Name -> 'module:name' of the plugins of a group: the built-in ones, then those that are installed."""
    return BUILT_IN.get(group, {}) | {point.name: point.value for point in entry_points(group=group)}


def is_place(name: str) -> bool:
    """Whether a name says where a user's own part is: 'module:name' or 'file.py:name'.

    >>> is_place("my_losses:mine"), is_place("losses/mine.py:mine"), is_place("gspo")
    (True, True, False)
    """
    return PLACE.fullmatch(name) is not None


def find(group: str, name: str) -> Any:
    """The plugin of that name in the group, or a user's own part. Raises `config.type` with the known names,
    `config.extra` if a part cannot be imported.
    """
    if is_place(name):
        return load_object(name, code="config.extra")
    known = known_plugins(group)
    if name not in known:
        own = "or your own, as 'module:name' or 'file.py:name'"
        raise ConfigError("config.type", f"{name!r} is not in {group}: one of {', '.join(sorted(known))}, {own}")
    return load_object(known[name], code="config.extra")


#: Modules that configurations of earlier versions name.
MOVED = {f"asyncrl.recipes.{name}": f"asyncrl.demo.{name}" for name in ("tasks", "calculator", "code")}


def load_object(dotted: str, *, code: str, where: str = "") -> Any:
    """The object behind 'module:name' or 'file.py:name'. Raises an error with `code` that says what is missing."""
    place, _, name = dotted.rpartition(":")
    try:
        found: Any = (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(MOVED.get(place, place))
        )
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(code, f"{dotted!r}: {error}", where=where) from error
    for part in name.split("."):
        if not hasattr(found, part):
            what = place if place.endswith(".py") else f"module {MOVED.get(place, place)}"
            raise ConfigError(code, f"{dotted!r}: {what} has no {part!r}", where=where)
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> ModuleType:
    """The module of a file, under a name of its own, with its folder at the end of the Python path."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"file_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # for imports of its neighbours
        try:
            spec.loader.exec_module(module)
        except BaseException:  # remove the incomplete module after any error
            del sys.modules[name]
            raise
    return sys.modules[name]
