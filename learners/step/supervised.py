"""Training on given answers: the modes sft, dpo, kto and reward_model.

Guarantees:
1. denominators cover the whole mini-batch over all ranks: tokens (sft), answers (kto) or pairs (dpo, reward_model).
   The result does not depend on ranks, rows or micro-batches;
2. the two answers of a pair lie in one micro-batch, the chosen one (higher reward) first. Of more than two samples the
   first of the best and the first of the worst make the pair. A group with equal rewards is left out;
3. the reference of DPO and KTO is a frozen, sharded copy of the start weights. Cached log-probs would save its forward
   pass, but would be wrong without notice after a change of model, tokenizer, dtype or packing;
4. a loss that raises or is not finite changes no weight, and every rank knows it (as in `learners.step.update`);
5. the KL of KTO is the mean over the whole mini-batch, of every prompt with the answer of the row before it.

Example: log-probs sum to -3 (chosen) and -5 (rejected), the reference gives -4 and -4: the log-ratios are 1 and -1, and
with beta 0.1 the loss is -log sigmoid(0.1 * 2) = 0.5981.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from asyncrl.config import LearnerConfig, PreferenceConfig
from learners.algorithms.preference import PairLoss, bradley_terry, dpo, kto, orpo, simpo
from learners.algorithms.supervised import sft
from learners.algorithms.tensors import masked, sequence_lengths, sequence_sums
from learners.backends.base import Backend, LossFunction, Micro, UpdateInfo
from learners.batch.assembly import images_in, statistics
from learners.batch.micro_batches import (
    MicroBatch,
    Minibatch,
    Sample,
    StepBatch,
    balance,
    pack,
    packed_row,
    pad,
    padded_rows,
)
from learners.gang.gang import Gang
from learners.step.guarded_backward import backward
from learners.step.lr_schedule import learning_rate
from learners.step.update import StepResult

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData

PAIRED = frozenset({"dpo", "reward_model"})

# ---------------------------------------------------------------- from a batch to rows


def assemble(batch: ClaimedBatch, learner: LearnerConfig, *, ranks: int) -> StepBatch:
    """Return mini-batches (whole groups, in batch order) and rows for every rank."""
    paired = learner.mode in PAIRED
    kept: list[list[Sample]] = []
    place = 0
    for group in batch.groups:
        numbered = list(zip(range(place, place + len(group.samples)), group.samples, strict=True))
        place += len(group.samples)
        if paired:
            unit = _pair(group, numbered, learner.preference.margin_key)
            made = [unit] if unit else []
        else:
            made = [[_sample(group, sample, number)] for number, sample in numbered]
        images = images_in(batch, group)
        kept += [[replace(one, images=images) for one in unit] for unit in made]
    parts = learner.algorithm.minibatches
    marks = [len(kept) * part // parts for part in range(parts + 1)]
    cut = [part for low, high in itertools.pairwise(marks) for part in update(kept[low:high], learner, ranks=ranks)]
    shares = tuple(tuple(part[rank] for part in cut) for rank in range(ranks))
    stats = statistics(batch, np.zeros(place))
    stats["micro_batches"] = float(sum(len(part.micro) for share in shares for part in share))
    return StepBatch(shares, stats, (0.0,) * place)


def update(units: Sequence[Sequence[Sample]], learner: LearnerConfig, *, ranks: int) -> list[tuple[Minibatch, ...]]:
    """Return the mini-batch of an update, by rank; for KTO also its prompts with the answers of other rows."""
    every = [units, _mismatched(units)] if learner.mode == "kto" else [units]
    return [
        minibatch(one, ranks=ranks, max_tokens=learner.micro_batch_tokens, packing=learner.packing) for one in every
    ]


def _pair(group: GroupData, numbered: Sequence[tuple[int, SampleData]], margin_key: str) -> list[Sample]:
    """Return the chosen sample, with the margin of its row in place of an advantage, and the rejected one."""
    if len(numbered) < 2:
        raise ValueError(f"group {group.group} has {len(numbered)} samples, a pair needs 2")
    better, worse = (pick(numbered, key=lambda one: one[1].reward) for pick in (max, min))
    if better[1].reward == worse[1].reward:
        return []
    margin = float(group.row.get(margin_key) or 0.0) if margin_key else 0.0
    return [_sample(group, better[1], better[0], margin), _sample(group, worse[1], worse[0])]


def _mismatched(units: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Return each prompt with the answer of the row before it, the first one with that of the last, as TRL does."""
    found = []
    for place, (one,) in enumerate(units):
        (other,) = units[place - 1]
        tokens = np.concatenate((one.tokens[: one.prompt_tokens], other.tokens[other.prompt_tokens :]))
        found.append([replace(one, tokens=tokens, behaviour=other.behaviour, mask=other.mask)])
    return found


