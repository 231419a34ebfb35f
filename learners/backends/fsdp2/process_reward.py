"""The process reward model of PRIME (arXiv 2502.01456): a language model next to the policy, and its frozen reference.

Guarantees:
1. it starts as `learner.process_reward.model` (by default the policy's start weights);
2. its reference is `learner.process_reward.reference` (by default its own start weights), also after a restart. If that
   is `model.path`, the run's reference model is used;
3. both give log-probs at temperature 1: before the first update they are equal, and all process rewards are 0;
4. packed rows are compared with single sequences at the start, as for the policy;
5. its export is a language model, which loads again as `learner.process_reward.model`.

`learners.algorithms.prime` computes process rewards.
Example: log-prob -1 here and -2 under the reference, beta 0.05: process reward 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from asyncrl.config import Config
from learners.backends.fsdp2.companion import Companion
from learners.backends.fsdp2.reference import Reference
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang
from learners.models.policy_model import PolicyModel

PREFIX = "process_reward/"
TEMPERATURE = 1.0

Logprobs = Callable[[Sequence[MicroBatch]], list[Tensor]]


class ProcessRewardModel(Companion):
    """One rank's part. `reference`: log-probs of the run's reference model."""

    def __init__(self, config: Config, gang: Gang, *, reference: Logprobs) -> None:
        from learners.backends.fsdp2.loading import load_model

        settings = config.learner.process_reward
        start = settings.model or config.model.path
        model = PolicyModel(
            load_model(config, gang.device, path=start),
            temperature=TEMPERATURE,
            chunk_tokens=config.learner.logprob_chunk_tokens,
        )
        super().__init__(model, settings, config, gang, prefix=PREFIX)
        frozen = settings.reference or start
        same = Path(frozen).resolve() == Path(config.model.path).resolve()
        self.reference_logprobs: Logprobs = reference
        if not same or config.sampling.temperature != TEMPERATURE:
            self.reference_logprobs = Reference(config, gang, path=frozen, temperature=TEMPERATURE).logprobs


def wants_process_rewards(config: Config) -> bool:
    """Whether the estimator needs process rewards."""
    if config.learner.mode != "rl":
        return False
    from learners.algorithms.registry import needs_for

    return "process" in needs_for(config.learner.algorithm)
