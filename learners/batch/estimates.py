"""Estimates over the whole batch `[S, T]` on rank 0: shaped rewards and advantages, before the split into rows.

Guarantees:
1. everything that mixes rows is computed here, once: group statistics, whitening, weights by lag, resampling, and
   corrections over all rows;
2. float64; the result depends only on the batch, the settings and the seed;
3. an estimator that needs the model (values, proximal log-probs, a KL penalty in the reward) gives zeros in
   `estimate_early`, and advantages in `estimate_late`;
4. rewards of single turns stand at their last tokens, so estimators with token credit use them there;
5. rows cut by the length limit may be left out of the loss; they count in the statistics of their group.

Example: two samples of a group with rewards 1 and 0 under GRPO: advantages 0.7071 and -0.7071 at every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.reward import match_components

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncrl.config import ProcessRewardConfig
    from asyncrl.wire.batch_arrays import ClaimedBatch
    from learners.algorithms.types import Estimate, Rollouts

Array = npt.NDArray[Any]


class Cut(NamedTuple):
    """One sequence: the tokens `start .. stop` of a sample's response, after the group's prompt or after the `prompt`
    tokens before `start`. A sample has one sequence or several (`SampleHead.rows`).
    """

    sample: int  # its place among the samples
    start: int
    stop: int
    prompt: int = 0  # 0: the group's prompt


class Whole(NamedTuple):
    """The batch before the split: its samples in order, and the estimators' view of them."""

    samples: Sequence[Any]  # SampleData, S of them
    rollouts: Rollouts
    scores: Tensor  # float64 [S]: outcome scores after shaping
    right: Tensor  # bool [S]
    lags: tuple[Array, ...]  # i4 [T] of every sample
    step: int
    cuts: tuple[Cut, ...] = ()  # every sequence, in the order of the samples


class Found(NamedTuple):
    """Estimates per sample, for assembly."""

    masks: tuple[Array, ...]  # u1 [T]: trained tokens
    advantages: tuple[Array, ...]  # f4 [T]
    first: tuple[float, ...]  # advantage of the first trained token
    lags: tuple[Array, ...]
    scales: Array  # f8 [S]
    right: Array
    repeats: list[int]  # how often the sample is trained
    stats: dict[str, float]


class ModelNumbers(NamedTuple):
    """Numbers per sample from the learner's forward passes, f4 `[T]` each; None: not computed."""

    proximal: Sequence[Array] | None = None
    reference: Sequence[Array] | None = None
    values: Sequence[Array] | None = None
    after: Sequence[Array] | None = None  # [1] each: the value after the last token
    square_sums: Sequence[Array] | None = None  # sum over the vocabulary of p^2
    process: Sequence[Array] | None = None  # log-probs under the process reward model
    process_reference: Sequence[Array] | None = None  # and under its frozen reference


class Late(NamedTuple):
    """Estimates per sample after the forward passes; None: not needed."""

    advantages: list[Array] | None = None
    returns: list[Array] | None = None
    weights: list[Array] | None = None
    keep: list[Array] | None = None
    first: tuple[float, ...] = ()
    kl: float | None = None  # mean KL(proximal || reference) where it was a penalty


