"""Every preset on a policy that can be enumerated: its expected gradient against a closed form, at ages 0 to 4.

The policy draws two tokens of two: logits by the token before. A batch is one group of two responses, so 16 groups are
all there are; each counts by its probability under the policy that sampled, which is older the larger its age. The
learner's policy has moved since the start of the step where a preset makes several updates. The closed forms are
written from the papers' equations in NumPy, token by token, as the factor of the gradient of log p.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from bare_config import BARE

from asyncrl.config import AlgorithmConfig, parse, presets
from asyncrl.config.sections.algorithm_catalogue import derive_algorithm, effective_correction
from asyncrl.configure import preset_pages
from learners.algorithms.aggregation import Denominators
from learners.algorithms.registry import advantage_for, chooser_for, correction_for
from learners.algorithms.types import LossInputs, Rollouts
from learners.backends.base import Micro
from learners.step.update import Terms, kl_term, loss_function

Array = npt.NDArray[np.float64]
LENGTH, GROUP = 2, 2
SEQUENCES = list(itertools.product(range(2), repeat=LENGTH))
REWARD = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.25, (1, 1): 2.0}
GREEDY, PROCESS = 0.5, 0.1
rng = np.random.default_rng(7)
START = rng.normal(size=(3, 2)) * 2.5  # at the start of the step; row 0: the first token, row 1 + a: after token a
MOVED = START + rng.normal(size=(3, 2)) * 1.5  # after some updates of the step
OLD = [START + 0.35 * age * rng.normal(size=(3, 2)) for age in range(5)]  # the policies that sampled
NAMES = [
    name for name in presets.names() if preset_pages.config_of(name).learner.mode == "rl"
]  # others: test_trl_cases


@functools.cache
def algorithm_of(name: str) -> AlgorithmConfig:
    config = parse(BARE, overrides=[f"{presets.KEY}={name}"])
    return derive_algorithm(config.learner.algorithm, longest=config.sampling.max_new_tokens)


def log_policy(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def state(sequence: tuple[int, ...], place: int) -> int:
    return 1 + sequence[place - 1] if place else 0


def log_probs(logits: Array, group: tuple[tuple[int, ...], ...]) -> Array:
    """`[G, T]`"""
    table = log_policy(logits)
    return np.array([[table[state(one, t), one[t]] for t in range(LENGTH)] for one in group])


class Batch(NamedTuple):
    """One group before advantages: rewards `[G]`, the others `[G, T]`."""

    group: Any
    rewards: Array
    proximal: Array
    behaviour: Array
    squares: Array  # sum over the vocabulary of the squared probabilities


class Case(NamedTuple):
    """One group, `[G, T]` each."""

    current: Array
    proximal: Array
    behaviour: Array
    advantages: Array
    weights: Array
    keep: Array


# ---------------------------------------------------------------- closed forms


def whiten(values: Array) -> Array:
    return np.asarray((values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8))


def wide(row: Array) -> Array:
    return np.repeat(np.asarray(row)[:, None], LENGTH, 1)


def advantages(algorithm: AlgorithmConfig, batch: Batch) -> Array:
    """Of the two rows of a group, `[G, T]`."""
    _, rewards, proximal, behaviour, squares = batch
    name, options, centred = algorithm.advantage, algorithm.advantage_options, rewards - rewards.mean()
    if name == "grpo":
        return wide(centred / (rewards.std(ddof=1) + 1e-6))
    if name in ("dr_grpo", "opo"):  # with responses of one length the mean weighted by length is the mean
        return wide(centred)
    if name == "win_rate":
        return wide(np.sign(centred) / 4)
    if name == "rloo":
        return wide(rewards - rewards[::-1])
    if name == "gpg":
        return wide(centred * GROUP / max(int((rewards != 0).sum()), 1))
    if name == "reinforce_plus_plus_baseline":
        return whiten(wide(centred))
    if name in ("reinforce_plus_plus", "gae"):  # the critic says 0, gamma and lambda are 1
        return whiten(wide(rewards))
    if name == "gae_length_adaptive":
        decay = max(0.0, 1 - 1 / (options["alpha"] * LENGTH))
        return whiten(np.stack([rewards * decay, rewards], -1))
    if name == "remax":
        return wide(rewards - GREEDY)
    if name == "prime":
        process = np.array([[PROCESS * (1 + g + 2 * t) for t in range(LENGTH)] for g in range(GROUP)])
        dense = process * 2 - process.mean(-1).sum()
        final = rewards * 2 - rewards.sum()
        each = options["coef_dpo"] * dense
        each[:, -1] += options["coef_gt"] * final
        return whiten(each[:, ::-1].cumsum(-1)[:, ::-1])
    assert name == "optimal_token_baseline"
    weight = ((1 - 2 * np.exp(proximal) + squares) * np.exp(2 * (proximal - behaviour))).cumsum(-1)
    return np.asarray(wide(rewards) - (wide(rewards) * weight).sum(0) / (weight.sum(0) + 1e-8))


def corrected(algorithm: AlgorithmConfig, proximal: Array, behaviour: Array) -> tuple[Array, Array]:
    """Weights and the tokens that stay, `[G, T]`."""
    ratio, name = np.exp(proximal - behaviour), effective_correction(algorithm)
    if name == "tis":
        return (ratio if algorithm.tis_cap == "off" else np.minimum(ratio, algorithm.tis_cap)), np.ones_like(ratio)
    if name == "icepop":
        inside = (ratio >= algorithm.correction_options["lower"]) & (ratio <= algorithm.correction_options["upper"])
        return ratio * inside, inside.astype(float)
    assert name == "none"
    return np.ones_like(ratio), np.ones_like(ratio)


def clipped_ppo(case: Case, ratio: Array, low: float, high: float, dual: float = np.inf) -> Array:
    """Equation 7 of PPO: no gradient where the ratio has left the interval in the direction of the advantage."""
    gain = case.advantages
    out = ((gain > 0) & (ratio > 1 + high)) | ((gain < 0) & (ratio < 1 - low)) | ((gain < 0) & (ratio > dual))
    return np.asarray(np.where(out, 0.0, gain * ratio))


def factor(algorithm: AlgorithmConfig, case: Case) -> Array:
    """The factor of the gradient of log p of each token, before the mean: minus the derivative of the loss."""
    loss, options = algorithm.loss, algorithm.loss_options
    gain, weights = case.advantages, case.weights
    from_behaviour = "behaviour" in (algorithm.proximal, algorithm.clip_against)
    gap = case.current - (case.behaviour if from_behaviour else case.proximal)
    if algorithm.clip_against == "behaviour":
        weights = weights * np.exp(case.behaviour - case.proximal)
    ratio, row = np.exp(gap), np.exp(gap.mean(-1, keepdims=True)) * np.ones_like(gap)
    low, high = options.get("clip_low", algorithm.clip_low), options.get("clip_high", algorithm.clip_high)
    if loss in ("ppo", "decoupled_ppo"):
        return weights * clipped_ppo(case, ratio, low, high, options.get("dual_clip", np.inf))
    if loss in ("gspo", "luspo"):
        return weights * clipped_ppo(case, row, low, high)
    if loss == "reinforce":
        return np.asarray(weights * gain)
    if loss == "cispo":
        return np.asarray(weights * gain * ratio.clip(1 - low, 1 + high))
    if loss == "sapo":
        tau = np.where(gain > 0, options["tau_pos"], options["tau_neg"])
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return np.asarray(weights * gain * 4 * gate * (1 - gate) * ratio)
    if loss == "gmpo":
        sign = np.sign(gain)
        held = sign * np.minimum(sign * gap, sign * gap.clip(-low, high))
        value = gain.mean(-1, keepdims=True) * np.exp((held + np.log(weights + 1e-10)).mean(-1, keepdims=True))
        return np.asarray(value * (held == gap))
    if loss == "vespo":
        log_w = (gap + np.log(weights)).sum(-1, keepdims=True) * np.ones_like(gap)
        k, rate = np.where(gain >= 0, 2.0, 3.0), np.where(gain >= 0, 3.0, 2.0)
        return np.asarray(gain * np.exp(rate + k * log_w - rate * np.exp(log_w)))
    if loss == "topr":
        return np.asarray(gain * np.where(gain < 0, np.minimum(1, np.exp(gap.sum(-1, keepdims=True))), 1.0))
    if loss == "sppo":
        error = gap.sum(-1, keepdims=True) - options["eta"] * gain.mean(-1, keepdims=True)
        return np.asarray(-2 * error * weights.mean(-1, keepdims=True) * np.ones_like(gap))
    covariance = (gain - gain.mean()) * (case.current - case.current.mean())
    if loss == "kl_cov":
        first = np.zeros(covariance.size)
        first[covariance.ravel().argmax()] = 1
        chosen = first.reshape(gap.shape)
        return np.asarray(weights * (gain * ratio - options["coeff"] * np.sign(gap) * chosen))
    assert loss == "clip_cov"
    plain = clipped_ppo(case, ratio, low, high)
    eligible = (covariance > options["lower"]) & (covariance < options["upper"]) & ((plain != 0) | (gain == 0))
    assert eligible.sum() <= 1  # so that the draw is known
    return np.asarray(weights * np.where(eligible, 0.0, plain))


DIVISOR = {
    "token-mean": GROUP * LENGTH,
    "seq-mean-token-mean": GROUP * LENGTH,
    "seq-mean-token-sum": GROUP,
}


def closed_form(algorithm: AlgorithmConfig, group: Any, case: Case) -> Array:
    """The gradient of the policy loss in the logits, `[3, 2]`."""
    high = np.ones_like(case.keep)
    if algorithm.entropy_keep < 1:  # of four tokens the fifth part is one: that of the highest entropy, and its equals
        table = log_policy(START)
        entropy = -(np.exp(table) * table).sum(-1)
        each = np.array([[entropy[state(one, t)] for t in range(LENGTH)] for one in group])
        high = (each >= each.max()).astype(float)
    aggregation = algorithm.aggregation if algorithm.loss != "luspo" else "seq-mean-token-sum"
    divisor = DIVISOR.get(aggregation, GROUP * algorithm.loss_scale_factor)
    factors = factor(algorithm, case) * case.keep * high / divisor
    made, policy = np.zeros((3, 2)), np.exp(log_policy(MOVED))
    for row, one in enumerate(group):
        for t, token in enumerate(one):
            at = state(one, t)
            made[at] -= factors[row, t] * (np.eye(2)[token] - policy[at])
    return made


# ---------------------------------------------------------------- the product


def flat(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).ravel())


def by_product(algorithm: AlgorithmConfig, batch: Batch) -> Array:
    """The gradient of the loss in the logits, by the learner's own functions."""
    group, rewards, proximal, behaviour, squares = batch
    mask = torch.ones(GROUP, LENGTH, dtype=torch.bool)
    last = np.zeros((GROUP, LENGTH))
    last[:, -1] = rewards
    process = np.array([[PROCESS * (1 + g + 2 * t) for t in range(LENGTH)] for g in range(GROUP)])
    rollouts = Rollouts(
        torch.from_numpy(last),
        mask,
        torch.zeros(GROUP, dtype=torch.int64),
        values=torch.zeros(GROUP, LENGTH, dtype=torch.float64),
        bootstrap=torch.zeros(GROUP, dtype=torch.float64),
        baselines=torch.full((GROUP,), GREEDY, dtype=torch.float64),
        proximal=torch.from_numpy(proximal),
        behaviour=torch.from_numpy(behaviour),
        square_sums=torch.from_numpy(squares),
        lengths=torch.full((GROUP,), LENGTH),
        process=torch.from_numpy(process),
    )
    found = advantage_for(algorithm)(rollouts).advantages
    logits = torch.from_numpy(MOVED.copy()).requires_grad_()
    table = logits.log_softmax(-1)
    current = torch.stack([table[state(one, t), one[t]] for one in group for t in range(LENGTH)])
    n, rows = GROUP * LENGTH, torch.arange(GROUP).repeat_interleave(LENGTH)
    empty = torch.zeros(n, dtype=torch.int64)
    micro = Micro(
        empty, empty, empty, empty, rows, flat(behaviour), mask.flatten(), found.flatten(), empty,
        torch.ones(GROUP, dtype=torch.float64), torch.zeros(GROUP, dtype=torch.bool),
        torch.zeros(GROUP, dtype=torch.int64),
    )  # fmt: skip
    high = None
    if algorithm.entropy_keep < 1:
        start = log_policy(START)
        entropy = -(np.exp(start) * start).sum(-1)
        each = np.array([entropy[state(one, t)] for one in group for t in range(LENGTH)])
        high = [torch.from_numpy(each >= each.max())]
    terms = Terms([flat(proximal)], [flat(proximal)], high=high, entropy_coeff=0.0)
    chooser = chooser_for(algorithm)
    if chooser is not None:
        inputs = LossInputs(current.detach(), flat(proximal), flat(behaviour), found.flatten(), mask.flatten(), rows)
        terms = terms._replace(chosen=[chooser(inputs)])
    value, _ = loss_function(algorithm, Denominators(n, GROUP), terms)(current, torch.zeros(n), micro, 0)
    value.backward()
    assert logits.grad is not None
    return logits.grad.numpy()


