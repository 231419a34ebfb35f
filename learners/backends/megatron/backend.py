"""Training with Megatron-core: matrices split over tensor places, layers over pipeline stages, batches over shares.

Guarantees, in addition to those of `learners.backends.base`:
1. master weights and optimizer states are float32 and divided over the shares; compute runs in `model.dtype`; gradients
   are summed in float32;
2. this backend runs the pipeline schedule: `train` gets micro-batches and a loss and runs them through all stages;
3. every rank has log-probs, losses and metrics: the last stage computes them with gradients and sends its numbers to
   the other stages, which run the loss on them;
4. packed rows are compared with single sequences at the start (`self_check`);
5. checkpoints load in any other layout, also on one rank, and in the backend fsdp2; its checkpoints load here.

Without CUDA, Megatron-core runs with stand-ins (`cpu_shim`). Process reward models, reward models and context
parallelism are not supported.
Example: 4 ranks, tensor = 2, pipeline = 2: one share; ranks 2 and 3 compute the losses, rank 2's sums count, rank 0
publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.runtime.model_folder import load_generation_config
from learners.algorithms.registry import needs_for
from learners.backends.base import (
    DTYPES,
    LossFunction,
    Snapshot,
    UpdateInfo,
    WeightSpec,
    check_packing,
    published_dtype,
    published_specs,
)
from learners.backends.megatron import model as models
from learners.backends.megatron.checkpoint import Store, host_shard
from learners.backends.megatron.cpu_shim import cuda_stand_ins
from learners.backends.megatron.critic import Critic, load_hf
from learners.backends.megatron.trained import Trained
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang, waiting_s
from learners.models.logprobs import TokenNumbers
from learners.models.policy_model import check_head
from weightsync.encoding.quantised import quantise_all


class MegatronBackend:
    supports = True
    process_reward = None
    adapters = None  # all weights are trained

    def __init__(self, config: Config, gang: Gang) -> None:
        self._config, self._gang, self._device, place = config, gang, gang.device, gang.topology
        models.require()
        models.refuse(config, place, self._device)
        path = config.model.path
        hf = load_hf(path, config)
        generation = Path(path) / "generation_config.json"
        self._generation = load_generation_config(path) if generation.exists() else None
        check_head(hf)
        self._sent_name, self._sent_dtype = DTYPES[published_dtype(config)]
        self._reference: Any = None  # created on first use
        with cuda_stand_ins(self._device), gang.meeting():
            minutes = math.ceil(waiting_s(config) / 60)
            models.join_groups(place, seed=config.run.seed + models.SEED_OFFSET, minutes=minutes)
        self._policy = Trained(path, hf, config, gang, config.learner.optim)
        needs = set(needs_for(config.learner.algorithm)) if config.learner.mode == "rl" else set()
        self.critic = Critic(config, gang) if needs & {"critic", "values"} else None

    # ------------------------------------------------------------ forward and backward

    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        return [found.numbers.logprobs for found in self._policy.run(micro)]

    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        return [found.numbers for found in self._policy.run(micro, squares=squares)]

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        if self._reference is None:
            self._reference = self._policy.freeze_start()
        return [found.numbers.logprobs for found in self._policy.run(micro, frozen=self._reference)]

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        return self._policy.train(micro, loss)

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        with cuda_stand_ins(self._device):
            return self._policy.optimizer.step(lr=lr, max_norm=max_norm)

    def discard(self) -> float:
        with cuda_stand_ins(self._device):
            return self._policy.optimizer.discard()

    def self_check(self) -> None:
        """Compare three toy sequences in one row (or padded rows) with each alone, through all stages."""
        rows, *singles = self.forward_logprobs(self._policy.toy_rows())
        check_packing(rows, singles, self._config.model.dtype, f"log-probs of {self._policy.hf.model_type}")
        if self.critic is not None:
            self.critic.self_check()

    # ------------------------------------------------------------ weights out

    def weight_specs(self) -> list[WeightSpec]:
        """First what is outside the layers, then layer by layer, experts one by one: the order of fsdp2."""
        sources = self._policy.sources(unstack=True)
        found = [WeightSpec(name, self._sent_name, some[0].part.shape) for name, some in sources.items()]
        return published_specs(found, self._config)

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield name and bytes in the order of `weight_specs` on rank 0. Nothing is lent."""
        named, kind = self._policy.export(self._sent_dtype, unstack=True), self._config.weightsync.quantised
        for name, whole in quantise_all(named, kind) if kind else named:
            yield name, whole.view(-1).view(torch.uint8).numpy()

    def export_hf(self, folder: Path) -> None:
        self._policy.write(folder, self._generation)
        if self.critic is not None and self.critic.exported:
            self.critic.trained.write(folder / "critic")

    # ------------------------------------------------------------ checkpoints

    def _models(self) -> list[Trained]:
        return [self._policy] if self.critic is None else [self._policy, self.critic.trained]

    def save(self, folder: Path) -> Path:
        """Write one safetensors file per rank: its part of weights and states, and its generator states."""
        return self.snapshot().save(folder)

    def snapshot(self) -> Snapshot:
        self._device.synchronize()
        boxes, steps = [], dict[str, Tensor]()
        for trained in self._models():
            more, counts = trained.boxes()
            boxes += more
            steps |= counts
        return host_shard(boxes, rank=self._gang.rank, extra=self._device.rng_state(), steps=steps)

    def load(self, folder: Path) -> None:
        """Load from the files of any layout; generator states if the number of ranks is the same."""
        store = Store(folder)
        try:
            for trained in self._models():
                trained.load(store)
            extra = store.extra(rank=self._gang.rank, ranks=self._gang.size)
        finally:
            store.close()
        if extra:
            self._device.set_rng_state(extra)
