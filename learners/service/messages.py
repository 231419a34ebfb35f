"""JSON bodies of the Tinker API that change or save a model, and the places of their files.

Example: `save_weights` named "a" of the model "s-1:train:0" gets the path `tinker://s-1:train:0/weights/a` and the
folder `service/weights/s-1:train:0/weights/a` of the run.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from learners.service.protocol import BadRequest

MODEL_ID = re.compile(r"(s-[0-9a-f]{16}):train:(\d{1,9})")
_PATH = re.compile(rf"tinker://({MODEL_ID.pattern})/(weights|sampler_weights)/([A-Za-z0-9][\w.-]{{0,127}})")


class WeightsPath(NamedTuple):
    model_id: str
    kind: str  # weights, or sampler_weights: without an optimizer
    name: str

    @property
    def text(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def parse_weights_path(text: str) -> WeightsPath:
    """Raises `BadRequest` for another form of path."""
    match = _PATH.fullmatch(text)
    if match is None:
        raise BadRequest(f"{text!r} is no path of this service: tinker://MODEL/weights/NAME, or sampler_weights")
    return WeightsPath(match[1], match[4], match[5])


class ServicePaths:
    """Files of a service, in its run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "service"
        self.log = self.folder / "requests.sqlite"
        self.key = self.folder / "api.key"
        self.config = self.folder / "config.toml"
        self.trainer_log = self.folder / "trainer.log"
        self.models = self.folder / "models"
        self._weights = self.folder / "weights"

    def weights_folder(self, path: WeightsPath) -> Path:
        return self._weights / path.model_id / path.kind / path.name


def seed_for(name: str) -> int:
    """A seed for a request that has none: the same after a restart."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


class AdapterForm(msgspec.Struct, frozen=True):
    """`lora_config`: what a client chooses when it makes a model."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: AdapterForm | None = None
    optimizer_config: dict[str, Any] = {}  # empty: adamw

    def check(self) -> None:
        """Raise `BadRequest` for what is not served."""
        if self.lora_config is None:
            raise BadRequest("lora_config is missing: this service trains adapters alone")
        if not 1 <= self.lora_config.rank <= 4096:
            raise BadRequest(f"rank {self.lora_config.rank}: 1 to 4096 are served")
        if self.optimizer_config.get("type", "adamw") != "adamw":
            raise BadRequest(f"optimizer {self.optimizer_config.get('type')!r} is not served; there is adamw")

    def form(self, seed: int) -> AdapterForm:
        """`seed`: without one of the client's own."""
        self.check()
        assert self.lora_config is not None
        return self.lora_config if self.lora_config.seed is not None else replace(self.lora_config, seed=seed)


class LoadWeights(msgspec.Struct, frozen=True):
    """Into the model `model_id`, or with `session_id` into a new one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None


class AdamParams(msgspec.Struct, frozen=True):
    """Hyperparameters of a step, with the client's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no clipping


class OptimStep(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None  # None: another optimizer


class SaveWeights(msgspec.Struct, frozen=True):
    """Body of save_weights and save_weights_for_sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"

    def weights_path(self, model_id: str, seq: int, *, trains: bool) -> WeightsPath:
        """Where they go. Raises `BadRequest` for a name that is no word, and for mutable weights."""
        if self.kind != "snapshot":
            raise BadRequest(f"kind {self.kind!r} is not served; there is 'snapshot'")
        name = f"request-{seq}" if self.path is None else self.path
        return parse_weights_path(WeightsPath(model_id, "weights" if trains else "sampler_weights", name).text)
