"""`[trackers]`: destinations of a run's metrics in addition to its JSONL files.

Guarantees:
1. the configuration never holds a secret, because it is written to the run folder and to every checkpoint: the secret
   comes from the tracker's environment variable or from a file;
2. online trackers do not slow the run down: each runs in a separate process that reads the files
   (`learners.trackers.main`).

Example: `use = ["wandb"]`, `project = "my-model"`, `key_file = {wandb = "/home/me/.wandb-key"}`, `options = {wandb =
{entity = "team", tags = ["grpo"]}}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, field

from asyncrl.config.sections.base import Seconds, Section
from asyncrl.plugins import is_place

if TYPE_CHECKING:
    from asyncrl.net.http_access import Access

#: Built-in trackers: name -> their package, and the environment variable of their secret.
ONLINE: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "WANDB_API_KEY"),
    "mlflow": ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    "swanlab": ("swanlab", "SWANLAB_API_KEY"),
    "trackio": ("trackio", "HF_TOKEN"),
}


class TrackersConfig(Section, frozen=True):
    """`[trackers]`: destinations of metrics in addition to the JSONL files; TensorBoard is `log.tensorboard`."""

    use: tuple[str, ...] = ()  # wandb, mlflow, swanlab, trackio, callbacks, or your own: 'file.py:name'
    project: str = "asyncrl"  # project or experiment there; the run has the name run.name
    offline: bool = False  # send nothing: the data to send is in RUN/trackers
    every_s: Seconds = 2.0  # between two looks at the metrics
    key_file: dict[str, str] = field(default_factory=dict)  # tracker -> file with its secret; else its variable
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # tracker -> arguments of its library
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # metrics at http://HOST:PORT/metrics; 0: off
    prometheus_host: str = "127.0.0.1"  # beyond loopback (0.0.0.0: every interface) it needs prometheus_key_file
    prometheus_key_file: str = ""  # file with the key that Prometheus must send (its credentials_file); mode 600
    prometheus_cert_file: str = ""  # https: PEM file with a certificate and its private key; mode 600


def tracker_label(name: str) -> str:
    """The name of a tracker's process and files: of a place its last part.

    >>> tracker_label("wandb"), tracker_label("a/own_tracker.py:Lines")
    ('wandb', 'Lines')
    """
    return name.rpartition(":")[2].replace(".", "-") if is_place(name) else name


def secret_of(config: TrackersConfig, name: str) -> str:
    """The secret of `trackers.key_file`; empty without one. Raises OSError if the file cannot be read."""
    path = config.key_file.get(name, "")
    return Path(path).expanduser().read_text(encoding="utf-8").strip() if path else ""


def read_prometheus_access(config: TrackersConfig) -> Access:
    """The access to the metrics page. Raises `config.network`, `config.file` and `config.type`."""
    from asyncrl.net.http_access import read_access

    return read_access(
        config.prometheus_host,
        key_file=config.prometheus_key_file,
        cert_file=config.prometheus_cert_file,
        where="trackers.prometheus_",
    )