def expected(algorithm: AlgorithmConfig, age: int, one_gradient: Callable[..., Array]) -> Array:
    """The mean over all groups, by their probability under the policy of this age."""
    total = np.zeros((3, 2))
    squares_by_state = np.exp(2 * log_policy(START)).sum(-1)
    for group in itertools.product(SEQUENCES, repeat=GROUP):
        behaviour, proximal = log_probs(OLD[age], group), log_probs(START, group)
        squares = np.array([[squares_by_state[state(one, t)] for t in range(LENGTH)] for one in group])
        rewards = np.array([REWARD[one] for one in group])
        batch = Batch(group, rewards, proximal, behaviour, squares)
        total += np.exp(behaviour.sum()) * one_gradient(algorithm, batch)
    return total


@functools.cache
def expected_of(name: str, age: int) -> Array:
    return expected(algorithm_of(name), age, by_product)


def by_hand(algorithm: AlgorithmConfig, batch: Batch) -> Array:
    gain = advantages(algorithm, batch)
    weights, keep = corrected(algorithm, batch.proximal, batch.behaviour)
    current = log_probs(MOVED, batch.group)
    return closed_form(algorithm, batch.group, Case(current, batch.proximal, batch.behaviour, gain, weights, keep))


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_gradient_is_that_of_the_closed_form(name: str) -> None:
    algorithm = algorithm_of(name)
    for age in range(5):
        found, wanted = expected_of(name, age), expected(algorithm, age, by_hand)
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9, err_msg=f"age {age}")


