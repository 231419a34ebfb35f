"""Estimators without a critic: rules that hold for all of them, and second definitions written as loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_lab import required_options
from torch import Tensor

from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.errors import ConfigError
from learners.algorithms import advantages as adv
from learners.algorithms.advantages import Advantage
from learners.algorithms.passk import pass_at_k, pass_at_means, passk_advantages, pkpo_binary
from learners.algorithms.registry import find_function
from learners.algorithms.types import Estimate, Rollouts


def with_options(function: Advantage, **options: object) -> Advantage:
    return lambda rollouts: function(rollouts, **options)


#: Options with which a name of the registry is called here, where its defaults do not fit these batches.
OPTIONS: dict[str, dict[str, object]] = {
    "grpo_passk": {"singleton": "zero"},
    "passk_training": {"k": 2},
    "reinforce_plus_plus": {"gamma": 0.9},
    "gdpo": {"weights": [1.0, 0.5]},
    "gae": {"gamma": 0.9, "lam": 0.8},
    "gae_length_adaptive": {"alpha": 0.5},
    "vtrace": {"gamma": 0.9, "lam": 0.8, "rho_bar": 1.5},
}
#: Every name of the registry, so that a new one is under these rules at once, and some forms beside them.
ALL: dict[str, Advantage] = {
    name: with_options(find_function("advantage", name), **required_options("advantage", name), **OPTIONS.get(name, {}))
    for name in algorithms.ADVANTAGES
} | {
    "grpo_score": with_options(adv.grpo, singleton="score"),
    "optimal_token_baseline_off_policy": with_options(adv.optimal_token_baseline, off_policy=True),
}
#: GroupMachine whose rewards are all equal give exactly 0 with these.
BY_GROUP = ["win_rate", "grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "passk_training"]


def random_rollouts(seed: int, *, rows: int = 7, tokens: int = 6) -> Rollouts:
    """A batch with holes, empty rows, groups of any size in any order, and ties."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.rand(rows, tokens, generator=random) < 0.7
    rewards = normal(rows, tokens).round() / 2  # ties
    return Rollouts(
        rewards=rewards,
        mask=mask,
        groups=torch.randint(0, 3, (rows,), generator=random) * 5 - 2,
        values=normal(rows, tokens),
        bootstrap=normal(rows),
        baselines=normal(rows),
        parts=normal(2, rows),
        proximal=-normal(rows, tokens).abs(),
        behaviour=-normal(rows, tokens).abs(),
        square_sums=normal(rows, tokens).sigmoid(),
        lengths=mask.sum(-1),
        process=normal(rows, tokens) / 10,
    )


def mapped(rollouts: Rollouts, rows: Callable[[Tensor], Tensor], tokens: Callable[[Tensor], Tensor]) -> Rollouts:
    """`rows` of everything with a row, after `tokens` of everything with tokens."""
    fields = {}
    for name, value in rollouts._asdict().items():
        if value is None:
            fields[name] = None
        elif name == "parts":
            fields[name] = rows(value.T).T
        else:
            fields[name] = rows(tokens(value) if value.ndim == 2 else value)
    return Rollouts(**fields)


def same(got: Estimate, wanted: Estimate, places: Callable[[Tensor], Tensor] = lambda value: value) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        if theirs is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, places(theirs), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- rules for all


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_order_padding_holes_and_garbage_change_nothing(name: str, seed: int) -> None:
    function, rollouts = ALL[name], random_rollouts(seed)
    wanted = function(rollouts)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    same(function(mapped(rollouts, lambda v: v[order], lambda v: v)), wanted, lambda v: v[order])
    wider = torch.tensor([0, 1, 2, 6, 3, 6, 4, 5, 6])  # two columns of padding inside, one at the end

    def widen(values: Tensor) -> Tensor:
        filler = torch.zeros(7, 1).bool() if values.dtype == torch.bool else torch.full((7, 1), torch.nan)
        return torch.cat((values, filler.to(values.dtype)), -1)[:, wider]

    garbage = rollouts._replace(
        **{
            field: torch.where(
                rollouts.mask, value, torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(2).double()
            )
            for field, value in rollouts._asdict().items()
            if value is not None and value.dtype == torch.float64 and value.shape == rollouts.mask.shape
        }
    )
    got = function(mapped(garbage, lambda v: v, widen))
    same(got, wanted, lambda v: torch.cat((v, torch.zeros(7, 1)), -1)[:, wider])
    assert not bool(got.advantages[~widen(rollouts.mask)].any())


@pytest.mark.parametrize("name", ALL)
def test_nothing_has_a_gradient_and_nothing_is_changed(name: str) -> None:
    rollouts = random_rollouts(3)
    before = [None if value is None else value.clone() for value in rollouts]
    leaves = rollouts._replace(
        **{
            field: value.clone().requires_grad_()
            for field, value in rollouts._asdict().items()
            if value is not None and value.dtype == torch.float64
        }
    )
    found = ALL[name](leaves)
    assert not found.advantages.requires_grad and (found.returns is None or not found.returns.requires_grad)
    ALL[name](rollouts)
    for old, new in zip(before, rollouts, strict=True):
        assert old is None or torch.equal(old, new)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (3, 4)])
