"""One training step on this rank: proximal log-probs, loss, optimizer, metrics.

Guarantees:
1. three log-probs are kept apart: behaviour (recorded), proximal (weights at the start of the step), current;
2. with one mini-batch the training forward also gives the proximal log-probs; with several they are computed before the
   first update;
3. losses use global denominators: the result does not depend on ranks, rows or micro-batches;
4. a mini-batch without trained tokens, or with a non-finite gradient, changes no weight;
5. every rank knows of a loss that raises or is not finite before the weights change, and no rank waits for it: the
   others continue with a loss of zero until all agree.

With several mini-batches, a loss that fails only after the first update loses its mini-batch, and no group is
quarantined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig, LearnerConfig
from asyncrl.config.sections.algorithm_catalogue import ROW_RATIOS
from asyncrl.config.sections.teacher import DistillationConfig
from learners.algorithms.aggregation import Denominators
from learners.algorithms.corrections import prox_loglinear
from learners.algorithms.kl import kl_importance_weighted
from learners.algorithms.loss_terms import measure_from_behaviour
from learners.algorithms.metrics import step_scale
from learners.algorithms.registry import chooser_for, correction_for, divergence_for, loss_for, reduction_for
from learners.algorithms.rejection import sequence_mask
from learners.algorithms.supervised import positive_lm
from learners.algorithms.tensors import masked, sequence_lengths
from learners.algorithms.types import Correction, LossInputs
from learners.backends.base import Backend, LossFunction, Micro, UpdateInfo, to_device
from learners.batch.micro_batches import Minibatch
from learners.batch.token_selection import choose_tokens
from learners.gang.gang import Gang
from learners.step.batch_passes import Pieces, Prepared
from learners.step.companions import Companions
from learners.step.correction_metrics import StepLog
from learners.step.critic import critic_step
from learners.step.guarded_backward import Guard, backward
from learners.step.lr_schedule import learning_rate
from learners.step.step_metrics import start_metrics, update_metrics
from learners.step.teaching import read_teacher

#: A number above every lag: `prox_loglinear` takes versions, a micro-batch has lags.
_NOW = 1 << 40


class StepResult(NamedTuple):
    """Metrics of the step by catalogue name (equal on every rank), and the number of skipped updates. `broken`: the
    failure of a loss or gradient before any weight changed; the step can be tried with fewer groups.
    """

    metrics: dict[str, float]
    skipped: int
    broken: str = ""
    weights: Mapping[int, float] = {}  # mean importance weight by place of the sample; on every rank
    log: StepLog | None = None  # sums of this rank's updates

    @property
    def is_empty(self) -> bool:
        """Whether the batch had no token to train: no pair of different rewards, or every answer was masked."""
        return bool(self.skipped) and not self.broken and "grad_norm" not in self.metrics

    @property
    def trouble(self) -> str:
        """Why an update was skipped."""
        return self.broken or (
            "nothing in the batch can be trained on" if self.is_empty else "a gradient is not finite"
        )


class Terms(NamedTuple):
    """Inputs of a mini-batch's loss from settings and forward passes, by micro-batch `[N]`; None: not used."""

    proximal: Sequence[Tensor] | None = None
    reference: Sequence[Tensor] | None = None
    advantages: Sequence[Tensor] | None = None
    corrections: Sequence[Correction] | None = None
    chosen: Sequence[Tensor] | None = None  # tokens that the loss selected over the whole mini-batch
    high: Sequence[Tensor] | None = None  # tokens that entropy_keep keeps in the policy loss
    entropy_coeff: float | None = None  # None: as in the settings
    kl_coeff: float = 0.0
    right: int = 0  # trained tokens of right answers in the mini-batch
    distillation: DistillationConfig = DistillationConfig()
    siblings: Sequence[Tensor] | None = None  # denominator kept: kept tokens in the other rows of each row's sample
    trained: Denominators | None = None  # denominator kept: counts of all trained tokens, for the other terms

    def get(self, number: int, name: str) -> Any:
        """Return the part of a micro-batch."""
        found = getattr(self, name)
        return None if found is None else found[number]


NO_TERMS = Terms()


