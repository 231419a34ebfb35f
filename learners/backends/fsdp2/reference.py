"""A frozen copy of the start weights, as reference for KL penalties, DPO and process rewards.

Guarantees:
1. it is the language model of `model.path` (or `path`) in the run's dtype, also after a restart; with
   `learner.preference.iteration` the policy at the start of the iteration;
2. it is sharded like the policy, has no gradients or optimizer state, and is in no export; it is in checkpoints only if
   it is renewed;
3. with `learner.reference_offload` its parameters lie in host memory between passes;
4. packing, chunks and (unless given) temperature are those of the policy: before the first update both give the same
   log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config
from learners.backends.base import extra_inputs, to_device
from learners.backends.fsdp2.loading import load_model, shard
from learners.backends.sharded_checkpoint import local_tensor
from learners.backends.vision import Vision
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang
from learners.models.policy_model import PolicyModel
from learners.models.score_model import ScoreModel

PREFIX = "reference/"  # of its tensors in a checkpoint


def waits_on_host(config: Config) -> bool:
    """Whether the reference model leaves the device between passes; with `cpu_offload` it is never there whole."""
    learner = config.learner
    return (learner.reference_offload or learner.offload_idle) and not learner.cpu_offload


class Reference:
    def __init__(self, config: Config, gang: Gang, *, path: str = "", temperature: float | None = None) -> None:
        self._device = gang.device
        self._vision = Vision.open(config)
        self._waits_on_host = waits_on_host(config)
        self._policy = PolicyModel(
            load_model(config, gang.device, path=path),
            temperature=config.sampling.temperature if temperature is None else temperature,
            chunk_tokens=config.learner.logprob_chunk_tokens,
        )
        self._policy.requires_grad_(False)
        self._units: list[Any] = shard(self._policy, config, gang)[0]
        self._policy.eval()

    @property
    def module(self) -> PolicyModel:
        return self._policy

    @torch.no_grad()
    def renew(self, policy: PolicyModel | ScoreModel) -> None:
        """Take the weights of a policy that is sharded in the same way and not gathered."""
        for mine, theirs in zip(self._policy.parameters(), policy.parameters(), strict=True):
            local_tensor(mine.data).copy_(local_tensor(theirs.data))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's weights by name."""
        return {PREFIX + name: parameter.data for name, parameter in self._policy.named_parameters()}

    @torch.no_grad()
    def logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs `[N]` of each micro-batch. Collective."""
        found = []
        if self._waits_on_host:
            self._policy.to(self._device.torch_device)
        for piece in micro:
            t = to_device(piece, self._device.torch_device, self._vision)
            found.append(
                self._policy(t.input_ids, t.position_ids, t.positions, t.targets, whole=False, **extra_inputs(t))[0]
            )
        for unit in self._units:
            unit.reshard()
        if self._waits_on_host:
            self._policy.to("cpu")
            self._device.empty_cache()
        return found