def _sample(group: GroupData, sample: SampleData, number: int, margin: float = 0.0) -> Sample:
    mask = np.ones(sample.response.size, np.uint8) if sample.mask is None else sample.mask
    tokens = np.concatenate((group.prompt_ids, sample.response)).astype(np.int32)
    return Sample(tokens, int(group.prompt_ids.size), sample.logprobs, mask, margin, number, right=sample.reward > 0.5)


def minibatch(
    units: Sequence[Sequence[Sample]], *, ranks: int, max_tokens: int, packing: bool
) -> tuple[Minibatch, ...]:
    """Return the mini-batch of every rank; the samples of a unit stay together."""
    every = [sample for unit in units for sample in unit]
    trained = sum(bool(sample.mask.any()) for sample in every)
    lengths = [[sample.tokens.size for sample in unit] for unit in units]
    costs = [sum(unit) if packing else len(unit) * max(unit) for unit in lengths]
    rows = pack(costs, limit=max_tokens, multiple=ranks) if packing else pad(costs, limit=max_tokens)
    build = packed_row if packing else padded_rows

    def micro(row: int) -> MicroBatch:
        return build([sample for item in (rows[row] if row >= 0 else ()) for sample in units[item]])

    per_rank = balance([sum(costs[item] for item in row) for row in rows], ranks)
    tokens = sum(int(sample.mask.sum()) for sample in every)
    return tuple(Minibatch(tokens, trained, tuple(micro(row) for row in rows_of_rank)) for rows_of_rank in per_rank)


# ---------------------------------------------------------------- losses


def sft_loss(part: Minibatch) -> LossFunction:
    """Mean negative log-likelihood over the trained tokens of the mini-batch."""

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        value = sft(logprobs, micro.mask).sum() / max(part.tokens, 1)
        return value, {"entropy_sum": masked(entropy.detach(), micro.mask).sum()}

    return loss