def loss_function(
    algorithm: AlgorithmConfig, denominators: Denominators, terms: Terms = NO_TERMS, log: StepLog | None = None
) -> LossFunction:
    """Return the loss of a micro-batch for a backend, built from registry functions."""
    token_loss, correct = loss_for(algorithm), correction_for(algorithm)
    reduce, mean = reduction_for(algorithm, denominators), _mean_of_trained(algorithm, terms.trained or denominators)
    bonus = algorithm.entropy_coeff if terms.entropy_coeff is None else terms.entropy_coeff

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        proximal = proximal_logprobs(algorithm, logprobs, micro, terms.get(number, "proximal"))
        correction = terms.get(number, "corrections")
        if correction is None:
            correction = correct(proximal, micro.behaviour, micro.mask, micro.sequences)
        given = terms.get(number, "advantages")
        advantages = micro.advantages if given is None else given
        taught = read_teacher(terms.distillation, micro, logprobs, proximal, correction.weights)
        advantages = advantages if taught is None else advantages + taught.advantages
        keep = _policy_mask(micro, terms, number) & correction.keep
        if stale := algorithm.stale_negatives:
            keep &= sequence_mask(logprobs, micro.behaviour, advantages, micro.mask, micro.sequences, delta=stale)
        weights, chosen = correction.weights, terms.get(number, "chosen")
        inputs = LossInputs(logprobs, proximal, micro.behaviour, advantages, keep, micro.sequences, weights, chosen)
        if algorithm.clip_against == "behaviour":
            inputs = measure_from_behaviour(inputs, rows=algorithm.loss in ROW_RATIOS)
        result = token_loss(inputs)
        if algorithm.lag.weight != "off":
            # Scale the loss, not its weights: a loss may use these in the ratio of a row (VESPO), which has no age.
            scales = micro.scales[micro.sequences]
            result, weights = result._replace(loss=result.loss * scales), weights * scales

        siblings = terms.get(number, "siblings")
        value = reduce(
            result.loss,
            keep if algorithm.denominator == "kept" else micro.mask,
            micro.sequences,
            siblings=micro.siblings if siblings is None else siblings.to(micro.mask.device),
        )
        if bonus:
            value = value - bonus * mean(entropy, micro)
        sums = {"entropy_sum": masked(entropy.detach(), micro.mask).sum()}
        if terms.high is not None:
            sums["entropy_kept_sum"] = _policy_mask(micro, terms, number).sum()
        if algorithm.kl.where == "loss":
            reference = terms.get(number, "reference")
            divergence = kl_term(algorithm, logprobs, proximal, reference, micro.mask, weights=correction.weights)
            value = value + terms.kl_coeff * mean(divergence, micro)
            sums["kl_reference_sum"] = divergence.detach().sum()
        if taught is not None:
            value = value + mean(taught.loss, micro)
            sums |= taught.sums
        if algorithm.positive_coeff:
            right = micro.right[micro.sequences]
            value = value + positive_lm(logprobs, micro.mask, right, tokens=terms.right, coeff=algorithm.positive_coeff)
        if log is not None:
            ours = proximal if algorithm.proximal == "recompute" else logprobs
            used = correction._replace(weights=weights)
            log.note(number, micro, current=logprobs, proximal=proximal, learner=ours, correction=used, result=result)
        return value, sums

    return loss


def _mean_of_trained(algorithm: AlgorithmConfig, denominators: Denominators) -> Callable[[Tensor, Micro], Tensor]:
    """Return the reduction of terms that no rejection concerns: over all trained tokens."""
    reduce = reduction_for(algorithm, denominators)
    return lambda values, micro: reduce(values, micro.mask, micro.sequences, siblings=micro.siblings)


def _policy_mask(micro: Micro, terms: Terms, number: int) -> Tensor:
    """Return the tokens that the policy loss trains before rejection, bool `[N]`: all, or those of high entropy."""
    high = terms.get(number, "high")
    return micro.mask if high is None else micro.mask & high.to(micro.mask.device)


def proximal_logprobs(algorithm: AlgorithmConfig, current: Tensor, micro: Micro, known: Tensor | None) -> Tensor:
    """Return the log-probs of the proximal policy; without `known` the current ones, detached."""
    if algorithm.proximal == "behaviour":
        return micro.behaviour
    if algorithm.proximal == "loglinear":
        return prox_loglinear(micro.behaviour, current, _NOW - micro.lags, micro.mask, current_version=_NOW)
    return current.detach() if known is None else known


def kl_term(
    algorithm: AlgorithmConfig, current: Tensor, proximal: Tensor, reference: Tensor, mask: Tensor, *, weights: Tensor
) -> Tensor:
    """Return the estimate of the divergence at each token. `weights`: of the correction for old samples."""
    if algorithm.kl.importance_weighted:
        return kl_importance_weighted(current, proximal, reference, mask) * weights
    return divergence_for(algorithm.kl.kind)(current, reference, mask)


