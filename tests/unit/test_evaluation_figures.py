"""Figures of evaluations against brute force over all subsets, and their names."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.evaluation.statistics import (
    Outcome,
    best_at_n,
    figures,
    majority,
    metric_names,
    pass_at_k,
    sizes,
    standard_error,
)

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=1, max_size=6)


@given(REWARDS, st.data())
def test_best_is_the_mean_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rewards)))
    every = [max(subset) for subset in itertools.combinations(rewards, n)]
    assert best_at_n(rewards, n) == pytest.approx(statistics.fmean(every))


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_is_the_share_of_subsets_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(right)))
    every = [any(subset) for subset in itertools.combinations(right, n)]
    assert pass_at_k(len(right), sum(right), n) == pytest.approx(sum(every) / len(every))
    assert pass_at_k(len(right), sum(right), n) == pytest.approx(best_at_n([float(one) for one in right], n))


@pytest.mark.parametrize("numbers", [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_counts_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(*numbers)
    with pytest.raises(ConfigError):
        best_at_n([1.0], 2)


@pytest.mark.parametrize(
    ("rewards", "answers", "expected"),
    [
        ([1.0, 0.0, 0.0], ["4", "5", "5"], 0.0),  # the majority is wrong
        ([1.0, 1.0, 0.0], ["4", "4", "5"], 1.0),
        ([1.0, 0.0], ["4", "5"], 0.0),  # a tie does not flatter
        ([0.0, 1.0], ["4", "5"], 0.0),  # whatever the order
        ([0.5, 1.0, 0.0], ["a", "a", "b"], 0.75),  # one answer, two rewards: their mean
        ([1.0], ["x"], 1.0),
    ],
)
def test_majority(rewards: list[float], answers: list[str], expected: float) -> None:
    assert majority(rewards, answers) == expected


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from("abc")), min_size=1, max_size=8))
def test_the_order_of_samples_does_not_matter(pairs: list[tuple[float, str]]) -> None:
    shuffled = list(pairs)
    random.Random(1).shuffle(shuffled)
    assert majority(*zip(*pairs, strict=True)) == majority(*zip(*shuffled, strict=True))  # type: ignore[arg-type]


def test_standard_error_is_that_of_a_bootstrap_over_prompts() -> None:
    random_values = random.Random(3)
    values = [random_values.random() for _ in range(60)]
    means = [statistics.fmean(random_values.choices(values, k=60)) for _ in range(4000)]
    assert standard_error(values) == pytest.approx(statistics.stdev(means), rel=0.1)
    assert standard_error([0.3]) == 0.0


def test_sources_stand_alone_and_together() -> None:
    outcomes = [
        Outcome("a", (1.0, 0.0), ("x", "y"), {"f/length": (3.0, 5.0)}),
        Outcome("a", (1.0, 1.0), ("x", "x"), {"f/length": (1.0, 1.0)}),
        Outcome("b", (0.0, 0.0), ("x", "y")),
    ]
    found = figures(outcomes, correct_above=0.5)
    assert set(found) == {"a", "b", "all"}
    assert found["a"]["mean@2"] == 0.75 and found["all"]["mean@2"] == 0.5
    assert found["a"]["best@2"] == 1.0 and found["a"]["maj@2"] == 0.5 and found["b"]["pass@2"] == 0.0
    assert found["a"]["part:f/length/mean@2"] == 2.5 and "part:f/length/mean@2" not in found["b"]
    assert found["all"]["mean@2/se"] == pytest.approx(statistics.stdev([0.5, 1.0, 0.0]) / math.sqrt(3))
    assert set(figures(outcomes[:2], correct_above=0.5)) == {"a"}, "one source is all of them"
    assert figures([], correct_above=0.5) == {}


def test_right_is_above_the_threshold() -> None:
    outcomes = [Outcome("a", (0.5, 0.6), ("x", "y"))]
    assert figures(outcomes, correct_above=0.5)["a"]["pass@1"] == 0.5
    assert figures(outcomes, correct_above=0.4)["a"]["pass@1"] == 1.0


def test_names() -> None:
    outcomes = [Outcome("openai/gsm8k", (1.0, 0.0, 0.0, 1.0), ("x", "y", "z", "x"))]
    names = metric_names(figures(outcomes, correct_above=0.5), k=4)
    core = {name for name in names if name.startswith("val-core/")}
    assert core == {
        "val-core/openai/gsm8k/reward/mean@4",
        "val-core/openai/gsm8k/reward/best@4/mean",
        "val-core/openai/gsm8k/reward/maj@4/mean",
        "val-core/openai/gsm8k/acc/pass@4/mean",
    }
    assert {
        "val-aux/openai/gsm8k/reward/best@2/mean",
        "val-aux/openai/gsm8k/acc/pass@1/mean",
        "val-aux/openai/gsm8k/reward/mean@4/se",
        "val-aux/openai/gsm8k/acc/pass@4/se",
    } <= set(names)
    assert sizes(1) == [1] and sizes(8) == [1, 2, 4, 8] and sizes(5) == [1, 2, 4, 5]
    only = metric_names(figures([Outcome("a", (1.0,), ("x",))], correct_above=0.5), k=1)
    assert set(only) == {
        "val-core/a/reward/mean@1",
        "val-aux/a/reward/mean@1/se",
        "val-core/a/acc/pass@1/mean",
        "val-aux/a/acc/pass@1/se",
    }


def test_a_part_called_reward_does_not_hide_the_reward() -> None:
    """A reward function is often called `reward`: its part has the same name as the sum."""
    outcomes = [
        Outcome("a", (1.0,), ("x",), {"reward": (3.0,), "acc": (1.0,)}),
        Outcome("a", (0.0,), ("y",), {"reward": (5.0,), "acc": (1.0,)}),
        Outcome("a", (1.0,), ("z",)),
    ]
    found = figures(outcomes, correct_above=0.5)
    names = metric_names(found, k=1)
    assert len(names) == len(found["a"]), "every figure has a name of its own"
    assert names["val-core/a/reward/mean@1"] == pytest.approx(2 / 3)
    assert names["val-aux/a/reward/mean@1/se"] == found["a"]["mean@1/se"] == pytest.approx(1 / 3)
    assert names["val-aux/a/part/reward/mean@1"] == 4.0
    assert names["val-aux/a/part/acc/mean@1"] == 1.0
