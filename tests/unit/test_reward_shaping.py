"""Penalties, the KL controller, PRIME's rewards, and which rows and groups a batch keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from learners.algorithms.filters import accuracy_band, group_std, overlong_mask, pf_ppo_draw, pf_ppo_probs
from learners.algorithms.prime import ce_loss, prime, token_scores
from learners.algorithms.rewards import kl_penalty, next_kl_coeff, overlong_penalty
from learners.algorithms.types import Rollouts


def test_length_is_free_up_to_the_buffer_and_costs_the_factor_at_the_limit() -> None:
    found = overlong_penalty(torch.tensor([1, 16384, 18432, 20480]), max_len=20480, buffer_len=4096, factor=2.0)
    assert found.tolist() == [0, 0, -1, -2]
    for buffer_len in (0, 101):
        with pytest.raises(ConfigError, match="buffer_len"):
            overlong_penalty(torch.tensor([1]), max_len=100, buffer_len=buffer_len)


def test_the_mean_of_the_penalty_counts_rows_without_tokens() -> None:
    proximal = torch.tensor([[-1.0, torch.nan, -2.0], [torch.nan] * 3], requires_grad=True)
    reference = torch.tensor([[-1.5, torch.inf, -3.0], [torch.nan] * 3])
    mask = torch.tensor([[True, False, True], [False] * 3])
    found = kl_penalty(torch.ones(2, 3), proximal, reference, mask, coeff=0.1)
    assert float(found.kl) == pytest.approx(0.375)
    assert found.rewards.tolist() == [pytest.approx([0.95, 0, 0.9]), [0, 0, 0]]
    assert not found.rewards.requires_grad and not found.kl.requires_grad


@settings(max_examples=50, deadline=None)
@given(measured=st.floats(0, 10), sequences=st.integers(0, 1000))
def test_the_controller_moves_towards_its_target_within_its_bounds(measured: float, sequences: int) -> None:
    new = next_kl_coeff(0.2, measured, sequences, target=0.5, horizon=1000)
    assert math.copysign(1, new - 0.2) == math.copysign(1, measured - 0.5) or new == pytest.approx(0.2)
    assert abs(new - 0.2) <= 0.2 * 0.2 * sequences / 1000 + 1e-12
    with pytest.raises(ConfigError, match="horizon"):
        next_kl_coeff(0.2, measured, sequences, horizon=0)


# ---------------------------------------------------------------- filters


def test_a_group_is_kept_or_dropped_as_one() -> None:
    metric = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 0.3])
    groups = torch.tensor([7, 3, 7, 3, 7, 9])
    assert group_std(metric, groups).tolist() == [False, True, False, True, False, True]
    assert group_std(metric, groups, keep_singletons=False).tolist() == [False, True, False, True, False, False]
    assert accuracy_band(metric, groups, low=0.2, high=0.5).tolist() == [False, True, False, True, False, True]
    assert accuracy_band(metric, groups, low=0.5, high=0.5).tolist() == [False, True, False, True, False, False]
    assert group_std(torch.zeros(0), torch.zeros(0).long()).tolist() == []


def test_nearly_equal_is_not_equal() -> None:
    """0.1 + 0.2 is not 0.3: the exact comparison keeps what a rounded deviation would call flat, and the reverse."""
    assert group_std(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64), torch.zeros(2).long()).tolist() == [
        True,
        True,
    ]
    assert group_std(torch.tensor([0.1] * 3, dtype=torch.float64), torch.zeros(3).long()).tolist() == [False] * 3


def test_overlong_rows_are_not_trained() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    assert overlong_mask(mask, torch.tensor([1, 0])).tolist() == [[False, False], [True, False]]


def test_resampling_follows_the_probabilities_and_the_seed() -> None:
    probabilities = pf_ppo_probs(torch.tensor([2.0, 0.0, -1.0]))
    assert probabilities.tolist() == pytest.approx([0.8, 0, 0.2], abs=1e-6)
    drawn = pf_ppo_draw(probabilities, seed=1, step=2, count=4000)
    assert drawn.bincount(minlength=3).div(4000).tolist() == pytest.approx([0.8, 0, 0.2], abs=0.03)
    assert torch.equal(drawn, pf_ppo_draw(probabilities, seed=1, step=2, count=4000))
    assert not torch.equal(drawn, pf_ppo_draw(probabilities, seed=1, step=3, count=4000))
    assert pf_ppo_draw(probabilities, seed=0, step=0).shape == (3,)
    assert pf_ppo_draw(pf_ppo_probs(torch.zeros(0)), seed=0, step=0).tolist() == []
    assert pf_ppo_probs(torch.zeros(4)).tolist() == [0.25] * 4
    with pytest.raises(ConfigError, match="max_random"):
        pf_ppo_probs(torch.zeros(2), method="best")  # type: ignore[arg-type]


# ---------------------------------------------------------------- PRIME


def test_the_last_token_has_no_process_reward_and_garbage_none_either() -> None:
    model = torch.tensor([[-1.0, torch.nan, -2.0], [-1.0, -1.0, torch.inf]], requires_grad=True)
    reference = torch.tensor([[-3.0, -1.0, torch.nan], [-2.0, -1.5, -1.0]])
    mask = torch.tensor([[True, False, False], [True, True, False]])
    found = token_scores(model, reference, mask, beta=0.1, batch_norm=False)
    assert found.scores.tolist() == [[0, 0, 0], [pytest.approx(0.1), 0, 0]]
    assert found.q.tolist() == [[2, 0, 0], [1, 0.5, 0]]
    assert not found.scores.requires_grad
    scaled = token_scores(model, reference, mask, beta=0.1).scores
    assert float(scaled.detach().max()) == pytest.approx(0.1 / (0.1 + 1e-6))
    loss = ce_loss(found.q, torch.tensor([1.0, 0.0]), mask, beta=0.1)
    loss.backward()
    wanted = (math.log1p(math.exp(-0.2)) + math.log1p(math.exp(0.15))) / 2
    assert float(loss.detach()) == pytest.approx(wanted)
    assert model.grad is not None and model.grad[0].tolist() == [pytest.approx(-0.05 / (1 + math.exp(0.2))), 0, 0]


def test_no_rows_have_no_loss() -> None:
    q = torch.zeros(0, 3, requires_grad=True)
    loss = ce_loss(q, torch.zeros(0), torch.zeros(0, 3).bool())
    loss.backward()
    assert float(loss.detach()) == 0 and q.grad is not None


def test_both_sources_have_baselines_of_their_own() -> None:
    """Two rows of one group, written out: leave-one-out of the process rewards' means, and of the outcomes."""
    process = torch.tensor([[0.4, 0.0], [0.0, torch.nan]]).double()
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()
    found = prime(Rollouts(rewards, mask, torch.zeros(2).long(), process=process), coef_dpo=2.0, coef_gt=3.0)
    assert found.returns is not None
    # Process: means 0.2 and 0; r * 2 - 0.2 = 0.6, -0.2 | -0.2. Outcome: 2 - 1 = 1 | 0 - 1 = -1.
    last, first, other = -0.4 + 3, 1.2 - 0.4 + 3, -0.4 - 3
    assert found.returns.tolist() == [pytest.approx([first, last]), pytest.approx([other, 0])]
    alone = prime(Rollouts(rewards, mask, torch.tensor([0, 1]), process=process), coef_dpo=2.0, coef_gt=3.0)
    assert alone.returns is not None and alone.returns.tolist() == [pytest.approx([3.8, 3.0]), [0, 0]]