def test_no_tokens_give_zeros(name: str, shape: tuple[int, int]) -> None:
    rows, tokens = shape
    rollouts = random_rollouts(1, rows=rows, tokens=tokens)
    rollouts = rollouts._replace(mask=torch.zeros(shape, dtype=torch.bool), groups=torch.zeros(rows).long())
    found = ALL[name](rollouts)
    assert found.advantages.shape == shape and not bool(found.advantages.any())


@pytest.mark.parametrize("name", BY_GROUP)
def test_equal_scores_give_exactly_zero_and_groups_may_be_scattered(name: str) -> None:
    scores = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0]]).bool()
    rewards = torch.where(mask, scores[:, None] / mask.sum(-1, keepdim=True), 7.0)
    function = with_options(adv.passk_training, k=1) if name == "passk_training" else ALL[name]
    found = function(Rollouts(rewards, mask, torch.tensor([7, 3, 7, 3, 7]))).advantages
    assert not bool(found[[0, 2, 4]].any())
    assert float(found[1, 0]) > 0 >= float(found[3, 0])


def test_what_is_missing_is_named() -> None:
    bare = random_rollouts(0)._replace(
        values=None, baselines=None, parts=None, proximal=None, square_sums=None, process=None
    )
    for name, field in (
        ("gae", "values"),
        ("vtrace", "values"),
        ("remax", "baselines"),
        ("gdpo", "parts"),
        ("optimal_token_baseline", "proximal"),
        ("prime", "process"),
    ):
        with pytest.raises(ConfigError, match=field):
            ALL[name](bare)


# ---------------------------------------------------------------- second definitions


def scores_of(rollouts: Rollouts) -> list[float]:
    return [
        sum(float(r) for r, m in zip(row, keep, strict=True) if m)
        for row, keep in zip(rollouts.rewards, rollouts.mask, strict=True)
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_baselines_of_groups_as_loops(seed: int) -> None:
    rollouts = random_rollouts(seed)
    scores, groups = scores_of(rollouts), rollouts.groups.tolist()
    lengths = rollouts.mask.sum(-1).tolist()
    for row in range(7):
        mates = [other for other in range(7) if groups[other] == groups[row]]
        others = [other for other in mates if other != row]
        loo = scores[row] - (math.fsum(scores[o] for o in others) / len(others) if others else 0)
        tokens = sum(lengths[mate] for mate in mates)
        weighted = sum(lengths[mate] * scores[mate] for mate in mates) / tokens if tokens and others else 0
        mean = sum(scores[mate] for mate in mates) / len(mates)
        std = math.sqrt(sum((scores[mate] - mean) ** 2 for mate in mates) / len(others)) if others else 0
        for name, wanted in (
            ("rloo", loo),
            ("opo", scores[row] - weighted),
            ("grpo", (scores[row] - mean) / (std + 1e-6) if others else 0),
        ):
            got = ALL[name](rollouts).advantages[row]
            torch.testing.assert_close(got, torch.where(rollouts.mask[row], wanted, 0.0).double())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tail=st.booleans())
def test_optimal_token_baseline_as_loops(seed: int, tail: bool) -> None:
    rollouts = random_rollouts(seed)
    got = adv.optimal_token_baseline(rollouts, handle_zero_tail=tail, off_policy=True).advantages
    tracks = []  # of each row: (return, running weight) at its trained tokens
    for row in range(7):
        places = rollouts.mask[row].nonzero().flatten().tolist()
        total, track = 0.0, []
        for place in places:
            p, b = rollouts.proximal[row, place], rollouts.behaviour[row, place]  # type: ignore[index]
            weight = 1 - 2 * math.exp(p) + float(rollouts.square_sums[row, place])  # type: ignore[index]
            total += weight * math.exp(p - b) ** 2
            track.append((float(rollouts.rewards[row, [q for q in places if q >= place]].sum()), total))
        tracks.append(track)
    for row, track in enumerate(tracks):
        mates = [tracks[o] for o in range(7) if rollouts.groups[o] == rollouts.groups[row]]
        longest_other = max((len(mate) for mate in mates if mate is not track), default=0)
        for rank, (place, (value, _)) in enumerate(zip(rollouts.mask[row].nonzero().flatten(), track, strict=True)):
            having = [mate[rank] for mate in mates if len(mate) > rank]
            baseline = sum(g * w for g, w in having) / (sum(w for _, w in having) + 1e-8)
            if len(mates) == 1 or (tail and rank >= longest_other):
                baseline = 0.0
            assert float(got[row, place]) == pytest.approx(value - baseline, rel=1e-7, abs=1e-9)


def test_mean_pass_at_k_takes_the_groups_that_have_k_samples() -> None:
    correct, groups = torch.tensor([1, 0, 0, 0, 1, 0, 1, 0, 0]) > 0, torch.tensor([7, 7, 7, 7, 3, 3, 3, 3, 9])
    found = pass_at_means(correct, groups)
    assert found == {2: pytest.approx((0.5 + 5 / 6) / 2), 4: 1.0}
    assert pass_at_means(correct[:1], groups[:1]) == pass_at_means(correct[:0], groups[:0]) == {}