def dpo_loss(part: Minibatch, preference: PreferenceConfig, reference: Sequence[Tensor] | None) -> LossFunction:
    """DPO or one of its variants, mean over the pairs of the mini-batch. `reference`: log-probs of the frozen model by
    micro-batch; None without one.
    """
    pairs = max(part.sequences // 2, 1)

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = len(part.micro[number].samples)

        def answers(values: Tensor) -> tuple[Tensor, Tensor]:
            sums = sequence_sums(values, micro.mask, micro.sequences, rows)
            return sums[0::2], sums[1::2]

        frozen = (None, None) if reference is None else answers(reference[number])
        lengths = sequence_lengths(micro.mask, micro.sequences, rows)
        found = pair_loss(preference, answers(logprobs), frozen, (lengths[0::2], lengths[1::2]))
        return found.loss.sum() / pairs, _pair_sums(found)

    return loss


def pair_loss(
    preference: PreferenceConfig,
    policy: tuple[Tensor, Tensor],
    reference: tuple[Tensor | None, Tensor | None],
    lengths: tuple[Tensor, Tensor],
) -> PairLoss:
    """Return the configured loss of P pairs from log-probs and trained tokens of both answers, `[P]` each."""
    beta, smoothing = preference.beta, preference.label_smoothing
    if preference.loss == "simpo":
        return simpo(*policy, *lengths, beta=beta, gamma=preference.gamma, label_smoothing=smoothing)
    if preference.loss == "orpo":
        return orpo(*policy, *lengths, beta=beta)
    chosen, rejected = lengths if preference.length_average else (None, None)
    return dpo(
        *policy,
        *reference,
        beta=beta,
        kind=preference.loss,
        label_smoothing=smoothing,
        chosen_lengths=chosen,
        rejected_lengths=rejected,
    )


def kto_loss(part: Minibatch, preference: PreferenceConfig, reference: Sequence[Tensor], kl: float) -> LossFunction:
    """KTO, mean over the answers of the mini-batch; `right` marks the desirable ones. `kl`: of the whole mini-batch."""
    answers = max(part.sequences, 1)

    def loss(logprobs: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = len(part.micro[number].samples)
        policy, frozen = (
            sequence_sums(values, micro.mask, micro.sequences, rows) for values in (logprobs, reference[number])
        )
        found = kto(
            policy,
            frozen,
            micro.right,
            policy.new_tensor(kl),
            beta=preference.beta,
            desirable_weight=preference.desirable_weight,
            undesirable_weight=preference.undesirable_weight,
        )
        sums = {
            "answers_sum": found.reward.new_tensor(float(rows)),
            "desirable_sum": micro.right.to(policy.dtype).sum(),
        }
        sums["chosen_sum"], sums["rejected_sum"] = (
            masked(found.reward, of).sum() for of in (micro.right, ~micro.right)
        )
        return found.loss.sum() / answers, sums

    return loss


def reward_loss(part: Minibatch, preference: PreferenceConfig) -> LossFunction:
    """Bradley-Terry with the margin of the row, mean over the pairs of the mini-batch. In place of log-probs the
    backend gives the score at every token of the answer; the last one counts.
    """
    pairs = max(part.sequences // 2, 1)

    def loss(scores: Tensor, entropy: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = len(part.micro[number].samples)
        ends = torch.bincount(micro.sequences, minlength=rows).cumsum(0) - 1
        found = bradley_terry(
            scores[ends[0::2]],
            scores[ends[1::2]],
            margin=micro.advantages[ends[0::2]],
            center_coeff=preference.center_coeff,
        )
        return found.loss.sum() / pairs, _pair_sums(found)

    return loss


def _pair_sums(found: PairLoss) -> dict[str, Tensor]:
    chosen = found.reward_chosen
    return {
        "chosen_sum": chosen.sum(),
        "rejected_sum": found.reward_rejected.sum(),
        "right_sum": found.correct.sum().to(chosen.dtype),
        "pairs_sum": chosen.new_tensor(float(chosen.numel())),
    }


# ---------------------------------------------------------------- the step


def train_step(
    share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig, step: int
) -> StepResult:
    """Run all optimizer steps of one batch. Collective."""
    lr = learning_rate(config.optim, step=step, steps=config.steps)
    every = config.preference.iteration
    if every and step > 1 and step % every == 1 % every and config.mode in ("dpo", "kto"):
        backend.renew_reference()  # step `s` trains version s - 1
    totals: dict[str, float] = {}
    tokens, updates, skipped, overflows, norm = 0, 0, 0, 0, 0.0
    for part, others in _updates(share, config):
        if part.tokens == 0:
            continue
        sums, why = _gradients(part, others, backend=backend, gang=gang, config=config)
        info = UpdateInfo(backend.discard(), True) if why else backend.step(lr=lr, max_norm=config.optim.max_grad_norm)
        if info.skipped and not updates:  # no weight has changed
            why = why or f"loss: the norm of the gradient is {info.grad_norm}"
            return StepResult({"lr": lr, "grad_norm": info.grad_norm}, 1, why)
        overflows += info.overflows
        if info.skipped:
            skipped += 1
            continue
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
        tokens, updates, norm = tokens + part.tokens, updates + 1, max(norm, info.grad_norm)
    if not updates:
        return StepResult({"lr": lr}, 1)
    found = {"lr": lr, "grad_norm": norm} | info._replace(overflows=overflows).scaling()
    return StepResult(found | metrics(totals, tokens=tokens, updates=updates), skipped)


def probe_step(share: Sequence[Minibatch], *, backend: Backend, gang: Gang, config: LearnerConfig) -> str:
    """Return a failure of loss or gradient of a batch, without an update; empty if there is none. Collective."""
    for part, others in _updates(share, config):
        if part.tokens:
            _, why = _gradients(part, others, backend=backend, gang=gang, config=config)
            norm = backend.discard()
            if why or not math.isfinite(norm):
                return why or f"loss: the norm of the gradient is {norm}"
    return ""


def _updates(share: Sequence[Minibatch], config: LearnerConfig) -> list[tuple[Minibatch, Minibatch | None]]:
    """Return the mini-batches, for KTO with the prompts and answers of different rows."""
    if config.mode == "kto":
        return list(zip(share[0::2], share[1::2], strict=True))
    return [(part, None) for part in share]


def _gradients(
    part: Minibatch, others: Minibatch | None, *, backend: Backend, gang: Gang, config: LearnerConfig
) -> tuple[dict[str, float], str]:
    """Forward and backward of one mini-batch: sums over ranks, and the failure on any rank."""
    kl = 0.0 if others is None else _kl(others, backend=backend, gang=gang)
    found, why = backward(backend.train, part.micro, _mode_loss(part, kl, backend=backend, config=config), gang=gang)
    return (found if others is None or not found else found | {"kl_sum": kl}), why


def _kl(part: Minibatch, *, backend: Backend, gang: Gang) -> float:
    """Return the mean log-ratio of the answers of a mini-batch to the reference, at least 0. Collective."""
    total = 0.0
    pieces = zip(part.micro, backend.forward_logprobs(part.micro), backend.reference_logprobs(part.micro), strict=True)
    for piece, current, reference in pieces:
        mask = torch.from_numpy(piece.mask.astype(bool)).to(current.device)
        total += float(masked(current.double() - reference.double(), mask).sum())
    return max(gang.total({"kl": total})["kl"] / max(part.sequences, 1), 0.0)


def _mode_loss(part: Minibatch, kl: float, *, backend: Backend, config: LearnerConfig) -> LossFunction:
    """Return the loss of the mode. Collective if it needs the reference."""
    preference = config.preference
    if config.mode == "kto":
        return kto_loss(part, preference, backend.reference_logprobs(part.micro), kl)
    if config.mode == "reward_model":
        return reward_loss(part, preference)
    if config.mode == "dpo":
        return dpo_loss(part, preference, backend.reference_logprobs(part.micro) if preference.has_reference else None)
    return sft_loss(part)


def metrics(totals: Mapping[str, float], *, tokens: int, updates: int) -> dict[str, float]:
    """Return metrics of the step by catalogue name, from sums over ranks and mini-batches."""
    found = {"loss": totals["loss"] / updates}
    if "entropy_sum" in totals:
        found["entropy"] = totals["entropy_sum"] / max(tokens, 1)
    if "answers_sum" in totals:
        good = totals["desirable_sum"]
        bad = totals["answers_sum"] - good
        found["kto_kl"] = totals["kl_sum"] / updates
        if good and bad:
            chosen, rejected = totals["chosen_sum"] / good, totals["rejected_sum"] / bad
            found |= {"chosen_score": chosen, "rejected_score": rejected, "score_margin": chosen - rejected}
    if "pairs_sum" in totals:
        pairs = max(totals["pairs_sum"], 1.0)
        chosen, rejected = totals["chosen_sum"] / pairs, totals["rejected_sum"] / pairs
        found |= {
            "pair_accuracy": totals["right_sum"] / pairs,
            "chosen_score": chosen,
            "rejected_score": rejected,
            "score_margin": chosen - rejected,
        }
    return found
