"""One training step on this rank: proximal log-probs, loss, optimizer, metrics.

Called by `learners.loop` on every rank. Guarantees:
1. the three log-probs are kept apart: behaviour (recorded), proximal (weights at the start of the step), current;
2. with one mini-batch the proximal log-probs equal the current ones, so the training forward serves as both and no
   forward is spent on them; with more, they are computed before the first update;
3. losses use global denominators: the result does not depend on ranks, rows or micro-batches;
4. a mini-batch without trained tokens, or with a gradient that is not finite, changes no weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from asyncrl.config import AlgorithmConfig, LearnerConfig, OptimConfig
from learners.algorithms.aggregation import Denominators, aggregate
from learners.algorithms.corrections import correction_metrics, correction_sums, masked
from learners.algorithms.losses import LossInputs, LossSettings
from learners.algorithms.registry import loss_of
from learners.backends.base import Backend, LossFunction, Micro
from learners.batch import Minibatch
from learners.gang import Gang


class StepResult(NamedTuple):
    """Metrics of the step by catalogue name (equal on every rank), and how many updates were skipped."""

    metrics: dict[str, float]
    skipped: int


def learning_rate(optim: OptimConfig, *, step: int, steps: int) -> float:
    """The rate of step 1..steps: linear warm-up, then constant, linear or cosine down to 0 after the last step.

    Example: lr 1, warmup 2, linear, 6 steps: 0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    done = (step - optim.warmup_steps - 1) / max(steps - optim.warmup_steps, 1)
    if optim.schedule == "linear":
        return optim.lr * max(1 - done, 0.0)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def loss_function(
    algorithm: AlgorithmConfig, denominators: Denominators, proximal: Sequence[Tensor] | None
) -> LossFunction:
    """The loss of a micro-batch as a backend wants it. Without `proximal` the current log-probs, detached, serve."""
    token_loss = loss_of(algorithm.loss)
    cap = None if algorithm.tis_cap == "off" else float(algorithm.tis_cap)
    settings = LossSettings(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, cap=cap)

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        prox = logprobs.detach() if proximal is None else proximal[number]
        inputs = LossInputs(logprobs, prox, micro.behaviour, micro.advantages, micro.mask)
        result = token_loss(inputs, settings)

        def reduce(values: Tensor) -> Tensor:
            return aggregate(values, micro.mask, micro.sequences, mode=algorithm.aggregation, denominators=denominators)

        value = reduce(result.loss)
        if algorithm.entropy_coeff:
            value = value - algorithm.entropy_coeff * reduce(entropy)
        sums = correction_sums(prox, micro.behaviour, micro.mask, cap=cap)
        sums["clipped_sum"] = result.clipped.sum()
        sums["entropy_sum"] = masked(entropy.detach(), micro.mask).sum()
        return value, sums

    return loss


def train_step(
    share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig, step: int
) -> StepResult:
    """All optimizer steps of one batch. Collective."""
    algorithm = config.algorithm
    proximal: list[list[Tensor] | None] = [None] * len(share)
    if len(share) > 1:  # before the first update: afterwards the weights are no longer those of the step's start
        proximal = [backend.forward_logprobs(part.micro) for part in share]
    lr = learning_rate(config.optim, step=step, steps=config.steps)
    totals: dict[str, float] = {}
    tokens, updates, skipped, norm = 0, 0, 0, 0.0
    for part, prox in zip(share, proximal, strict=True):
        if part.tokens == 0:
            continue
        loss = loss_function(algorithm, Denominators(part.tokens, part.sequences), prox)
        for name, value in gang.total(backend.train(part.micro, loss)).items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value
        info = backend.step(lr=lr, max_norm=config.optim.max_grad_norm)
        tokens, updates, skipped = tokens + part.tokens, updates + 1, skipped + info.skipped
        norm = max(norm, info.grad_norm) if math.isfinite(info.grad_norm) else info.grad_norm
    if not updates:
        return StepResult({"lr": lr}, 0)
    return StepResult(_metrics(totals, tokens=tokens, updates=updates, lr=lr, norm=norm), skipped)


def _metrics(totals: dict[str, float], *, tokens: int, updates: int, lr: float, norm: float) -> dict[str, float]:
    """Means over the mini-batches (loss) and over the tokens of the batch (the rest); the largest gradient norm."""
    return {
        "loss": totals["loss"] / updates,
        "entropy": totals["entropy_sum"] / max(tokens, 1),
        "clip_share": totals["clipped_sum"] / max(tokens, 1),
        "grad_norm": norm,
        "lr": lr,
        **correction_metrics(totals, tokens),
    }
