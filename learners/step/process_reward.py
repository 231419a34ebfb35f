"""The process reward model in a training step (PRIME, arXiv 2502.01456): scores, loss and update.

Guarantees:
1. `update = "after"`, the paper's default (single forward): the weights at the start of the step score the batch, and
   the model is updated with the policy, both or neither;
2. `update = "before"` (double forward): the model is updated on the whole batch and then scores it. If the policy is
   not updated afterwards (a bad group, a probe), the model is restored, bit by bit;
3. the loss is the cross-entropy of `sigmoid(beta sum of log-ratios)` against right or wrong (`shaping.correct_above`),
   mean over the samples of the mini-batch with a trained token, over all ranks. Rows of a sample share its weight by
   their tokens.

Rank 0 computes scores and advantages in `learners.batch.estimates`.
Example: beta 0.05, log-ratios 1 and 3 of a right answer: logit 0.2, loss 0.598, counted as accurate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from asyncrl.config import LearnerConfig, ProcessRewardConfig
from learners.algorithms.aggregation import row_shares
from learners.algorithms.prime import outcome_losses
from learners.algorithms.tensors import masked
from learners.backends.base import Backend, LossFunction, Micro, ProcessRewardModel
from learners.batch.micro_batches import Minibatch
from learners.gang.gang import Gang
from learners.step.companions import CompanionStep
from learners.step.lr_schedule import learning_rate


class ProcessRewardStep(CompanionStep):
    """The process reward model during one step, on one rank. `reference`: log-probs `[N]` under its frozen model."""

    kind = "process reward"

    def __init__(
        self,
        model: ProcessRewardModel,
        share: Sequence[Minibatch],
        *,
        gang: Gang,
        config: ProcessRewardConfig,
        lr: float,
    ) -> None:
        super().__init__(model, gang=gang, max_norm=config.max_grad_norm, lr=lr)
        self.config = config
        self.reference = [model.reference_logprobs(part.micro) for part in share]
        self._model = model
        self._share = share
        self._done = False  # trained before it scored
        self._kept = False  # the policy was updated

    def score(self) -> tuple[str, list[list[Tensor]]]:
        """Return a failure, and log-probs `[N]` by mini-batch and micro-batch. Collective."""
        if self.config.update == "before":
            self._model.remember()
            for place, part in enumerate(self._share):
                why = super().gradients(part, place) if part.tokens else ""
                super().end(keep=not why)
                if why:
                    self._model.restore()
                    return why, []
            self._done = True
        return "", [self._model.forward(part.micro) for part in self._share]

    def loss(self, part: Minibatch, place: int) -> LossFunction:
        return loss_function(self.reference[place], part.sequences, self.config)

    def gradients(self, part: Minibatch, place: int) -> str:
        return "" if self._done else super().gradients(part, place)

    def end(self, *, keep: bool) -> None:
        self._kept = self._kept or keep
        if not self._done:
            super().end(keep=keep)

    def settle(self) -> None:
        """End the step: undo an early update if the policy was not updated."""
        if self._done and not self._kept:
            self._model.restore()
        self._model.release()

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        return {
            "process_loss": sums["loss"] / len(self._norms),
            "process_accuracy": sums["right_sum"] / max(sums["sequences_sum"], 1.0),
            "process_reward_mean": self.config.beta * sums["ratio_sum"] / max(sums["tokens_sum"], 1.0),
            "process_grad_norm": max(self._norms),
            "process_lr": self._lr,
        }


def process_step(
    share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig, step: int
) -> ProcessRewardStep | None:
    """Return the process reward model in this step; None if the run has none. Collective."""
    from learners.algorithms.registry import needs_for

    if "process" not in needs_for(config.algorithm) or backend.process_reward is None:
        return None
    settings = config.process_reward
    lr = learning_rate(settings, step=step, steps=config.steps)
    return ProcessRewardStep(backend.process_reward, share, gang=gang, config=settings, lr=lr)


def loss_function(reference: Sequence[Tensor], sequences: int, config: ProcessRewardConfig) -> LossFunction:
    """Return the cross-entropy for `Companion.train`; `sequences`: samples of the mini-batch on all ranks."""

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        q = masked(logprobs, micro.mask) - masked(reference[number], micro.mask)
        found = outcome_losses(q, micro.right, micro.mask, micro.sequences, beta=config.beta)
        agrees = ((found.logits > 0) == micro.right) & found.counted
        shares = row_shares(micro.mask, micro.sequences, micro.siblings)
        sums = {
            "right_sum": (agrees * shares).sum(),
            "sequences_sum": shares.sum(),
            "tokens_sum": micro.mask.sum(),
            "ratio_sum": q.detach().double().sum(),
        }
        return (found.loss * shares).sum() / max(sequences, 1), sums

    return loss
