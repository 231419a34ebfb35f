"""Forward passes over the whole batch before its first update, and the estimates made from them.

Guarantees:
1. only what the settings need is computed: proximal log-probs (several mini-batches, estimators and corrections over
   all rows, denominator `kept`), sums of squared probabilities from the same pass (optimal token baseline), reference
   log-probs (KL), values (critic) and process rewards (PRIME);
2. tokens of high entropy (`entropy_keep`) are selected over the whole batch, by the weights at the start of the step;
3. rank 0 computes in float64 what mixes rows and shares the result: it does not depend on ranks, rows or micro-batches;
4. if an estimator raises or returns non-finite numbers, every rank knows it (`broken`) before a weight changes.

GRPO with decoupled PPO and one mini-batch needs no pass at all.
Example: GAE: values of every rank's rows -> rank 0: advantages and returns of all samples -> every rank: its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.config import ProcessRewardConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.corrections import needs_whole_batch
from learners.algorithms.registry import choose, needs_for
from learners.backends.base import Backend
from learners.batch.bad_groups import describe_error
from learners.batch.estimates import (
    Array,
    Late,
    ModelNumbers,
    Whole,
    convert_to_cuts,
    convert_to_samples,
    estimate_late,
    needs_model,
)
from learners.batch.micro_batches import MicroBatch, Minibatch
from learners.batch.token_selection import keep_high_entropy
from learners.gang.gang import Gang
from learners.step.process_reward import ProcessRewardStep

Pieces = list[list[Tensor]]  # by mini-batch and micro-batch of this rank, [N] each


class Prepared(NamedTuple):
    """Results on every rank; None if the settings do not need them."""

    proximal: Pieces | None = None
    reference: Pieces | None = None
    values: Pieces | None = None
    advantages: Pieces | None = None
    returns: Pieces | None = None
    weights: Pieces | None = None
    keep: Pieces | None = None
    first: tuple[float, ...] = ()  # advantage of each sample's first token; empty without `advantages`
    kl: float | None = None  # mean KL(proximal || reference) where it was a penalty in the reward
    kl_coeff: float = 0.0  # of the KL term in this step
    broken: str = ""
    high: Pieces | None = None  # tokens that `entropy_keep` keeps
    entropy_threshold: float = 0.0  # threshold of `high`, in nats
    entropy_coeff: float | None = None  # of this step; None: as in the settings
    process: ProcessRewardStep | None = None


class Needs(NamedTuple):
    """What a step needs from the model before its first update."""

    proximal: bool
    reference: bool
    values: bool
    late: bool  # advantages
    correct: bool  # a correction over all rows
    squares: bool = False  # sums over the vocabulary of p^2
    entropy: bool = False  # tokens of highest entropy
    process: bool = False  # log-probs of a process reward model


def step_needs(algorithm: AlgorithmConfig, minibatches: int = 1) -> Needs:
    late = needs_model(algorithm)
    correction = choose(algorithm, "correction")
    correct = needs_whole_batch(correction.function, correction.options)
    wanted = set(needs_for(algorithm))
    recompute = algorithm.proximal == "recompute"
    proximal = (
        correct
        or "proximal" in wanted
        or algorithm.kl.where == "reward"
        or (recompute and (minibatches > 1 or algorithm.denominator == "kept"))
    )
    values = bool({"critic", "values"} & wanted)
    return Needs(
        proximal,
        algorithm.kl.where != "off",
        values,
        late,
        correct,
        "square_sums" in wanted,
        algorithm.entropy_keep < 1,
        "process" in wanted,
    )


def prepare(
    share: Sequence[Minibatch],
    *,
    backend: Backend,
    gang: Gang,
    algorithm: AlgorithmConfig,
    whole: Whole | None,
    kl_coeff: float = 0.0,
    bootstrap: bool = False,
    process: ProcessRewardStep | None = None,
) -> Prepared:
    """Run the forward passes and the estimates. `whole` is needed on rank 0. Collective.

    `bootstrap`: a response cut by the length limit ends with the critic's value after it. `process`: the process reward
    model in this step; it may train here, before it scores.
    """
    needs = step_needs(algorithm, len(share))
    critic = backend.critic if needs.values else None
    if not any(needs):
        return Prepared(kl_coeff=kl_coeff)
    for needed, given, what in (
        (needs.values, critic, "critic"),
        (needs.process, process, "process reward model"),
    ):
        if needed and given is None:
            return Prepared(broken=f"estimate: advantage {algorithm.advantage!r} needs a {what}")
    reference = values = after = None
    proximal, entropy, squares = _policy_numbers(backend, share, needs, algorithm)
    if needs.reference:
        reference = [backend.reference_logprobs(part.micro) for part in share]
    if critic is not None:
        predicted = [critic.values(part.micro) for part in share]
        values = [[piece.tokens for piece in part] for part in predicted]
        after = [[piece.after for piece in part] for part in predicted] if bootstrap else None
    scored: Pieces | None = None
    if process is not None:
        why, scored = process.score()
        if why:
            return Prepared(broken=why, process=process)
    prepared = Prepared(proximal, reference, values, kl_coeff=kl_coeff, process=process)
    if entropy is not None:
        found_high = keep_high_entropy(share, entropy, keep=algorithm.entropy_keep, gang=gang)
        prepared = prepared._replace(high=found_high.pieces, entropy_threshold=found_high.threshold)
    if not (needs.late or needs.correct):
        return prepared
    pieces = (proximal, reference, values, after, squares, scored, None if process is None else process.reference)
    found = ModelNumbers(*(_gather_numbers(gang, share, piece, each=piece is after) for piece in pieces))
    scoring = process.config if process else None
    answer = _shared_estimate(whole, found, algorithm, kl_coeff, gang=gang, correct=needs.correct, scoring=scoring)
    if answer.broken:
        return prepared._replace(broken=answer.broken)
    return _fill_micro_batches(prepared, share, answer, like=_device(proximal or reference or values or scored))


def _policy_numbers(
    backend: Backend, share: Sequence[Minibatch], needs: Needs, algorithm: AlgorithmConfig
) -> tuple[Pieces | None, Pieces | None, Pieces | None]:
    """Return proximal log-probs, entropies and sums of squares under the weights at the start of the step.
    Collective.
    """
    found = None
    if needs.squares or needs.entropy:
        found = [backend.forward_numbers(part.micro, squares=needs.squares) for part in share]
    proximal = entropy = squares = None
    # Sums of squares need log-probs of the same policy, whatever the loss compares with.
    if needs.proximal and algorithm.proximal == "behaviour" and not needs.squares:
        proximal = [[torch.from_numpy(micro.behaviour.copy()) for micro in part.micro] for part in share]
    elif found is not None and (needs.proximal or needs.squares):
        proximal = [[piece.logprobs for piece in part] for part in found]
    elif needs.proximal:
        proximal = [backend.forward_logprobs(part.micro) for part in share]
    if found is not None and needs.entropy:
        entropy = [[piece.entropy for piece in part] for part in found]
    if found is not None and needs.squares:
        squares = [[piece.square_sums for piece in part if piece.square_sums is not None] for part in found]
    return proximal, entropy, squares


class _Answer(msgspec.Struct, array_like=True):
    """Results of rank 0: arrays by name, one per sequence."""

    arrays: dict[str, list[bytes]] = {}
    first: tuple[float, ...] = ()
    kl: float | None = None
    broken: str = ""


def _shared_estimate(
    whole: Whole | None, found: ModelNumbers, algorithm: AlgorithmConfig, kl_coeff: float, *, gang: Gang, **options: Any
) -> _Answer:
    """Return what rank 0 estimates, on every rank. `options`: see `_estimate`. Collective."""
    answer = _Answer()
    if gang.lead and whole is not None:
        answer = _estimate(whole, found, algorithm, kl_coeff, **options)
    return msgspec.msgpack.decode(gang.share(msgspec.msgpack.encode(answer)), type=_Answer)


def _estimate(
    whole: Whole,
    found: ModelNumbers,
    algorithm: AlgorithmConfig,
    kl_coeff: float,
    *,
    correct: bool,
    scoring: ProcessRewardConfig | None,
) -> _Answer:
    try:
        late = estimate_late(
            whole, _sample_numbers(whole, found), algorithm, kl_coeff=kl_coeff, correct=correct, scoring=scoring
        )
    except MemoryError:
        raise
    except Exception as error:  # a plugin may raise anything; every rank must know
        return _Answer(broken=describe_error("estimate", error))
    arrays = {
        name: [row.astype(np.float32).tobytes() for row in convert_to_cuts(whole, rows)] for name, rows in _parts(late)
    }
    for name, rows in _parts(late):
        if not all(np.isfinite(row).all() for row in rows):
            return _Answer(broken=f"estimate: {name} are not finite")
    return _Answer(arrays, late.first, late.kl)


def _sample_numbers(whole: Whole, found: ModelNumbers) -> ModelNumbers:
    """Convert numbers of sequences to numbers of samples; `after` is the value after the last sequence."""
    last = {cut.sample: place for place, cut in enumerate(whole.cuts)}
    after = None if found.after is None else [found.after[last[number]] for number in range(len(whole.samples))]
    named = {name: convert_to_samples(whole, getattr(found, name)) for name in ModelNumbers._fields if name != "after"}
    return ModelNumbers(**named, after=after)


def _parts(late: Late) -> Iterator[tuple[str, list[Array]]]:
    for name in ("advantages", "returns", "weights", "keep"):
        rows = getattr(late, name)
        if rows is not None:
            yield name, rows


def _gather_numbers(
    gang: Gang, share: Sequence[Minibatch], pieces: Pieces | None, *, each: bool = False
) -> list[Array] | None:
    """Return the numbers of every sequence `[T]` (`each`: one number) from all ranks, in batch order. Collective."""
    if pieces is None:
        return None
    mine: dict[int, bytes] = {}
    for part, tensors in zip(share, pieces, strict=True):
        for micro, tensor in zip(part.micro, tensors, strict=True):
            size = micro.samples.size
            counts = np.ones(size, np.int64) if each else np.bincount(micro.sequences, minlength=size)
            rows = np.split(tensor.float().cpu().numpy(), np.cumsum(counts)[:-1]) if counts.size else []
            mine.update({int(number): row.tobytes() for number, row in zip(micro.samples, rows, strict=True)})
    every: dict[int, bytes] = {}
    for text in gang.gather_shares(msgspec.msgpack.encode(mine)):
        every |= msgspec.msgpack.decode(text, type=dict[int, bytes])
    return [np.frombuffer(every[number], np.float32) for number in sorted(every)]


def _fill_micro_batches(
    prepared: Prepared, share: Sequence[Minibatch], answer: _Answer, *, like: torch.device
) -> Prepared:
    """Select each micro-batch's part of the results of rank 0."""
    pieces: Mapping[str, Pieces] = {
        name: [[_token_rows(micro, rows).to(like) for micro in part.micro] for part in share]
        for name, rows in answer.arrays.items()
    }
    keep = pieces.get("keep")
    return prepared._replace(
        advantages=pieces.get("advantages"),
        returns=pieces.get("returns"),
        weights=pieces.get("weights"),
        keep=None if keep is None else [[piece > 0 for piece in part] for part in keep],
        first=answer.first,
        kl=answer.kl,
    )


def _token_rows(micro: MicroBatch, rows: Sequence[bytes]) -> Tensor:
    """Return the tokens of a micro-batch `[N]` from rows by sequence."""
    if not micro.targets.size:
        return torch.zeros(0)
    data = b"".join(rows[number] for number in micro.samples.tolist())
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def _device(pieces: Pieces | None) -> torch.device:
    for part in pieces or ():
        for piece in part:
            return piece.device
    return torch.device("cpu")