@pytest.mark.parametrize("age", range(5))
def test_an_importance_weighted_kl_has_the_gradient_of_the_divergence_at_every_age(age: int) -> None:
    """At the states where the sampling policy comes: weights of single tokens correct the token, not its prefix."""
    text = ["kl.where=loss", "kl.importance_weighted=true", "tis_cap=off", "advantage=dr_grpo"]
    algorithm = parse(BARE, overrides=[f"learner.algorithm.{one}" for one in text]).learner.algorithm
    reference = START + 0.5 * np.arange(6).reshape(3, 2) ** 2
    visits = torch.from_numpy(np.stack([[1.0, *np.exp(log_policy(OLD[age])[0])]]).T)
    wanted, now = (torch.from_numpy(MOVED.copy()).requires_grad_() for _ in range(2))
    table, other = wanted.log_softmax(-1), torch.from_numpy(log_policy(reference))
    (visits * table.exp() * (table - other)).sum().div(LENGTH).backward()
    for group in itertools.product(SEQUENCES, repeat=GROUP):
        behaviour, proximal = log_probs(OLD[age], group), log_probs(START, group)
        current = now.log_softmax(-1)
        current = torch.stack([current[state(one, t), one[t]] for one in group for t in range(LENGTH)])
        mask = torch.ones(GROUP * LENGTH, dtype=torch.bool)
        correction = correction_for(algorithm)(flat(proximal), flat(behaviour), mask, None)
        found = kl_term(
            algorithm, current, flat(proximal), flat(log_probs(reference, group)), mask, weights=correction.weights
        )
        (float(np.exp(behaviour.sum())) * found.mean()).backward()
    assert now.grad is not None and wanted.grad is not None and wanted.grad.abs().max() > 0.1
    np.testing.assert_allclose(now.grad.numpy(), wanted.grad.numpy(), rtol=1e-6, atol=1e-9)


