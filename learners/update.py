"""One training step on this rank: proximal log-probs, loss, optimizer, metrics.

Called by `learners.loop` on every rank. Guarantees:
1. the three log-probs are kept apart: behaviour (recorded), proximal (weights at the start of the step), current;
2. with one mini-batch the proximal log-probs equal the current ones, so the training forward serves as both and no
   forward is spent on them; with more, they are computed before the first update;
3. losses use global denominators: the result does not depend on ranks, rows or micro-batches;
4. a mini-batch without trained tokens, or with a gradient that is not finite, changes no weight;
5. a loss that raises or is not finite is seen by every rank before the weights change, and leaves no rank waiting in a
   collective: the others go on with a loss of zero until all have agreed.
With several mini-batches a loss that breaks only after the first update costs its mini-batch; nobody is blamed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig, LearnerConfig, OptimConfig
from learners.algorithms.aggregation import Denominators, aggregate
from learners.algorithms.corrections import correction_metrics, correction_sums, is_weights, masked
from learners.algorithms.losses import LossInputs, LossSettings
from learners.algorithms.registry import loss_of
from learners.backends.base import Backend, LossFunction, Micro, UpdateInfo, to_device
from learners.batch import MicroBatch, Minibatch
from learners.gang import Gang
from learners.poison import reason_of

_encode = msgspec.msgpack.Encoder().encode

#: Not the fault of a group: the machine has too little memory for the batch.
FATAL = (MemoryError, torch.OutOfMemoryError)


class StepResult(NamedTuple):
    """Metrics of the step by catalogue name (equal on every rank), and how many updates were skipped.

    `broken`: why, where a loss or gradient broke and no weight has changed: the step may be tried with fewer groups.
    """

    metrics: dict[str, float]
    skipped: int
    broken: str = ""
    weights: Mapping[int, float] = {}  # mean importance weight of a sample, by its place in the batch; on every rank


class SampleWeights:
    """Mean importance weights `min(exp(proximal - behaviour), cap)` by sample, for the log of the step."""

    def __init__(self) -> None:
        self._found: list[tuple[Sequence[int], Tensor]] = []

    def note(self, piece: MicroBatch, micro: Micro, weights: Tensor) -> None:
        """Keep the means over the trained tokens of each sequence, on the device."""
        count = len(piece.samples)
        sums = weights.new_zeros(count).index_add_(0, micro.sequences, weights)
        tokens = weights.new_zeros(count).index_add_(0, micro.sequences, micro.mask.to(weights.dtype))
        self._found.append((piece.samples.tolist(), sums / tokens.clamp(min=1)))

    def gathered(self, gang: Gang) -> dict[int, float]:
        """Those of all ranks. Collective."""
        mine = {number: value for numbers, means in self._found
                for number, value in zip(numbers, means.tolist(), strict=True)}  # fmt: skip
        parts = (msgspec.msgpack.decode(part, type=dict[int, float]) for part in gang.gather(_encode(mine)))
        return {number: value for part in parts for number, value in part.items()}


class Guard:
    """Keeps a loss that raises from ending one rank alone. `why` is empty while nothing was caught."""

    def __init__(self, loss: LossFunction) -> None:
        self.why = ""
        self._loss = loss

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro: Micro, number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        try:
            return self._loss(logprobs, entropy, micro, number)
        except FATAL:
            raise
        except Exception as error:  # a plugin's loss may raise anything; what it was is told to every rank
            self.why = self.why or reason_of("loss", error)
            return (logprobs * 0).sum() + (entropy * 0).sum(), {}


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
    algorithm: AlgorithmConfig, denominators: Denominators, proximal: Sequence[Tensor] | None,
    note: Callable[[int, Micro, Tensor], None] | None = None,
) -> LossFunction:  # fmt: skip
    """The loss of a micro-batch as a backend wants it. Without `proximal` the current log-probs, detached, serve.

    `note` is told the importance weights of each micro-batch by its number.
    """
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
        if note is not None:
            note(number, micro, is_weights(prox, micro.behaviour, micro.mask, upper=cap))
        sums["clipped_sum"] = result.clipped.sum()
        sums["entropy_sum"] = masked(entropy.detach(), micro.mask).sum()
        return value, sums

    return loss


def train_step(
    share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig, step: int
) -> StepResult:
    """All optimizer steps of one batch. Collective."""
    algorithm = config.algorithm
    lr = learning_rate(config.optim, step=step, steps=config.steps)
    proximal: list[list[Tensor] | None] = [None] * len(share)
    if len(share) > 1:  # before the first update: afterwards the weights are no longer those of the step's start
        proximal = [backend.forward_logprobs(part.micro) for part in share]
        if why := _rehearse(share, proximal, algorithm, gang):
            return StepResult({"lr": lr}, 1, why)
    totals: dict[str, float] = {}
    weights = SampleWeights()
    tokens, updates, skipped, norm = 0, 0, 0, 0.0
    for part, prox in zip(share, proximal, strict=True):
        if part.tokens == 0:
            continue
        sums, why = _gradients(part, prox, backend=backend, gang=gang, algorithm=algorithm, weights=weights)
        info = UpdateInfo(backend.discard(), True) if why else backend.step(lr=lr, max_norm=config.optim.max_grad_norm)
        if info.skipped and not updates:  # nothing has changed yet
            why = why or f"loss: the norm of the gradient is {info.grad_norm}"
            return StepResult({"lr": lr, "grad_norm": info.grad_norm}, 1, why)
        if info.skipped:
            skipped += 1
            continue
        for name, value in sums.items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value
        tokens, updates, norm = tokens + part.tokens, updates + 1, max(norm, info.grad_norm)
    if not updates:
        return StepResult({"lr": lr}, 1)
    metrics = _metrics(totals, tokens=tokens, updates=updates, lr=lr, norm=norm)
    return StepResult(metrics, skipped, weights=weights.gathered(gang))


def probe_step(share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig) -> str:
    """What breaks in the loss or the gradient of a batch, without an update; empty where nothing does. Collective."""
    for part in share:
        if part.tokens:
            _, why = _gradients(part, None, backend=backend, gang=gang, algorithm=config.algorithm)
            norm = backend.discard()
            if why or not math.isfinite(norm):
                return why or f"loss: the norm of the gradient is {norm}"
    return ""


def _gradients(
    part: Minibatch, proximal: Sequence[Tensor] | None, *, backend: Backend, gang: Gang, algorithm: AlgorithmConfig,
    weights: SampleWeights | None = None,
) -> tuple[dict[str, float], str]:  # fmt: skip
    """Forward and backward of one mini-batch: sums over ranks, and what broke on any of them."""
    found = weights or SampleWeights()

    def note(number: int, micro: Micro, values: Tensor) -> None:
        found.note(part.micro[number], micro, values)

    guard = Guard(loss_function(algorithm, Denominators(part.tokens, part.sequences), proximal, note))
    try:
        sums = backend.train(part.micro, guard)
    except FATAL:
        raise
    except Exception as error:
        if gang.size > 1:  # the others wait in a collective of the model: only a restart of the gang helps
            raise
        return {}, guard.why or reason_of("model", error)
    why = next(filter(None, (text.decode() for text in gang.gather(guard.why.encode()))), "")
    if why:
        return {}, why
    sums = gang.total(sums)
    return sums, "" if math.isfinite(sums["loss"]) else f"loss: its value is {sums['loss']}"


@torch.no_grad()
def _rehearse(
    share: Sequence[Minibatch], proximal: Sequence[Sequence[Tensor] | None], algorithm: AlgorithmConfig, gang: Gang
) -> str:
    """The losses of all mini-batches on the proximal log-probs, before the first of them changes the weights."""
    why = ""
    for part, prox in zip(share, proximal, strict=True):
        guard = Guard(loss_function(algorithm, Denominators(max(part.tokens, 1), max(part.sequences, 1)), None))
        for number, (piece, logprobs) in enumerate(zip(part.micro, prox or (), strict=True)):
            micro = to_device(piece, logprobs.device)
            value = float(guard(logprobs, torch.zeros_like(logprobs), micro, number)[0])
            why = why or guard.why or ("" if math.isfinite(value) else f"loss: its value is {value}")
    return next(filter(None, (text.decode() for text in gang.gather(why.encode()))), "")


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
