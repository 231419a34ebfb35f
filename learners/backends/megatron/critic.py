"""The critic of the backend megatron: `learners.backends.fsdp2.companion.Critic`, split like the policy.

The value of a prefix is a number of the hidden state behind it. Every tensor place of the last stage has the head whole
and computes the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.runtime.model_folder import load_config
from learners.backends.base import LossFunction, Values, check_packing
from learners.backends.megatron.cpu_shim import cuda_stand_ins
from learners.backends.megatron.trained import Trained
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang


class Critic:
    def __init__(self, config: Config, gang: Gang) -> None:
        settings = config.learner.critic
        path = settings.model or config.model.path
        hf = load_hf(path, config, num_labels=1)
        self.exported, self._config, self._device = settings.export, config, gang.device
        self.trained = Trained(path, hf, config, gang, settings, prefix="critic/", scores=True)

    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        found = [one.numbers.logprobs for one in self.trained.run(micro)]
        counts = [piece.positions.size for piece in micro]
        return [Values(both[:count], both[count:]) for both, count in zip(found, counts, strict=True)]

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        return self.trained.train(micro, loss)

    def clip(self, max_norm: float) -> float:
        with cuda_stand_ins(self._device):
            return self.trained.optimizer.clip(max_norm)

    def apply(self, lr: float) -> None:
        with cuda_stand_ins(self._device):
            self.trained.optimizer.apply(lr)

    def discard(self) -> None:
        with cuda_stand_ins(self._device):
            self.trained.optimizer.forget()

    def take_overflows(self) -> int:
        return 0

    def self_check(self) -> None:
        rows, *singles = self.values(self.trained.toy_rows())
        for row, alone in zip(rows, zip(*singles, strict=True), strict=True):
            check_packing(row, alone, self._config.model.dtype, f"values of {self.trained.hf.model_type}")


def load_hf(path: str, config: Config, **more: Any) -> Any:
    """Return the config of a model folder.

    Raises:
        ConfigError: `config.model`: it cannot be read.
    """
    try:
        return load_config(path, trust_remote_code=config.model.trust_remote_code, **more)
    except (OSError, ValueError) as error:
        raise ConfigError("config.model", f"{path}: {error}") from error