def train_step(
    share: Sequence[Minibatch],
    *,
    backend: Backend,
    gang: Gang,
    config: LearnerConfig,
    step: int,
    prepared: Prepared | None = None,
    critic_warm: bool = False,
) -> StepResult:
    """Run all optimizer steps of one batch with the results of `learners.step.batch_passes`. `critic_warm`: the
    critic's warm-up ended early. Collective.
    """
    algorithm, ready = config.algorithm, prepared or Prepared()
    lr = learning_rate(config.optim, step=step, steps=config.steps)
    if ready.broken:
        return StepResult({"lr": lr}, 1, ready.broken)
    if len(share) > 1 and ready.proximal is None and algorithm.proximal == "recompute":
        # Before the first update: afterwards the weights are no longer those of the step's start.
        ready = ready._replace(proximal=[backend.forward_logprobs(part.micro) for part in share])
    rate = learning_rate(config.critic, step=step, steps=config.steps)
    critic = critic_step(ready, backend=backend, gang=gang, config=config, lr=rate, step=step, warm=critic_warm)
    companions = Companions([part for part in (critic, ready.process) if part is not None])
    lr = 0.0 if companions.alone else lr
    if len(share) > 1 and (why := _rehearse(share, ready, algorithm, backend=backend, gang=gang)):
        return StepResult({"lr": lr}, 1, why)
    totals: dict[str, float] = {}
    log, kept = StepLog(), StepLog()
    tokens, updates, skipped, overflows, norm, scale = 0, 0, 0, 0, 0.0, 1.0
    for place, part in enumerate(share):
        if part.tokens == 0:
            continue
        log = StepLog(part)
        terms, counts = _terms(part, ready, place, config, backend=backend, gang=gang, seed=(step, place))
        sums, why = _gradients(part, terms, counts, backend=backend, gang=gang, algorithm=algorithm, log=log)
        if not why and algorithm.lag.step_scale == "sqrt_ess":
            scale = step_scale(log.metrics(gang)["ess_rows"])
        why = why or companions.gradients(part, place)
        if why or companions.alone:
            dropped = backend.discard()
            info = UpdateInfo(dropped, bool(why) or not math.isfinite(dropped))
        else:
            info = backend.step(lr=lr * scale, max_norm=config.optim.max_grad_norm)
        companions.end(keep=not info.skipped)
        if info.skipped and not updates:  # no weight has changed
            why = why or f"loss: the norm of the gradient is {info.grad_norm}"
            return StepResult({"lr": lr, "grad_norm": info.grad_norm}, 1, why)
        kept.join(log)
        overflows += info.overflows
        if info.skipped:
            skipped += 1
            continue
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
        tokens, updates, norm = tokens + part.tokens, updates + 1, max(norm, info.grad_norm)
    if not updates:
        return StepResult({"lr": lr}, 1)
    metrics = update_metrics(totals, tokens=tokens, updates=updates, lr=lr * scale, norm=norm) | kept.metrics(gang)
    metrics |= companions.metrics() | info._replace(overflows=overflows).scaling() | start_metrics(ready, algorithm)
    return StepResult(metrics, skipped, weights=kept.weights(gang), log=kept)


def _terms(
    part: Minibatch,
    ready: Prepared,
    place: int,
    config: LearnerConfig,
    *,
    backend: Backend,
    gang: Gang,
    seed: tuple[int, int],
) -> tuple[Terms, Denominators]:
    """Return the inputs of a mini-batch's loss and its denominators. Collective."""
    algorithm = config.algorithm

    def mine(pieces: Pieces | None) -> list[Tensor] | None:
        return None if pieces is None else pieces[place]

    terms = Terms(
        mine(ready.proximal),
        mine(ready.reference),
        mine(ready.advantages),
        kl_coeff=ready.kl_coeff,
        right=part.right,
        high=mine(ready.high),
        entropy_coeff=ready.entropy_coeff,
        distillation=config.distillation,
    )
    counts = Denominators(part.tokens, part.sequences)
    weights, keep = mine(ready.weights), mine(ready.keep)
    if weights is not None and keep is not None:
        pairs = zip(weights, keep, strict=True)
        terms = terms._replace(corrections=[Correction(weight, kept) for weight, kept in pairs])
    current: Sequence[Tensor] | None = None
    chooser = chooser_for(algorithm)
    if chooser is not None:
        current = backend.forward_logprobs(part.micro)  # at the weights of this update
        terms = terms._replace(chosen=choose_tokens(chooser, part, terms, current, algorithm, gang=gang, seed=seed))
    if algorithm.denominator == "kept":
        terms = terms._replace(trained=counts)
        counts, siblings = _count_kept(part, terms, algorithm, gang=gang)
        terms = terms._replace(siblings=siblings)
    return terms, counts