def test_presets_are_the_same_update_only_where_this_policy_cannot_tell() -> None:
    """Directions, not sizes: an optimizer that adapts its step does not see a constant factor."""
    made = {}
    for name in NAMES:
        found = np.concatenate([expected_of(name, age).ravel() for age in range(5)])
        made[name] = found / np.linalg.norm(found)
    same = {
        frozenset((one, other))
        for one, other in itertools.combinations(NAMES, 2)
        if np.abs(made[one] - made[other]).max() < 1e-9
    }
    wanted = {frozenset(pair) for names in SAME_HERE for pair in itertools.combinations(names, 2)}
    assert same == wanted, sorted(map(sorted, same ^ wanted))


#: Presets that differ in what this test leaves out; `test_presets_train` shows that they differ in the learner.
SAME_HERE = {
    ("adaptive_entropy", "grpo"): "the entropy bonus, the KL penalty",
    ("dapo", "grpo_decoupled"): "the number of updates, the overlong penalty",
    ("gspo", "luspo"): "the length of a response",
    ("opo", "rloo"): "the length of a response",
    ("ppo", "reinforce_pp", "reinforce_pp_baseline"): "the critic, the KL penalty, more than one group",
}


def test_what_is_not_clipped_has_the_same_gradient() -> None:
    """`clip_against = "behaviour"` moves the place of the clip, and nothing else."""
    wide_clip = {"clip_low": 1.0, "clip_high": 1e6}
    for loss in ("ppo", "gspo", "cispo", "gmpo"):
        bounds = wide_clip if loss != "gmpo" else {"clip_low": 1e6, "clip_high": 1e6}
        options = {**bounds, "clip_low": 10.0} if loss == "cispo" else bounds
        apart = [
            expected(AlgorithmConfig(loss=loss, clip_against=against, loss_options=options), 4, by_product)  # type: ignore[arg-type]
            for against in ("proximal", "behaviour")
        ]
        np.testing.assert_allclose(*apart, rtol=1e-9, err_msg=loss)
