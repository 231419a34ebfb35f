"""Metrics by lag, effective sample sizes, ages and weights by age: tables add, quantiles lie in their bin, definitions
are spelled out by loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.corrections import icepop, tis
from learners.algorithms.metrics import (
    BIN_EDGES,
    BINS,
    COLUMNS,
    LAG_BUCKETS,
    correction_table,
    ess_fraction,
    ess_of_sums,
    ratio_quantile,
    row_metrics,
    step_scale,
    table_metrics,
)
from learners.algorithms.staleness import capacity, staleness, staleness_weights

LAGS = [0, 1, 2, 3, 4, 5, 8, 9, 40]


def rows(lengths: list[int], *, seed: int = 0, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Proximal, behaviour, mask (with holes) and row numbers."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    behaviour = -torch.rand(count, generator=generator, dtype=torch.float64)
    proximal = behaviour + torch.randn(count, generator=generator, dtype=torch.float64) * spread
    mask = torch.rand(count, generator=generator) < 0.8
    return proximal, behaviour, mask, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=60, deadline=None)
def test_tables_of_pieces_add_up_in_any_order(lengths: list[int], seed: int, data: st.DataObject) -> None:
    proximal, behaviour, mask, sequences = rows(lengths, seed=seed)
    lags = torch.tensor(data.draw(st.lists(st.sampled_from(LAGS), min_size=len(lengths), max_size=len(lengths))))
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))

    def table(chosen: list[int]) -> Tensor:
        places = torch.cat([torch.zeros(0).long(), *(torch.nonzero(sequences == row)[:, 0] for row in chosen)])
        numbers = torch.repeat_interleave(
            torch.arange(len(chosen)), torch.tensor([lengths[row] for row in chosen]).long()
        )
        tokens = (proximal[places], behaviour[places], mask[places], numbers)
        return correction_table(*tokens, lags=lags[chosen], correction=icepop(*tokens, lower=0.8, upper=1.3))

    whole, pieces = table(list(range(len(lengths)))), table(order[:cut]) + table(order[cut:])
    torch.testing.assert_close(whole, pieces, rtol=1e-12, atol=1e-12)
    dirty = torch.where(mask, proximal, torch.nan), torch.where(mask, behaviour, torch.inf)
    seen = correction_table(*dirty, mask, sequences, lags=lags)
    torch.testing.assert_close(seen, correction_table(proximal, behaviour, mask, sequences, lags=lags))
    assert seen.isfinite().all()


def test_every_lag_has_its_line_and_shares_are_of_its_own_tokens() -> None:
    count = len(LAGS)
    proximal = torch.linspace(-0.5, 0.5, count, dtype=torch.float64)
    tokens = (proximal, torch.zeros(count), torch.ones(count).bool(), torch.arange(count))
    table = correction_table(
        *tokens, lags=torch.tensor(LAGS), correction=tis(*tokens, upper=1.2), clipped=proximal > 0.3
    )
    assert table.shape == (len(LAG_BUCKETS), len(COLUMNS) + BINS)
    assert table[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    metrics = table_metrics(table)
    assert metrics["lag/3-4/tokens_share"] == pytest.approx(2 / 9)
    assert metrics["lag/9+/clip_share"] == 1
    assert metrics["lag/0/clip_share"] == 0
    assert metrics["clip_share"] == pytest.approx(2 / 9)
    assert metrics["truncated_share"] == pytest.approx(int((proximal.exp() > 1.2).sum()) / 9)
    assert metrics["lag/1/ratio_p50"] == pytest.approx(math.exp(-0.375), rel=0.06)
    weights = proximal.exp().clamp(max=1.2)
    assert metrics["ess"] == pytest.approx(float(weights.sum() ** 2 / (9 * (weights**2).sum())))
    one = correction_table(*tokens, lags=torch.full((count,), 2))
    assert sum(name.startswith("lag/") for name in table_metrics(one)) == 11  # one lag, ten names and its share


@pytest.mark.parametrize("gaps", [[0.0, 3e-5], [0.02, -0.3, 0.1], [-1e-3], [-7.0, 2.0], [1.0, -0.999]])
def test_the_largest_gap_is_in_its_bin(gaps: list[float]) -> None:
    """Rounded up to the end of a bin, and never down."""
    behaviour = torch.tensor(gaps, dtype=torch.float64)
    count = len(gaps)
    tokens = (torch.zeros(count, dtype=torch.float64), behaviour, torch.ones(count).bool(), torch.arange(count))
    found = table_metrics(correction_table(*tokens, lags=torch.zeros(count).long()))
    largest = max(abs(gap) for gap in gaps)
    assert max(largest, 1e-4) <= found["lag/0/logprob_gap_max"] <= max(1.15 * largest, 1e-4) * (1 + 1e-9)
    assert found["lag/0/logprob_gap_mean"] == pytest.approx(sum(abs(gap) for gap in gaps) / count)


def test_rows_of_one_sample_share_its_weight() -> None:
    gaps = torch.tensor([0.0, 0.0, 4.0], dtype=torch.float64).log1p()  # weights 1, 1, 5; the first two rows share
    tokens = (gaps, torch.zeros(3), torch.ones(3).bool(), torch.arange(3))
    correction = tis(*tokens, upper=None)
    shares = torch.tensor([0.25, 0.75, 1.0])
    metrics = table_metrics(correction_table(*tokens, lags=torch.zeros(3).long(), correction=correction, shares=shares))
    assert metrics["ess_rows"] == pytest.approx(6**2 / (2 * 26))
    assert metrics["ess"] == pytest.approx(7**2 / (3 * 27))


def test_rejected_tokens_are_counted_and_rows_without_tokens_are_left_out() -> None:
    gaps = torch.tensor([0.0, 1.0, 0.0, 5.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    tokens = (gaps, torch.zeros(4), mask, torch.tensor([0, 0, 1, 2]))
    correction = tis(*tokens, reject=("token_k2",), thresholds=(0.1,))
    metrics = table_metrics(correction_table(*tokens, lags=torch.zeros(4).long(), correction=correction))
    assert metrics["rejected_share"] == pytest.approx(1 / 3)
    assert metrics["ess"] == pytest.approx(4 / (3 * 2))
    assert metrics["ess_rows"] == pytest.approx(1.5**2 / (2 * 1.25))
    assert metrics["proximal_ppl"] == pytest.approx((math.exp(-0.5) + 1) / 2)
    assert metrics["chi2_seq"] == pytest.approx((math.exp(2) + 1) / 2 - 1)
    assert metrics["chi2_token"] == pytest.approx((math.exp(2) + 2) / 3 - 1)


def test_how_far_the_policy_moved_and_what_the_dual_clip_bounded() -> None:
    proximal = torch.tensor([-1.0, -1.0, -2.0, math.nan], dtype=torch.float64)
    current = torch.tensor([-1.5, -1.0, -1.0, math.nan], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    tokens = (proximal, torch.zeros(4), mask, torch.tensor([0, 0, 1, 1]))
    table = correction_table(
        *tokens, lags=torch.tensor([0, 3]), current=current, dual_clipped=torch.tensor([False, True, False, True])
    )
    metrics = table_metrics(table)
    assert not table.requires_grad
    assert metrics["approx_kl"] == pytest.approx((0.5 + 0.0 - 1.0) / 3)
    assert metrics["dual_clip_share"] == pytest.approx(1 / 3)
    still = table_metrics(correction_table(*tokens, lags=torch.tensor([0, 3])))
    assert still["approx_kl"] == still["dual_clip_share"] == 0


def test_nothing_at_all_gives_zeros() -> None:
    empty = torch.zeros(0)
    for lags in (torch.zeros(0).long(), torch.tensor([3])):
        table = correction_table(empty, empty, empty.bool(), empty.long(), lags=lags)
        assert not table.any()
        metrics = table_metrics(table)
        assert metrics
        assert not any(metrics.values())


@given(seed=st.integers(0, 999), spread=st.sampled_from([1e-5, 1e-3, 0.1, 2.0, 50.0]), at=st.floats(0.0, 1.0))
@settings(max_examples=80, deadline=None)
def test_quantiles_lie_in_the_bin_of_the_exact_ones(seed: int, spread: float, at: float) -> None:
    proximal, behaviour, mask, sequences = rows([40, 13, 60], seed=seed, spread=spread)
    table = correction_table(proximal, behaviour, mask, sequences, lags=torch.zeros(3).long())
    got = math.log(ratio_quantile(table.sum(0)[len(COLUMNS) :], at))
    gaps = (proximal - behaviour)[mask].clamp(-20, 20).numpy()
    exact = float(np.quantile(gaps, at, method="inverted_cdf"))
    place = min(max(int(np.searchsorted(BIN_EDGES, exact)) - 1, 0), BINS - 1)
    slack = 1e-9
    assert BIN_EDGES[place] - slack <= got <= BIN_EDGES[place + 1] + slack
    assert abs(got - exact) <= max(2e-4, 0.14 * abs(exact)) + slack


def test_quantile_of_nothing_and_of_the_ends() -> None:
    assert math.isnan(ratio_quantile(torch.zeros(BINS), 0.5))
    ends = torch.zeros(BINS)
    ends[0] = ends[-1] = 1
    assert ratio_quantile(ends, 0.0) < 1e-7
    assert ratio_quantile(ends, 1.0) == pytest.approx(math.exp(20.0))


# ---------------------------------------------------------------- effective sample size


def test_effective_sample_size_is_one_for_equal_weights_and_one_nth_for_a_single_one() -> None:
    assert float(ess_fraction(torch.full((5,), 3.0))) == pytest.approx(1)
    assert float(ess_fraction(torch.tensor([0.0, 0.0, 7.0, 0.0]))) == pytest.approx(0.25)
    for nothing in (torch.zeros(3), torch.zeros(0)):
        assert float(ess_fraction(nothing)) == 0
    assert ess_of_sums(6.0, 18.0, 3) == pytest.approx(36 / 54)
    assert ess_of_sums(0.0, 0.0, 3) == ess_of_sums(0.0, 0.0, 0) == 0


def test_the_step_shrinks_with_the_root() -> None:
    assert step_scale(0.25) == pytest.approx(0.5)
    assert step_scale(1 + 1e-9) == 1
    assert step_scale(0.0) == 0


def test_row_weights_of_the_table_are_those_of_the_effective_sample_size() -> None:
    tokens = rows([5, 6, 7], seed=2)
    correction = tis(*tokens, level="sequence", upper=3.0)
    found = row_metrics(correction_table(*tokens, lags=torch.zeros(3).long(), correction=correction).sum(0))
    of_rows = torch.stack([correction.weights[tokens[2] & (tokens[3] == row)][0] for row in range(3)])
    assert found["ess_rows"] == pytest.approx(float(ess_fraction(of_rows)))


# ---------------------------------------------------------------- ages


@given(versions=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_ages_are_those_of_the_trained_tokens(versions: list[list[int]], data: st.DataObject) -> None:
    flat = [version for row in versions for version in row]
    masks = data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat)))
    numbers = [number for number, row in enumerate(versions) for _ in row]
    found = staleness(
        torch.tensor(flat).long(),
        torch.tensor(masks).bool(),
        torch.tensor(numbers).long(),
        current_version=9,
        count=len(versions),
    )
    for row in range(len(versions)):
        ages = [9 - flat[place] for place, number in enumerate(numbers) if number == row and masks[place]] or [0]
        got = [int(found.newest[row]), int(found.oldest[row]), int(found.span[row])]
        assert got == [min(ages), max(ages), max(ages) - min(ages)]
        assert float(found.mean[row]) == pytest.approx(sum(ages) / len(ages))


@pytest.mark.parametrize("kind", ["exp", "power"])
def test_older_rows_weigh_less_and_the_mean_stays_one(kind: str) -> None:
    lags = torch.tensor([3, 0, 1, 8])
    weights = staleness_weights(lags, kind=kind)  # type: ignore[arg-type]
    assert float(weights.mean()) == pytest.approx(1)
    assert weights.argsort(descending=True).tolist() == [1, 2, 0, 3]
    plain = staleness_weights(lags, kind=kind, normalize=False)  # type: ignore[arg-type]
    assert float(plain[1]) == 1
    torch.testing.assert_close(weights, plain / plain.mean())
    assert staleness_weights(torch.zeros(0), kind=kind).shape == (0,)  # type: ignore[arg-type]


def test_an_unknown_decay_is_refused() -> None:
    for kind, tau in (("linear", 4.0), ("exp", 0.0)):
        with pytest.raises(ConfigError, match=r"config\.type"):
            staleness_weights(torch.zeros(1), kind=kind, tau=tau)  # type: ignore[arg-type]


def test_capacity_is_bounded_by_slots_and_by_staleness() -> None:
    rules = {"version": 3, "batch_size": 8, "max_concurrent": 64, "accepted": 20, "running": 4}
    found = [capacity(max_staleness=limit, **rules) for limit in (0, 1, 2, 100)]
    assert found == [8, 16, 24, 60]
