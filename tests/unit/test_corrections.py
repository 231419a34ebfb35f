"""Importance weights, rejection and masks: against loops that spell out the definition, and the rules for all of them:
rows may stand in any order, be padded and be cut into pieces, nothing has a gradient, the mask decides what counts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.corrections import (
    CORRECTIONS,
    is_weights,
    log_ratio,
    needs_whole_batch,
    prox_loglinear,
)
from learners.algorithms.rejection import OPTIONS, m2po_keep, rejection_mask, sequence_mask

EVERY: list[tuple[str, dict[str, Any]]] = [
    ("none", {}), ("tis", {}), ("tis", {"level": "sequence", "upper": 3.0}), ("tis", {"level": "geometric"}),
    ("tis", {"floor": 0.5, "upper": None}), ("mis", {}), ("mis", {"level": "geometric", "lower": 0.9, "upper": 1.1}),
    ("icepop", {"lower": 0.8, "upper": 1.3}), ("rejection", {}), ("m2po", {"threshold": 0.2}),
    ("tis", {"batch_normalize": True}), ("mis", {"batch_normalize": True}),
    ("tis", {"level": "sequence", "reject": ("seq_sum_k1", "token_k3"), "thresholds": ((0.5, 2.0), 0.3)}),
    ("rejection", {"options": ("seq_max_k2", "seq_mean_k1"), "thresholds": (0.4, 1.2)}),
]  # fmt: skip


class Rows(NamedTuple):
    """Flat tokens of a batch."""

    proximal: Tensor
    behaviour: Tensor
    mask: Tensor
    sequences: Tensor

    def part(self, rows: list[int]) -> Rows:
        """These rows alone, in this order, numbered anew."""
        places = [torch.nonzero(self.sequences == row)[:, 0] for row in rows]
        order = torch.cat([torch.zeros(0, dtype=torch.int64), *places])
        numbers = torch.cat(
            [
                torch.zeros(0, dtype=torch.int64),
                *(torch.full_like(place, number) for number, place in enumerate(places)),
            ]
        )
        return Rows(self.proximal[order], self.behaviour[order], self.mask[order], numbers)


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Up to five rows of up to six tokens, holes and rows without a trained token among them."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = sum(lengths)
    mask = torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    behaviour = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    apart = draw(st.sampled_from([0.05, 0.4, 30.0]))
    proximal = behaviour + torch.randn(count, generator=generator, dtype=torch.float64) * apart
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Rows(proximal, behaviour, mask, sequences)


def same(got: Any, wanted: Any) -> None:
    for have, want in zip(got, wanted, strict=True):
        assert (have is None) is (want is None)
        if have is not None:
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def unpad(rows: Rows) -> list[list[int]]:
    """Places of the trained tokens of each row."""
    count = int(rows.sequences.max()) + 1
    return [torch.nonzero((rows.sequences == row) & rows.mask)[:, 0].tolist() for row in range(count)]


# ---------------------------------------------------------------- rules for every correction


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_what_stands_outside_the_mask_has_no_influence(name: str, options: dict[str, Any], batch: Rows) -> None:
    clean = CORRECTIONS[name](*batch, **options)
    dirt = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    noise = dirt[torch.arange(batch.mask.numel()) % 3]
    dirty = batch._replace(
        proximal=torch.where(batch.mask, batch.proximal, noise),
        behaviour=torch.where(batch.mask, batch.behaviour, noise),
    )
    same(CORRECTIONS[name](*dirty, **options), clean)
    assert not clean.weights[~batch.mask].any()
    assert not (clean.keep & ~batch.mask).any()
    assert not clean.weights[~clean.keep].any()
    assert clean.weights.isfinite().all()


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
@given(batch=batches(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_order_of_rows_does_not_matter(
    name: str, options: dict[str, Any], batch: Rows, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(int(batch.sequences.max()) + 1)))
    moved = batch.part(order)
    whole = CORRECTIONS[name](*batch, **options)
    places = torch.cat([torch.nonzero(batch.sequences == row)[:, 0] for row in order])
    wanted = [None if part is None else part[places] for part in whole]
    same(CORRECTIONS[name](*moved, **options), wanted)


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
@given(batch=batches(), cut=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_pieces_give_what_the_whole_gives(name: str, options: dict[str, Any], batch: Rows, cut: int) -> None:
    if needs_whole_batch(CORRECTIONS[name], options):
        return
    count = int(batch.sequences.max()) + 1
    pieces = [batch.part(list(range(min(cut, count)))), batch.part(list(range(min(cut, count), count)))]
    found = [CORRECTIONS[name](*piece, **options) for piece in pieces]
    joined = [None if parts[0] is None else torch.cat(list(parts)) for parts in zip(*found, strict=True)]
    same(CORRECTIONS[name](*batch, **options), joined)


def test_corrections_that_mix_rows_say_so() -> None:
    """Those that the test above leaves out do depend on the cut."""
    rows = Rows(torch.tensor([0.0, 0.5, 1.0, -2.0]), torch.zeros(4), torch.ones(4).bool(), torch.tensor([0, 0, 1, 1]))
    mixing = 0
    for name, options in EVERY:
        whole = CORRECTIONS[name](*rows, **options)
        pieces = [CORRECTIONS[name](*rows.part([row]), **options) for row in (0, 1)]
        equal = torch.equal(whole.weights, torch.cat([piece.weights for piece in pieces]))
        assert equal is not needs_whole_batch(CORRECTIONS[name], options), (name, options)
        mixing += not equal
    assert mixing == 3


def test_a_plugin_may_say_that_it_needs_the_whole_batch() -> None:
    def plugin() -> Any: ...

    assert not needs_whole_batch(plugin, {})
    plugin.whole_batch = True  # type: ignore[attr-defined]
    assert needs_whole_batch(plugin, {})


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
def test_no_gradient_and_no_tokens(name: str, options: dict[str, Any]) -> None:
    proximal = torch.tensor([0.1, -0.2, 0.4], requires_grad=True)
    found = CORRECTIONS[name](
        proximal, torch.zeros(3, requires_grad=True), torch.ones(3).bool(), torch.tensor([0, 0, 1]), **options
    )
    assert not found.weights.requires_grad
    empty = torch.zeros(0)
    found = CORRECTIONS[name](empty, empty, empty.bool(), empty.long(), **options)
    assert found.weights.shape == found.keep.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_before_the_difference(dtype: torch.dtype) -> None:
    new, old = torch.tensor([-10.0], dtype=dtype), torch.tensor([-10.5], dtype=dtype)
    weights = is_weights(new, old, torch.ones(1).bool(), upper=None)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([0.5]).exp(), rtol=1e-6, atol=0)


# ---------------------------------------------------------------- weights


def weights_by_hand(rows: Rows, level: str, upper: float | None, lower: float | None, *, norm: bool) -> list[float]:
    weights = [0.0] * rows.mask.numel()
    of_rows = []
    for places in unpad(rows):
        gaps = [float(rows.proximal[place] - rows.behaviour[place]) for place in places]
        total = sum(gaps)
        for place, gap in zip(places, gaps, strict=True):
            log = {"token": gap, "sequence": total, "geometric": total / len(places)}[level]
            weight = math.exp(min(max(log, -20.0), 20.0))
            if lower is None:
                weights[place] = min(weight, upper or math.inf)
            else:
                weights[place] = weight if lower <= weight <= (upper or math.inf) else 0.0
        of_rows += [weights[places[0]]] if places else []
    if norm:
        used = [weights[place] for places in unpad(rows) for place in places] if level == "token" else of_rows
        mean = sum(used) / max(len(used), 1)
        weights = [weight / mean for weight in weights] if mean > 1e-8 else weights
    return weights


@given(
    batch=batches(),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    upper=st.sampled_from([None, 1.2, 5.0]),
    lower=st.sampled_from([None, 0.5, 1.0]),
    norm=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_weights_are_those_of_the_definition(
    batch: Rows, level: Any, upper: float | None, lower: float | None, norm: bool
) -> None:
    got = is_weights(*batch, level=level, upper=upper, lower=lower, batch_normalize=norm)
    wanted = torch.tensor(weights_by_hand(batch, level, upper, lower, norm=norm), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_bounds_are_inclusive_and_truncation_is_told() -> None:
    ratio = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    tokens = (ratio.log(), torch.zeros(5), torch.ones(5).bool(), torch.arange(5))
    tis = CORRECTIONS["tis"](*tokens, upper=2.0 + 1e-12, floor=0.4)
    torch.testing.assert_close(tis.weights, torch.tensor([0.4, 0.5, 1.0, 2.0, 2.0], dtype=torch.float64))
    assert tis.truncated is not None
    assert tis.truncated.tolist() == [True, False, False, False, True]
    icepop = CORRECTIONS["icepop"](*tokens, lower=0.5 - 1e-12, upper=2.0 + 1e-12)
    torch.testing.assert_close(icepop.weights, torch.tensor([0, 0.5, 1, 2, 0], dtype=torch.float64))
    assert icepop.keep.all(), "a weight of 0 does not take the token out of the denominator"
    zero = CORRECTIONS["mis"](*(part[2:3] for part in tokens[:3]), torch.zeros(1).long(), lower=1.0, upper=1.0)
    assert zero.weights.tolist() == [1.0]


def test_a_correction_after_bypass_is_one() -> None:
    same_policy = -torch.rand(6)
    tokens = (same_policy, same_policy, torch.ones(6).bool(), torch.tensor([0, 0, 0, 1, 1, 1]))
    for name, options in EVERY:
        torch.testing.assert_close(CORRECTIONS[name](*tokens, **options).weights, torch.ones(6))


def test_the_clamp_kills_the_gradient_outside() -> None:
    new = torch.tensor([25.0, 1.0, torch.nan], requires_grad=True)
    log_ratio(new, torch.zeros(3), torch.tensor([True, True, False])).exp().sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([0.0, math.e, 0.0]))


@pytest.mark.parametrize(
    "options",
    [
        {"level": "batch"},
        {"upper": 0.5, "lower": 0.9},
        {"floor": -1.0},
        {"upper": 0.5, "floor": 0.9},
    ],
)
def test_weights_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    one = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"config\.type"):
        is_weights(one, one, one == 0, one.long(), **options)


# ---------------------------------------------------------------- rejection


def row_value(option: str, gaps: list[float]) -> float:
    """What an option looks at, by hand; one gap for a token option."""
    close = [min(max(gap, -20.0), 20.0) for gap in gaps]
    kinds = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(d) - d}
    values = [kinds[option[-2:]](gap) for gap in close]
    where = option[:-3]
    if where == "seq_mean":
        return sum(values) / max(len(values), 1)
    return max(values, default=0.0) if where == "seq_max" else sum(values)


@pytest.mark.parametrize("option", OPTIONS)
@given(batch=batches(), low=st.floats(0.3, 0.99), high=st.floats(1.0, 3.0))
@settings(max_examples=25, deadline=None)
def test_rejection_keeps_what_the_definition_keeps(option: Any, batch: Rows, low: float, high: float) -> None:
    first = option.endswith("k1")
    threshold: Any = (low, high) if first else high - 1
    bounds = (math.log(low), math.log(high)) if first else (-math.inf, high - 1)
    got = rejection_mask(*batch, options=[option], thresholds=[threshold])
    wanted = torch.zeros_like(batch.mask)
    for places in unpad(batch):
        gaps = [float(batch.proximal[place] - batch.behaviour[place]) for place in places]
        parts = [[gap] for gap in gaps] if option.startswith("token") else [gaps] * len(places)
        for place, part in zip(places, parts, strict=True):
            wanted[place] = bounds[0] <= row_value(option, part) <= bounds[1]
    assert torch.equal(got, wanted)


def test_several_options_reject_together_and_one_number_is_a_ratio_interval() -> None:
    gaps = torch.tensor([0.1, -0.1, 0.5, -0.5])
    tokens = (gaps, torch.zeros(4), torch.ones(4).bool(), torch.zeros(4).long())
    one = rejection_mask(*tokens, options=["token_k1"], thresholds=[1.2])
    assert one.tolist() == [True, True, False, False]
    # k1 bounds behaviour / proximal: a proximal policy that is surer than the behaviour policy falls below 1.
    assert rejection_mask(*tokens, options=["token_k1"], thresholds=[(0.95, 2)]).tolist() == [False, True, False, True]
    both = rejection_mask(*tokens, options=["token_k1", "token_k2"], thresholds=[(0.95, 2), 0.1])
    assert both.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("options", "thresholds"),
    [
        (["token_k4"], [1.0]),
        (["seq_max_k1"], [2.0]),
        (["token_k1"], []),
        (["token_k1"], [(2.0, 0.5)]),
        (["token_k1"], [0.0]),
        (["token_k1"], [(1.0, 2.0, 3.0)]),
        (["token_k3"], [(0.1, 0.2)]),
    ],
)
def test_rejection_that_cannot_be_is_refused(options: Any, thresholds: Any) -> None:
    one = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"config\.type"):
        rejection_mask(one, one, one == 0, one.long(), options=options, thresholds=thresholds)


@given(batch=batches(), threshold=st.sampled_from([0.001, 0.05, 0.3, 1e9]))
@settings(max_examples=100, deadline=None)
def test_m2po_removes_the_largest_until_the_mean_is_below(batch: Rows, threshold: float) -> None:
    squares = {
        place: float(batch.behaviour[place] - batch.proximal[place]) ** 2 for places in unpad(batch) for place in places
    }
    left = sorted(squares, key=lambda place: squares[place])
    while len(left) > 1 and sum(squares[place] for place in left) / len(left) >= threshold:
        left.pop()
    got = m2po_keep(batch.proximal, batch.behaviour, batch.mask, threshold=threshold)
    assert torch.nonzero(got)[:, 0].tolist() == sorted(left)


def test_stale_negative_rows_are_masked() -> None:
    # Rows: stale and negative, stale and positive, near and negative, no trained token.
    current = torch.tensor([-2.0, -2.0, -2.0, -1.1, torch.nan])
    behaviour = torch.tensor([-1.0, -1.5, -1.0, -1.0, torch.nan])
    gains = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0])
    mask = torch.tensor([True, True, True, True, False])
    keep = sequence_mask(current, behaviour, gains, mask, torch.tensor([0, 0, 1, 2, 3]), delta=0.7)
    assert keep.tolist() == [False, False, True, True, False]
    keep = sequence_mask(current, behaviour, gains, mask, torch.tensor([0, 0, 1, 2, 3]), delta=0.75)
    assert keep.tolist() == [True, True, True, True, False], "the mean distance is 0.75: not above the threshold"
    assert sequence_mask(current, behaviour, gains * 0, mask, torch.tensor([0, 0, 1, 2, 3]), delta=-9.0).sum() == 4


# ---------------------------------------------------------------- the proximal policy without a forward pass


def test_loglinear_goes_from_behaviour_to_current_with_the_lag() -> None:
    behaviour, current = torch.full((5,), -2.0, dtype=torch.float64), torch.full((5,), -1.0, dtype=torch.float64)
    current[4] = torch.nan
    current.requires_grad_()
    mask = torch.tensor([True, True, True, True, False])
    got = prox_loglinear(behaviour, current, torch.tensor([10, 9, 8, 0, -1]), mask, current_version=10)
    torch.testing.assert_close(got, torch.tensor([-2, -2, -1.5, -1.1, 0], dtype=torch.float64))
    assert not got.requires_grad
