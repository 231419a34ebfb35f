"""GAE and V-trace against their definitions as loops, whitening against numpy, and what bootstraps and holes do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learners.algorithms.gae import (
    adaptive_lambdas,
    gae,
    gae_decoupled,
    gae_length_adaptive,
    vtrace,
)
from learners.algorithms.tensors import (
    following,
    last_tokens,
    masked_whiten,
    place_outcomes,
    scan_back,
    sequence_lengths,
    sequence_means,
    sequence_sums,
)
from learners.algorithms.types import Rollouts


def random_rollouts(seed: int) -> Rollouts:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.rand(5, 7, generator=random) < 0.7
    return Rollouts(
        normal(5, 7),
        mask,
        torch.zeros(5).long(),
        values=normal(5, 7),
        bootstrap=normal(5),
        proximal=normal(5, 7),
        behaviour=normal(5, 7),
    )


def rows_of(rollouts: Rollouts) -> list[tuple[list[int], list[float], list[float], float]]:
    """Places, rewards and values of the trained tokens, and the value after them."""
    assert rollouts.values is not None and rollouts.bootstrap is not None
    return [
        ([int(place) for place in mask.nonzero()], rewards[mask].tolist(), values[mask].tolist(), float(last))
        for mask, rewards, values, last in zip(
            rollouts.mask, rollouts.rewards, rollouts.values, rollouts.bootstrap, strict=True
        )
    ]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_sum_of_the_discounted_residuals(seed: int, gamma: float, lam: float) -> None:
    rollouts = random_rollouts(seed)
    found = gae(rollouts, gamma=gamma, lam=lam, whiten=False)
    assert found.returns is not None
    for row, (places, rewards, values, last) in enumerate(rows_of(rollouts)):
        ahead = [*values[1:], last][: len(values)]  # a row without trained tokens has none
        residuals = [r + gamma * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
        for number, place in enumerate(places):
            wanted = sum((gamma * lam) ** j * residual for j, residual in enumerate(residuals[number:]))
            assert float(found.advantages[row, place]) == pytest.approx(wanted, abs=1e-9)
            assert float(found.returns[row, place]) == pytest.approx(wanted + values[number], abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), lam=st.floats(0, 1), bars=st.tuples(*[st.floats(0.1, 5)] * 3))
def test_vtrace_is_the_sum_of_its_definition(seed: int, lam: float, bars: tuple[float, float, float]) -> None:
    rollouts, gamma = random_rollouts(seed), 0.9
    rho_bar, c_bar, pg_bar = bars
    found = vtrace(rollouts, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_bar)
    assert found.returns is not None and rollouts.proximal is not None and rollouts.behaviour is not None
    ratios = (rollouts.proximal - rollouts.behaviour).exp()
    for row, (places, rewards, values, last) in enumerate(rows_of(rollouts)):
        x = ratios[row, places].tolist()
        ahead = [*values[1:], last][: len(values)]  # a row without trained tokens has none
        targets = []
        for start in range(len(places)):  # equation 1: sum over t of gamma^(t-s) (product of c) delta_t
            target = values[start]
            for t in range(start, len(places)):
                traces = math.prod(lam * min(c_bar, x[i]) for i in range(start, t))
                delta = min(rho_bar, x[t]) * (rewards[t] + gamma * ahead[t] - values[t])
                target += gamma ** (t - start) * traces * delta
            targets.append(target)
        for number, place in enumerate(places):
            later = [*targets, last][number + 1]
            gain = min(pg_bar, x[number]) * (rewards[number] + gamma * later - values[number])
            assert float(found.returns[row, place]) == pytest.approx(targets[number], rel=1e-9, abs=1e-9)
            assert float(found.advantages[row, place]) == pytest.approx(gain, rel=1e-9, abs=1e-9)


def test_on_policy_vtrace_is_gae_with_lambda_one() -> None:
    rollouts = random_rollouts(4)
    rollouts = rollouts._replace(behaviour=rollouts.proximal)
    ours, theirs = vtrace(rollouts, gamma=0.9), gae(rollouts, gamma=0.9, lam=1.0, whiten=False)
    assert ours.returns is not None and theirs.returns is not None
    torch.testing.assert_close(ours.returns, theirs.returns)
    torch.testing.assert_close(ours.advantages, theirs.advantages)


def test_decoupled_lambdas_are_two_passes() -> None:
    rollouts = random_rollouts(5)
    both = gae_decoupled(rollouts, lam_actor=0.3, lam_critic=0.8, whiten=False)
    for name, lam in (("advantages", 0.3), ("returns", 0.8)):
        one = gae(rollouts, lam=lam, whiten=False)
        torch.testing.assert_close(getattr(both, name), getattr(one, name))


def test_lambda_grows_with_the_length() -> None:
    mask = torch.zeros(4, 40).bool()
    for row, length in enumerate((0, 20, 40, 25)):
        mask[row, :length] = True
    assert adaptive_lambdas(mask, alpha=0.05).tolist() == pytest.approx([0, 0, 0.5, 0.2])
    values = torch.ones(4, 40).double()
    batch = Rollouts(torch.zeros(4, 40).double(), mask, torch.zeros(4).long(), values=values)
    found = gae_length_adaptive(batch, whiten=False).advantages
    assert float(found[1, 0]) == 0 and float(found[1, 19]) == -1  # lambda 0: the last residual reaches nobody
    assert float(found[2, 38]) == pytest.approx(-0.5)


def test_whitening_needs_two_values_and_sees_the_mask_alone() -> None:
    values = torch.tensor([[1.0, torch.nan, 4.0], [torch.inf, 2.0, 5.0]]).double()
    mask = torch.tensor([[True, False, True], [False, True, True]])
    chosen = np.array([1.0, 4.0, 2.0, 5.0])
    wanted = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    found = masked_whiten(values, mask)
    np.testing.assert_allclose(found[mask], wanted)
    assert not bool(found[~mask].any())
    np.testing.assert_allclose(masked_whiten(values, mask, shift_mean=False)[mask], wanted + chosen.mean())
    single = torch.zeros_like(mask)
    single[0, 0] = True
    assert not bool(masked_whiten(values, single).any())
    assert not bool(masked_whiten(values, torch.zeros_like(mask)).any())


def test_places_of_a_row() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    assert last_tokens(mask).long().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    placed = place_outcomes(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]
    values = torch.arange(12.0).reshape(3, 4)
    after = following(values, mask, torch.tensor([-1.0, -2.0, -3.0]))
    assert after[mask].tolist() == [2, -1, 10, 11, -3]
    assert scan_back(values, 0.5, mask)[mask].tolist() == [1, 2, 9 + 15.5 / 2, 15.5, 11]


def test_sums_of_flat_sequences_keep_those_without_tokens_and_their_gradient() -> None:
    values = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 5.0], requires_grad=True)
    mask = torch.tensor([True, False, True, False, True])
    sequences = torch.tensor([0, 0, 0, 1, 2])
    assert sequence_sums(values, mask, sequences, 4).tolist() == [4, 0, 5, 0]
    assert sequence_lengths(mask, sequences).tolist() == [2, 0, 1]
    means = sequence_means(values, mask, sequences)
    assert means.tolist() == [2, 0, 5]
    means.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, 0, 0.5, 0, 1]
    none = torch.zeros(0, requires_grad=True)
    sequence_means(none, torch.zeros(0).bool(), torch.zeros(0).long()).sum().backward()
    assert none.grad is not None
