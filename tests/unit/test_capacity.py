"""How much work a producer asks for."""

from __future__ import annotations

import pytest

from asyncrl.engine import EngineCapabilities
from producers.rollout.capacity import AHEAD, LEAST, Capacity


def capacity(*, slots: int = 64, kv_tokens: int = 0, group: int = 4, prior: float = 500.0, groups: int = 0) -> Capacity:
    capable = EngineCapabilities("test", max_samples=slots, max_tokens=4096, kv_tokens=kv_tokens)
    return Capacity(capable, group_samples=group, prior_tokens=prior, max_groups=groups)


def test_without_a_bound_on_kv_the_slots_are_filled_twice() -> None:
    work = capacity(slots=64, group=8)
    assert work.groups_wanted() == 2 * 64 // 8
    for group in range(16):
        work.add_group(group, 8)
    assert work.groups_wanted() == 0 and work.leased_samples == 128


def test_what_is_in_flight_is_counted_in_samples() -> None:
    """The tail of a group keeps one place, not that of the whole group."""
    work = capacity(slots=8, group=8)
    for group in range(2):
        work.add_group(group, 8)
        for _ in range(7):
            work.end_sample(group, prompt_tokens=10, response_tokens=10)
    assert work.leased_samples == 2 and work.groups_wanted() == 2
    work.end_group(0)
    assert work.leased_samples == 1 and work.groups_wanted() == 2


def test_the_kv_bounds_the_samples_by_their_prior_and_then_by_their_cost() -> None:
    work = capacity(kv_tokens=10_000, prior=500.0)
    assert work.parallel_samples == 18 and work.groups_wanted() == 9
    for _ in range(300):
        work.end_sample("x", prompt_tokens=100, response_tokens=200)
    assert work.tokens_per_sample == 100 + 200 / 2 and work.parallel_samples == 45


def test_the_mean_is_over_the_time_that_samples_live() -> None:
    """One of 1000 tokens among nine of 10: at a random step nearly always the long one is there."""
    work = capacity()
    for _ in range(9):
        work.end_sample("x", prompt_tokens=0, response_tokens=10)
    work.end_sample("x", prompt_tokens=0, response_tokens=1000)
    steps = 9 * 10 + 1000
    assert work.tokens_per_sample == pytest.approx((9 * 10 * 5 + 1000 * 500) / steps)


def test_the_average_forgets() -> None:
    work = capacity(kv_tokens=10_000)
    for length in (400, 20):
        for _ in range(256):
            work.end_sample("x", prompt_tokens=0, response_tokens=length)
    assert work.tokens_per_sample == 10


def test_preemptions_ask_for_less_and_it_comes_back() -> None:
    work = capacity(slots=100, group=1)
    assert work.groups_wanted() == 100 * AHEAD
    assert work.groups_wanted(preempted=3) == 90 * AHEAD
    assert work.groups_wanted(preempted=3) == 90 * AHEAD  # the same ones count once
    for count in range(4, 40):
        least = work.groups_wanted(preempted=count)
    assert least == 100 * LEAST * AHEAD
    for _ in range(200):
        work.end_sample("x", prompt_tokens=1, response_tokens=1)
    assert work.groups_wanted(preempted=39) == 100 * AHEAD


def test_one_group_is_always_wanted_and_a_setting_overrides() -> None:
    work = capacity(slots=1, kv_tokens=100, prior=5000.0, group=64)
    assert work.parallel_samples == 1 and work.groups_wanted() == 1
    work.add_group("a", 64)
    assert work.groups_wanted() == 0
    fixed = capacity(slots=1, groups=3)
    fixed.add_group("a", 64)
    assert fixed.groups_wanted() == 2