@pytest.mark.parametrize("correct", [[1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0], [1, 1], [0, 0, 0], [1], [0]])
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_pass_at_k_is_the_mean_over_all_subsets(correct: list[int], k: int) -> None:
    n, size = len(correct), min(k, len(correct))
    subsets = list(itertools.combinations(range(n), size))
    won = [max(correct[item] for item in subset) for subset in subsets]
    mean = sum(won) / len(won)
    std = math.sqrt(mean * (1 - mean))
    assert pass_at_k(n, sum(correct), size) == pytest.approx(mean)
    groups = torch.full((n,), 4)
    rewards = pkpo_binary(torch.tensor(correct), groups, k=k).tolist()
    advantages = passk_advantages(torch.tensor(correct), groups, k=k).tolist()
    for item in range(n):
        mine = [result for subset, result in zip(subsets, won, strict=True) if item in subset]
        assert rewards[item] == pytest.approx(sum(mine) / len(subsets))
        wanted = sum((result - mean) / std for result in mine) / len(mine) if std else 0
        assert advantages[item] == pytest.approx(wanted, abs=1e-12)


# ---------------------------------------------------------------- choices of their own


def outcomes(scores: list[float], groups: list[int]) -> Rollouts:
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    return Rollouts(rewards, torch.ones_like(rewards).bool(), torch.tensor(groups))


def test_a_lone_survivor() -> None:
    alone = outcomes([3.0, 1.0, 0.0], [0, 1, 1])
    firsts = {name: float(ALL[name](alone).advantages[0, 0]) for name in ("grpo", "grpo_score", "rloo", "opo")}
    assert firsts == {"grpo": 0.0, "grpo_score": pytest.approx(3 / (1 + 1e-6)), "rloo": 3.0, "opo": 3.0}
    assert float(adv.dr_grpo(alone, singleton="score").advantages[0, 0]) == 3
    assert float(ALL["grpo_passk"](alone).advantages[0, 0]) == 0
    with pytest.raises(ConfigError, match="group of one"):
        adv.grpo_passk(alone)


def test_best_minus_second_best() -> None:
    found = adv.grpo_passk(outcomes([1.0, 3.0, 2.5, 4.0, 4.0], [0, 0, 0, 1, 1]), norm_by_std=False)
    assert found.advantages[:, 0].tolist() == [0, 0.5, 0, 0, 0]


def test_a_weighted_mean_of_equal_scores_is_that_score() -> None:
    """0.7 + 1.4 + 2.1 over 6 tokens is not 0.7 in binary: the advantage is 0 all the same."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    rewards = torch.zeros(3, 3).double()
    rewards[:, 0] = 0.7
    assert not bool(adv.opo(Rollouts(rewards, mask, torch.zeros(3).long())).advantages.any())


def test_gpg_scales_by_the_share_of_rows_with_a_score() -> None:
    found = adv.gpg(outcomes([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]), f_norm=2.0)
    assert found.advantages[:, 0].tolist() == [1.0, -1.0, 0, 0]


def test_win_rates_by_hand() -> None:
    """Of 3 samples the best beats two and ties with itself: 2.5 of 3."""
    rollouts = outcomes([1.0, 0.0, 0.0, 5.0], [0, 0, 0, 1])
    assert adv.win_rate(rollouts).advantages[:, 0].tolist() == pytest.approx(
        [2.5 / 3 - 0.5, 1 / 3 - 0.5, 1 / 3 - 0.5, 0]
    )
    smooth = adv.win_rate(rollouts, scale=2.0).advantages[:, 0].tolist()
    won = 1 / (1 + math.exp(-2))
    assert smooth == pytest.approx([(2 * won - 1) / 3, (0.5 - won) / 3, (0.5 - won) / 3, 0])


def test_the_softmean_of_the_batch_by_hand() -> None:
    rollouts = outcomes([0.0, 1.0, 1.0], [0, 0, 1])
    level = math.log((1 + 2 * math.exp(2)) / 3) / 2
    found = adv.softmean(rollouts, beta=2.0).advantages[:, 0].tolist()
    assert found == pytest.approx([-level, 1 - level, 1 - level])
    assert adv.softmean(rollouts, beta=0.0).advantages[:, 0].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_passk_training_reads_right_and_wrong_from_the_score() -> None:
    found = adv.passk_training(outcomes([0.9, 0.4, 0.2, -1.0], [0] * 4), k=2, correct_above=0.5)
    assert found.advantages[:, 0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    with pytest.raises(ConfigError, match="at least 1"):
        adv.passk_training(outcomes([1.0], [0]), k=0)


def test_gdpo_wants_a_weight_for_each_component() -> None:
    with pytest.raises(ConfigError, match="3 weights for 2"):
        adv.gdpo(random_rollouts(0), weights=[1.0, 1.0, 1.0])
