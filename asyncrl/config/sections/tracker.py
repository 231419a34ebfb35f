"""`[trackers]`: where the metrics of a run go beside its JSONL files, which are always written.

Part of `asyncrl.config`. `problems` lists what contradicts the rest of the file. Guarantees:
1. a secret never stands in the configuration, which is written to the run folder and to every checkpoint: it comes from
   the tracker's own environment variable or from a file;
2. online trackers cost the run nothing: each has a process of its own that reads the files (`learners.trackers.main`).

Example: `use = ["wandb"]`, `project = "my-model"`, `key_file = {wandb = "/home/me/.wandb-key"}`,
`options = {wandb = {entity = "team", tags = ["grpo"]}}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field

from asyncrl.config.sections.base import Seconds, Section

#: Trackers that ship with the library: name -> their package, and the variable that holds their secret.
ONLINE: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "WANDB_API_KEY"),
    "mlflow": ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    "swanlab": ("swanlab", "SWANLAB_API_KEY"),
    "trackio": ("trackio", "HF_TOKEN"),
}


class TrackersConfig(Section, frozen=True):
    """`[trackers]`: metrics beside the JSONL files; TensorBoard is `log.tensorboard`."""

    use: tuple[str, ...] = ()  # wandb, mlflow, swanlab, trackio, or names of the entry-point group asyncrl.trackers
    project: str = "asyncrl"  # project or experiment there; the run is called run.name
    offline: bool = False  # nothing leaves this machine: what is to be sent lies in RUN/trackers
    every_s: Seconds = 2.0  # how often the files are looked at
    key_file: dict[str, str] = field(default_factory=dict)  # tracker -> file with its secret; else its own variable
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # tracker -> its own names, handed on as they are
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # metrics at http://127.0.0.1:PORT/metrics; 0: off


def secret_of(config: TrackersConfig, name: str) -> str:
    """The secret of `trackers.key_file`, empty without one. Raises OSError where the file cannot be read."""
    path = config.key_file.get(name, "")
    return Path(path).expanduser().read_text(encoding="utf-8").strip() if path else ""