def needs_model(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages need forward passes over the whole batch."""
    from learners.algorithms.registry import needs_for

    late = {"critic", "proximal", "values", "square_sums", "process"}
    return algorithm.kl.where == "reward" or bool(late & set(needs_for(algorithm)))


# ---------------------------------------------------------------- before the model


def describe_batch(
    batch: ClaimedBatch,
    algorithm: AlgorithmConfig,
    baselines: Mapping[int, float] | None = None,
    rewards: Sequence[str] = (),
) -> Whole:
    """Return masks, shaped rewards and groups of the batch. `rewards`: names of the configured ones."""
    import torch

    from learners.algorithms.tensors import place_outcomes
    from learners.algorithms.types import Rollouts

    pairs = [(group, sample) for group in batch.groups for sample in group.samples]
    samples = [sample for _, sample in pairs]
    numbers = {group.group: number for number, group in enumerate(batch.groups)}
    owners = torch.tensor([numbers[group.group] for group, _ in pairs], dtype=torch.int64)
    mask = torch.from_numpy(pad_rows([_loss_mask(sample).astype(bool) for sample in samples])).bool()
    outcomes = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    lengths = torch.tensor([response_length(sample) for sample in samples], dtype=torch.int64)
    scores = _shape_rewards(outcomes, owners, lengths, algorithm)
    parts = None
    if found := {name for sample in samples for name in sample.parts}:
        names = match_components(found, rewards, algorithm.advantage_options.get("weights"))
        parts = torch.tensor([[sample.parts.get(name, 0.0) for sample in samples] for name in names]).double()
    greedy = None
    if baselines is not None:
        greedy = torch.tensor([baselines[group.group] for group, _ in pairs], dtype=torch.float64)
    placed = place_outcomes(scores, mask)
    if not algorithm.shaping.passk:  # pass@k replaces the scores
        _credit_turns(placed, samples, mask)
    behaviour = _behaviour(samples, mask)
    rollouts = Rollouts(placed, mask, owners, baselines=greedy, parts=parts, lengths=lengths, behaviour=behaviour)
    lags = tuple(_lags(sample, batch.version) for sample in samples)
    right = outcomes > algorithm.shaping.correct_above
    return Whole(samples, rollouts, scores, right, lags, batch.step, tuple(iter_cuts(samples)))


def rows_in(sample: Any) -> tuple[tuple[int, int], ...]:
    """Return start and prompt tokens of a sample's sequences that have their own prompt."""
    return getattr(sample, "rows", ())  # samples of the modes without reward have none


def iter_cuts(samples: Sequence[Any]) -> Iterator[Cut]:
    for number, sample in enumerate(samples):
        rows = rows_in(sample)
        if not rows or rows[0][0]:  # the first sequence follows the group's prompt
            yield Cut(number, 0, rows[0][0] if rows else sample.response.size)
        ends = [*(start for start, _ in rows[1:]), sample.response.size]
        for (start, prompt), end in zip(rows, ends, strict=False):  # no rows, one end
            yield Cut(number, start + prompt, end, prompt)


def response_length(sample: Any) -> int:
    """Count the tokens of the response, with observations but without the prompts of later sequences."""
    return int(sample.response.size) - sum(prompt for _, prompt in rows_in(sample))


def convert_to_samples(whole: Whole, rows: Sequence[Array] | None) -> list[Array] | None:
    """Convert rows of sequences to rows `[T]` of samples, 0 at prompts."""
    if rows is None:
        return None
    found = [np.zeros(sample.response.size, np.float32) for sample in whole.samples]
    for cut, row in zip(whole.cuts, rows, strict=True):
        found[cut.sample][cut.start : cut.stop] = row
    return found


def convert_to_cuts(whole: Whole, rows: Sequence[Array]) -> list[Array]:
    """Convert rows of samples to rows of sequences."""
    return [rows[cut.sample][cut.start : cut.stop] for cut in whole.cuts]


def _credit_turns(rewards: Tensor, samples: Sequence[Any], mask: Tensor) -> None:
    """Move the rewards of single turns `[S, T]` to their last tokens; the sums of the rows stay the same."""
    from learners.algorithms.tensors import last_tokens

    last = last_tokens(mask).long().argmax(-1)
    for number, sample in enumerate(samples):
        for place, reward in getattr(sample, "turns", ()):
            rewards[number, place] += reward
            rewards[number, last[number]] -= reward


def _shape_rewards(rewards: Tensor, owners: Tensor, lengths: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    from learners.algorithms.passk import pkpo_binary
    from learners.algorithms.rewards import overlong_penalty

    shaping, scores = algorithm.shaping, rewards
    if shaping.passk:
        scores = pkpo_binary(scores > shaping.correct_above, owners, k=shaping.passk).double()
    if shaping.overlong_buffer:
        scores = scores + overlong_penalty(
            lengths, max_len=shaping.overlong_max, buffer_len=shaping.overlong_buffer, factor=shaping.overlong_factor
        )
    return scores


def _behaviour(samples: Sequence[Any], mask: Tensor) -> Tensor | None:
    """Return the recorded log-probs; None if some have the wrong length (the packer reports the group)."""
    import torch

    if any(sample.logprobs.size != sample.response.size for sample in samples):
        return None
    return torch.from_numpy(pad_rows([sample.logprobs.astype(np.float64) for sample in samples])).reshape(mask.shape)


def _loss_mask(sample: Any) -> Array:
    return np.ones(sample.response.size, np.uint8) if sample.mask is None else sample.mask


def _lags(sample: Any, version: int) -> Array:
    """Return the training version minus the version of each response token."""
    runs = sample.runs or ((version, sample.response.size),)
    versions = np.repeat(np.array([run[0] for run in runs]), [run[1] for run in runs])
    lags = np.maximum(version - versions, 0).astype(np.int32)
    return lags if lags.size == sample.response.size else np.resize(lags, sample.response.size)


def pad_rows(rows: Sequence[Array]) -> Array:
    """Stack rows of unequal lengths as one `[S, T]`, with zeros on the right; T is at least 1."""
    width = max([1, *(row.size for row in rows)])
    result = np.zeros((len(rows), width), rows[0].dtype if rows else np.float64)
    for number, row in enumerate(rows):
        result[number, : row.size] = row
    return result


def estimate_early(whole: Whole, algorithm: AlgorithmConfig, *, seed: int = 0) -> Found:
    """Return advantages (zeros if they need the model), weights by lag, and how often each row is trained."""
    import torch

    from learners.algorithms.filters import overlong_mask
    from learners.algorithms.passk import pass_at_means
    from learners.algorithms.registry import advantage_for

    rollouts, mask = whole.rollouts, whole.rollouts.mask
    estimate = None
    if whole.samples and not needs_model(algorithm):
        estimate = advantage_for(algorithm)(rollouts)
    advantages = torch.zeros(mask.shape, dtype=torch.float64) if estimate is None else estimate.advantages
    trained = mask
    if algorithm.shaping.overlong_filter:
        cut = torch.tensor([sample.finish == "length" for sample in whole.samples], dtype=torch.bool)
        trained = overlong_mask(mask, cut)
    scales = _scales(whole, algorithm)
    stats = {f"pass_at/{k}": mean for k, mean in pass_at_means(whole.right, rollouts.groups).items()}
    if algorithm.shaping.overlong_buffer and whole.samples:
        start = algorithm.shaping.overlong_max - algorithm.shaping.overlong_buffer
        assert rollouts.lengths is not None
        stats["overlong_share"] = float((rollouts.lengths > start).double().mean())
    return Found(
        masks=tuple(row.astype(np.uint8) for row in unpad(whole, trained)),
        advantages=tuple(row.astype(np.float32) for row in unpad(whole, advantages)),
        first=first_advantages(advantages, mask),
        lags=whole.lags,
        scales=scales,
        right=whole.right.numpy(),
        repeats=_repeats(whole, algorithm, seed),
        stats=stats,
    )


def unpad(whole: Whole, values: Tensor) -> list[Array]:
    """Return a row per sample, without the padding."""
    data = values.numpy()
    return [data[number, : sample.response.size] for number, sample in enumerate(whole.samples)]


def first_advantages(advantages: Tensor, mask: Tensor) -> tuple[float, ...]:
    """Return the advantage of each row's first trained token; 0 if it has none."""
    if not mask.numel():
        return ()
    places = mask.long().argmax(-1, keepdim=True)
    return tuple(advantages.gather(-1, places).squeeze(-1).tolist())


def _scales(whole: Whole, algorithm: AlgorithmConfig) -> Array:
    import torch

    from learners.algorithms.staleness import staleness_weights

    lag = algorithm.lag
    if lag.weight == "off":
        return np.ones(len(whole.samples))
    rows = zip(whole.lags, unpad(whole, whole.rollouts.mask), strict=True)
    ages = torch.tensor([float(lags[mask].mean()) if mask.any() else 0.0 for lags, mask in rows])
    found = staleness_weights(ages, kind=lag.weight, tau=lag.tau, kappa=lag.kappa, normalize=lag.normalize)
    return np.asarray(found.numpy())


def _repeats(whole: Whole, algorithm: AlgorithmConfig, seed: int) -> list[int]:
    """Return 1 for every row, or with PF-PPO how often it was drawn."""
    from learners.algorithms.filters import pf_ppo_draw, pf_ppo_probs

    method, count = algorithm.shaping.resample, len(whole.samples)
    if method == "off" or not count:
        return [1] * count
    chances = pf_ppo_probs(whole.scores, method=method, power=algorithm.shaping.resample_power)
    drawn = pf_ppo_draw(chances, seed=seed, step=whole.step)
    return drawn.bincount(minlength=count).tolist()


# ---------------------------------------------------------------- after the model


def estimate_late(
    whole: Whole,
    numbers: ModelNumbers,
    algorithm: AlgorithmConfig,
    *,
    kl_coeff: float,
    correct: bool,
    scoring: ProcessRewardConfig | None = None,
) -> Late:
    """Return advantages, critic targets and (`correct`) the weights of a correction over all rows. `scoring`: how
    log-probs of the process reward model become rewards.
    """
    from learners.algorithms.registry import advantage_for, divergence_for

    mask = whole.rollouts.mask
    proximal, reference, values = (_pad(found, mask) for found in numbers[:3])
    squares = _pad(numbers.square_sums, mask)
    if squares is not None and proximal is not None:
        # The sum includes the square of the token itself: rounding must not make a baseline weight negative.
        squares = squares.maximum((2 * proximal).exp())
    rollouts, kl = whole.rollouts._replace(proximal=proximal, values=values, square_sums=squares), None
    if numbers.after is not None:
        ends = [
            float(row[0]) if sample.finish == "length" else 0.0
            for row, sample in zip(numbers.after, whole.samples, strict=True)
        ]
        rollouts = rollouts._replace(bootstrap=mask.new_tensor(ends, dtype=rollouts.rewards.dtype))
    if scoring is not None:
        rollouts = rollouts._replace(process=_process(numbers, mask, scoring))
    if algorithm.kl.where == "reward":
        from learners.algorithms.rewards import kl_penalty

        assert proximal is not None and reference is not None
        kind = divergence_for(algorithm.kl.kind, auto="k1")
        shaped = kl_penalty(rollouts.rewards, proximal, reference, mask, coeff=kl_coeff, kind=kind)
        rollouts, kl = rollouts._replace(rewards=shaped.rewards), float(shaped.kl)
    late = Late(kl=kl)
    if needs_model(algorithm):
        estimate: Estimate = advantage_for(algorithm)(rollouts)
        returns = None if estimate.returns is None else _floats(whole, estimate.returns)
        late = late._replace(
            advantages=_floats(whole, estimate.advantages),
            returns=returns,
            first=first_advantages(estimate.advantages, mask),
        )
    if correct:
        weights, keep = _correct(whole, rollouts, algorithm)
        late = late._replace(weights=_floats(whole, weights), keep=unpad(whole, keep))
    return late


def _process(numbers: ModelNumbers, mask: Tensor, scoring: ProcessRewardConfig) -> Tensor:
    """Return process rewards `[S, T]` of the whole batch."""
    from learners.algorithms.prime import token_scores

    model, reference = _pad(numbers.process, mask), _pad(numbers.process_reference, mask)
    assert model is not None and reference is not None
    return token_scores(model, reference, mask, beta=scoring.beta, batch_norm=scoring.batch_norm).scores


def _correct(whole: Whole, rollouts: Rollouts, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return weights and kept tokens `[S, T]` of a correction over all sequences."""
    import torch

    from learners.algorithms.registry import correction_for

    mask, numbers = rollouts.mask, rollouts.mask.long()
    for number, cut in enumerate(whole.cuts):
        numbers[cut.sample, cut.start : cut.stop] = number
    assert rollouts.proximal is not None and rollouts.behaviour is not None
    one, other = rollouts.proximal[mask], rollouts.behaviour[mask]
    found = correction_for(algorithm)(one, other, mask[mask], numbers[mask])
    weights, keep = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.bool)
    weights[mask], keep[mask] = found.weights.double(), found.keep
    return weights, keep


def _pad(rows: Sequence[Array] | None, mask: torch.Tensor) -> Tensor | None:
    import torch

    if rows is None:
        return None
    return torch.from_numpy(pad_rows([row.astype(np.float64) for row in rows])).reshape(mask.shape)


def _floats(whole: Whole, values: Tensor) -> list[Array]:
    return [row.astype(np.float32) for row in unpad(whole, values)]
