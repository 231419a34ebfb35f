"""`[trackers]`: where the metrics of a run go beside its JSONL files, which are always written.

Part of `asyncrl.config`. `problems` lists what contradicts the rest of the file. Guarantees:
1. a secret never stands in the configuration, which is written to the run folder and to every checkpoint: it comes from
   the tracker's own environment variable or from a file;
2. online trackers cost the run nothing: each has a process of its own that reads the files (`learners.trackers.main`).

Example: `use = ["wandb"]`, `project = "my-model"`, `key_file = {wandb = "/home/me/.wandb-key"}`,
`options = {wandb = {entity = "team", tags = ["grpo"]}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, field

from asyncrl.config.sections.base import Seconds, Section

if TYPE_CHECKING:
    from asyncrl.config import Config

#: Trackers that ship with the library: name -> their package, and the variable that holds their secret.
ONLINE: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "WANDB_API_KEY"),
    "mlflow": ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    "swanlab": ("swanlab", "SWANLAB_API_KEY"),
    "trackio": ("trackio", "HF_TOKEN"),
}
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


class TrackersConfig(Section, frozen=True):
    """`[trackers]`: metrics beside the JSONL files; TensorBoard is `log.tensorboard`."""

    use: tuple[str, ...] = ()  # wandb, mlflow, swanlab, trackio, or names of the entry-point group asyncrl.trackers
    project: str = "asyncrl"  # project or experiment there; the run is called run.name
    offline: bool = False  # nothing leaves this machine: what is to be sent lies in RUN/trackers
    every_s: Seconds = 2.0  # how often the files are looked at
    key_file: dict[str, str] = field(default_factory=dict)  # tracker -> file with its secret; else its own variable
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # tracker -> its own names, handed on as they are
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # metrics at http://127.0.0.1:PORT/metrics; 0: off


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    trackers = config.trackers
    if len(set(trackers.use)) < len(trackers.use):
        yield "config.conflict", f"trackers.use names one twice: {', '.join(trackers.use)}", ("trackers", "use")
    for name in trackers.use:
        if not re.fullmatch(r"[\w-]+", name) or name in ("tensorboard", "prometheus"):
            other = {"tensorboard": "log.tensorboard", "prometheus": "trackers.prometheus_port"}.get(name)
            what = f"{name} is not one of trackers.use" + (f": set {other}" if other else "")
            yield "config.type", what, ("trackers", "use")
    for key in ("key_file", "options"):
        for name in getattr(trackers, key):
            if name not in trackers.use:
                yield (
                    "config.conflict",
                    f"trackers.{key} names {name!r}, which is not in trackers.use",
                    ("trackers", key),
                )
    for name, options in trackers.options.items():
        for dotted in _secrets(options, name):
            variable = ONLINE.get(name, ("", "its variable"))[1]
            yield (
                "config.conflict",
                f"trackers.options.{dotted} looks like a secret, and this file is written to the "
                f"run folder: set {variable} or trackers.key_file",
                ("trackers", "options"),
            )


def _secrets(options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value, f"{prefix}.{key}")
        elif SECRET.search(key):
            yield f"{prefix}.{key}"


def secret_of(config: TrackersConfig, name: str) -> str:
    """The secret of `trackers.key_file`, empty without one. Raises OSError where the file cannot be read."""
    path = config.key_file.get(name, "")
    return Path(path).expanduser().read_text(encoding="utf-8").strip() if path else ""
