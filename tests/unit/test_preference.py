"""Critic, supervised, preference and entropy functions: by hand, against finite differences, and their rules."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config import PreferenceConfig
from asyncrl.errors import ConfigError
from learners.algorithms import entropy, preference, supervised, values
from learners.algorithms.tensors import masked
from learners.algorithms.values import explained_variance, value_loss


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- gradients

MASK = torch.tensor([True, True, False, True, True, False, True, True])
ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
LENGTHS = torch.arange(1, 5)
OTHER, TARGETS = drawn(8, seed=1), drawn(4, seed=2)
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda x: value_loss(x, OTHER, OTHER + 0.3, MASK).loss,
    "value without a clip": lambda x: value_loss(x, OTHER, OTHER + 0.3, MASK, cliprange=None).loss,
    "sft": lambda x: supervised.sft(x, MASK),
    "positive": lambda x: supervised.positive_lm(x, MASK, ROWS < 2, tokens=4),
    "sppo": lambda x: preference.sppo(x, OTHER, MASK, ROWS, TARGETS, eta=2.0),
    **{
        f"dpo {kind} {smoothing}": lambda x, kind=kind, smoothing=smoothing: (
            preference.dpo(x[:4], x[4:], OTHER[:4], OTHER[4:], beta=0.7, kind=kind, label_smoothing=smoothing).loss
        )
        for kind in ("sigmoid", "ipo", "hinge", "robust")
        for smoothing in (0.0, 0.2)
    },
    "simpo": lambda x: preference.simpo(x[:4], x[4:], LENGTHS, LENGTHS + 1, gamma=0.3, label_smoothing=0.1).loss,
    "kto": lambda x: preference.kto(x, OTHER, ROWS < 1, TARGETS[0], undesirable_weight=0.5).loss,
    # log-probs are below 0: on both sides of log(1/2), where the odds are computed in another way
    "orpo": lambda x: preference.orpo(-(x[:4] ** 2) - 0.1, -(x[4:] ** 2) - 0.1, LENGTHS, LENGTHS + 1, beta=0.7).loss,
    "dpo ipo averaged": lambda x: (
        preference.dpo(
            x[:4], x[4:], kind="ipo", chosen_lengths=torch.arange(1, 5), rejected_lengths=torch.arange(2, 6)
        ).loss
    ),
    "bradley_terry": lambda x: preference.bradley_terry(x[:4], x[4:], margin=TARGETS, center_coeff=0.1).loss,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """No term of these is held still: the value itself moves as the gradient says."""
    start = drawn(8, seed=3)
    weights = drawn(8, seed=4)

    def value(x: Tensor) -> Tensor:
        found = SMOOTH[name](x).flatten()
        return (found * weights[: found.numel()]).sum()

    x = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(x), x)
    assert bool(gradient.any())
    for place in range(8):
        step = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor([place]), 1e-6)
        wanted = float(value(start + step) - value(start - step)) / 2e-6
        assert float(gradient[place]) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_no_loss_of_these_modules_is_left_out() -> None:
    """Every public function that gives a loss stands in `SMOOTH` by its name, DPO with each of its kinds."""
    helpers = {"next_token_mask", "explained_variance", "online_pairs", "softmean", "sppo_targets"}  # no losses
    public = {
        name.removesuffix("_loss").removesuffix("_lm")
        for module in (supervised, preference, values)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and name[0] != "_"
        and name not in helpers
    }
    assert public == {name.split()[0] for name in SMOOTH}
    kinds = typing.get_args(typing.get_type_hints(PreferenceConfig)["loss"])
    kinds = tuple(kind for kind in kinds if kind not in ("simpo", "orpo"))
    assert set(kinds) == set(typing.get_args(preference.DPOKind))
    assert set(kinds) == {name.split()[1] for name in SMOOTH if name.startswith("dpo")}


# ---------------------------------------------------------------- values


def test_the_value_clip_by_hand() -> None:
    """Value 1 was 0, return 2: clipped to 0.5 the error is 1.5; the second moved the other way and is not clipped."""
    values = torch.tensor([1.0, 1.0, math.nan], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 0.4, math.nan])
    found = value_loss(values, old, returns, torch.tensor([True, True, False]))
    assert found.loss.tolist() == pytest.approx([1.125, 0.18, 0.0]) and found.clipped.tolist() == [True, False, False]
    found.loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, 0.6, 0.0])
    with pytest.raises(ConfigError, match="cliprange"):
        value_loss(values, old, returns, torch.ones(3, dtype=torch.bool), cliprange=0.0)


def test_no_gradient_reaches_old_values_and_returns() -> None:
    parts = [drawn(4, seed=seed).requires_grad_() for seed in range(3)]
    value_loss(*parts, torch.ones(4, dtype=torch.bool)).loss.sum().backward()
    assert parts[0].grad is not None and parts[1].grad is None and parts[2].grad is None


def test_explained_variance() -> None:
    def found(returns: list[float], values: list[float]) -> float:
        goal = torch.tensor(returns, dtype=torch.float64)
        left = goal - torch.tensor(values, dtype=torch.float64)
        return explained_variance(
            {
                "tokens_sum": float(goal.numel()),
                "return_sum": float(goal.sum()),
                "left_sum": float(left.sum()),
                "return_square_sum": float((goal**2).sum()),
                "left_square_sum": float((left**2).sum()),
            }
        )

    returns = [1.0, 2.0, 6.0]
    assert found(returns, returns) == 1
    assert found(returns, [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert found(returns, [-1.0, -2.0, -6.0]) == pytest.approx(-3)
    assert found([1, 1, 0, 0], [0.8, 0.8, 0.2, 0.2]) == pytest.approx(0.84)
    assert found([0.1] * 3, [0.5, 0.2, 0.1]) == found([], []) == 0


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(list(range(8))), cut=st.integers(0, 8))
def test_order_and_cut_do_not_matter_to_tokens(order: list[int], cut: int) -> None:
    values = drawn(8, seed=5)
    tokens = (values, OTHER, OTHER + 0.3, MASK)
    whole = value_loss(*tokens)
    for part in (order[:cut], order[cut:]):
        found = value_loss(*(column[part] for column in tokens))
        assert torch.equal(found.loss, whole.loss[part]) and torch.equal(found.clipped, whole.clipped[part])
        assert torch.equal(supervised.sft(values[part], MASK[part]), supervised.sft(values, MASK)[part])
    right = ROWS < 2
    shares = [supervised.positive_lm(values[p], MASK[p], right[p], tokens=4) for p in (order[:cut], order[cut:])]
    torch.testing.assert_close(sum(shares), supervised.positive_lm(values, MASK, right, tokens=4))


# ---------------------------------------------------------------- supervised


def test_a_prediction_is_trained_where_the_next_token_is() -> None:
    assert supervised.next_token_mask(torch.tensor([[0, 1, 0, 1]])).tolist() == [[True, False, True]]


def test_sft_and_the_likelihood_of_right_answers_by_hand() -> None:
    log_probs = torch.tensor([-1.0, math.nan, -3.0, -5.0], requires_grad=True)
    mask, right = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    assert supervised.sft(log_probs, mask).tolist() == [1.0, 0.0, 3.0, 5.0]
    value = supervised.positive_lm(log_probs, mask, right, tokens=2, coeff=0.5)
    value.backward()
    assert float(value.detach()) == 1.0
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-0.25, 0.0, -0.25, 0.0]
    none = supervised.positive_lm(log_probs, mask, torch.zeros(4, dtype=torch.bool), tokens=0)
    assert float(none.detach()) == 0.0 and none.requires_grad


# ---------------------------------------------------------------- pairs


def pair(kind: Any, **more: Any) -> preference.PairLoss:
    """Chosen -3, rejected -5, the reference says -4 and -4."""
    numbers = (torch.tensor([number]) for number in (-3.0, -5.0, -4.0, -4.0))
    return preference.dpo(*numbers, kind=kind, **more)


def test_dpo_by_hand() -> None:
    found = pair("sigmoid")
    assert float(found.loss) == pytest.approx(0.59814, abs=1e-5)
    assert (float(found.reward_chosen), float(found.reward_rejected)) == pytest.approx((0.1, -0.1))
    assert found.correct.tolist() == [True]
    assert float(pair("hinge").loss) == pytest.approx(0.8)
    assert float(pair("ipo").loss) == pytest.approx(9.0)
    mixed = 0.75 * math.log1p(math.exp(-0.2)) + 0.25 * math.log1p(math.exp(0.2))
    assert float(pair("sigmoid", label_smoothing=0.25).loss) == pytest.approx(mixed)
    lengths = {"chosen_lengths": torch.tensor([2]), "rejected_lengths": torch.tensor([4])}
    averaged = pair("ipo", **lengths)
    assert float(averaged.loss) == pytest.approx((0.5 + 0.25 - 5) ** 2)
    assert float(averaged.reward_chosen) == pytest.approx(0.1)  # of sums
    assert float(pair("sigmoid", **lengths).loss) == pytest.approx(0.59814, abs=1e-5)


@pytest.mark.parametrize("wrong", [{"kind": "kto"}, {"beta": 0.0}, {"label_smoothing": 0.7}])
def test_options_of_dpo_that_make_no_sense_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        pair(**{"kind": "sigmoid", **wrong})
    assert caught.value.code == "config.type"


def test_the_reference_and_the_margin_have_no_gradient_and_no_pairs_is_no_loss() -> None:
    parts = [drawn(3, seed=seed).requires_grad_() for seed in range(5)]
    loss = preference.dpo(*parts[:4]).loss.sum()
    (loss + preference.bradley_terry(*parts[:2], margin=parts[4]).loss.sum()).backward()
    assert all((part.grad is not None) == (number < 2) for number, part in enumerate(parts))
    none = torch.zeros(0, requires_grad=True)
    for found in (preference.dpo(none, none), preference.bradley_terry(none, none)):
        assert float(found.loss.sum().detach()) == 0 and found.loss.requires_grad


def test_an_extreme_difference_stays_finite() -> None:
    far = torch.tensor([1e6, -1e6], dtype=torch.bfloat16, requires_grad=True)
    for found in (preference.dpo(far, -far), preference.bradley_terry(far, -far)):
        assert found.loss.dtype == torch.float32 and bool(found.loss.isfinite().all())


def test_bradley_terry_by_hand() -> None:
    found = preference.bradley_terry(
        torch.tensor([2.0]), torch.tensor([1.0]), margin=torch.tensor([1.0]), center_coeff=0.1
    )
    assert float(found.loss) == pytest.approx(math.log(2) + 0.9) and found.correct.tolist() == [True]


def test_online_pairs_and_equal_scores() -> None:
    found = preference.online_pairs(torch.tensor([1.0, 2.0, 3.0, 3.0]))
    assert found.chosen.tolist() == [False, True, True, False] and found.distinct.tolist() == [True, False]


def test_softmean_lies_between_mean_and_maximum() -> None:
    scores = torch.tensor([0.0, 1.0, 1.0])
    assert float(preference.softmean(scores, beta=0.0)) == pytest.approx(2 / 3)
    assert float(preference.softmean(scores, beta=1.0)) == pytest.approx(math.log((1 + 2 * math.e) / 3))
    assert float(preference.softmean(scores * 1000, beta=5.0)) == pytest.approx(1000, abs=0.1)


def test_sppo_by_hand_and_rows_without_a_token() -> None:
    current = torch.tensor([-1.0, -2.0, math.nan, -1.0], requires_grad=True)
    mask, rows = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 2])
    targets = preference.sppo_targets(torch.tensor([1.0, 0.0, 0.5]))
    assert targets.tolist() == [0.5, -0.5, 0.0]
    found = preference.sppo(current, torch.full((4,), -2.0), mask, rows, targets, eta=2.0)
    assert found.tolist() == [0.0, 0.0, 1.0]  # (1 + 0 - 1)^2, nothing, (1 - 0)^2
    found.sum().backward()
    assert current.grad is not None and current.grad.tolist() == [0.0, 0.0, 0.0, 2.0]


# ---------------------------------------------------------------- entropy


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), share=st.floats(0.0, 1.0), valid=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_tokens_of_highest_entropy_are_kept(seed: int, share: float, valid: float) -> None:
    mask = torch.rand(20, generator=torch.Generator().manual_seed(seed)) < valid
    values = torch.where(mask, drawn(20, seed=seed).abs(), math.nan)
    kept, count = entropy.high_entropy(values, mask, share=share), int(mask.sum())
    assert int(kept.sum()) == min(max(1, int(count * share + 1e-6)), count) and not (kept & ~mask).any()
    dropped = mask & ~kept
    if kept.any() and dropped.any():
        assert float(masked(values, kept)[kept].min()) > float(values[dropped].max())


def test_the_entropy_coefficient_grows_while_entropy_is_low() -> None:
    found = entropy.next_entropy_coeff(0.01, 0.1, target=0.3, step=0.01, high=0.015)
    assert found == (0.015, 0.015)
    assert entropy.next_entropy_coeff(0.015, 0.5, target=0.3, step=0.01) == (pytest.approx(0.005), 0.0)
    assert entropy.next_entropy_coeff(0.005, 0.5, target=0.3, step=0.01) == (0.0, 0.0)