def _count_kept(
    part: Minibatch, terms: Terms, algorithm: AlgorithmConfig, *, gang: Gang
) -> tuple[Denominators, list[Tensor]]:
    """Count the tokens that the correction keeps, and samples with one, over all ranks. The tensors `[S]` count those
    in the other rows of each row's sample, by micro-batch. Collective.
    """
    correct, lengths, mine, total = correction_for(algorithm), list[Tensor](), Counter[int](), Counter[int]()
    for number, piece in enumerate(part.micro):
        known = terms.get(number, "proximal")
        device = torch.device("cpu") if known is None else known.device
        micro = to_device(piece, device)
        found = terms.get(number, "corrections")
        if found is None:
            proximal = micro.behaviour if known is None else known
            found = correct(proximal, micro.behaviour, micro.mask, micro.sequences)
        keep = _policy_mask(micro, terms, number) & found.keep.to(device)
        lengths.append(sequence_lengths(keep, micro.sequences, piece.owners.size).cpu())
        for owner, count in zip(piece.owners.tolist(), lengths[-1].tolist(), strict=True):
            mine[owner] += count
    for text in gang.gather_shares(msgspec.msgpack.encode(mine)):
        total.update(msgspec.msgpack.decode(text, type=dict[int, int]))
    every = [torch.tensor([total[owner] for owner in piece.owners.tolist()], dtype=torch.int64) for piece in part.micro]
    siblings = [whole - own for whole, own in zip(every, lengths, strict=True)]
    return Denominators(total.total(), sum(count > 0 for count in total.values())), siblings


def probe_step(
    share: Sequence[Minibatch],
    *,
    backend: Backend,
    gang: Gang,
    config: LearnerConfig,
    prepared: Prepared | None = None,
) -> str:
    """Return a failure of loss or gradient of a batch, without an update; empty if there is none. Collective."""
    ready = prepared or Prepared()
    if ready.broken:
        return ready.broken
    # The forward of the update also gives the proximal log-probs, as in the first mini-batch of a step.
    ready = ready._replace(proximal=None)
    critic = critic_step(ready, backend=backend, gang=gang, config=config, lr=0.0, step=0)
    companions = Companions([part for part in (critic, ready.process) if part is not None])
    for place, part in enumerate(share):
        if part.tokens:
            terms, counts = _terms(part, ready, place, config, backend=backend, gang=gang, seed=(0, place))
            _, why = _gradients(part, terms, counts, backend=backend, gang=gang, algorithm=config.algorithm)
            norm = backend.discard()
            why = why or companions.gradients(part, place)
            companions.end(keep=False)
            if why or not math.isfinite(norm):
                return why or f"loss: the norm of the gradient is {norm}"
    return ""


def _gradients(
    part: Minibatch,
    terms: Terms,
    counts: Denominators,
    *,
    backend: Backend,
    gang: Gang,
    algorithm: AlgorithmConfig,
    log: StepLog | None = None,
) -> tuple[dict[str, float], str]:
    """Forward and backward of one mini-batch: sums over ranks, and the failure on any rank."""
    return backward(backend.train, part.micro, loss_function(algorithm, counts, terms, log), gang=gang)


@torch.no_grad()
def _rehearse(
    share: Sequence[Minibatch], ready: Prepared, algorithm: AlgorithmConfig, *, backend: Backend, gang: Gang
) -> str:
    """Compute the losses of all mini-batches on the log-probs of the start, before the first update."""
    why = ""
    for place, part in enumerate(share):
        counts = Denominators(max(part.tokens, 1), max(part.sequences, 1))
        start = ready.proximal[place] if ready.proximal is not None else backend.forward_logprobs(part.micro)
        advantages = None if ready.advantages is None else ready.advantages[place]
        reference = None if ready.reference is None else ready.reference[place]
        guard = Guard(loss_function(algorithm, counts, Terms(advantages=advantages, reference=reference)))
        for number, (piece, logprobs) in enumerate(zip(part.micro, start, strict=True)):
            micro = to_device(piece, logprobs.device)
            value = float(guard(logprobs, torch.zeros_like(logprobs), micro, number)[0])
            why = why or guard.why or ("" if math.isfinite(value) else f"loss: its value is {value}")
    return next(filter(None, (text.decode() for text in gang.gather(why.encode()))), "")
