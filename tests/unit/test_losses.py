"""Every policy loss against its formula written out for one row, its gradient against finite differences of that
formula, and the rules for all of them: rows may stand in any order, be padded and be cut into pieces."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_formulas import FORMULAS, Token
from step_lab import required_options
from torch import Tensor

from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from learners.algorithms import losses, registry
from learners.algorithms.aggregation import MODES, aggregate, count
from learners.algorithms.types import LossInputs, TokenLoss

EVERY: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}), ("ppo", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5}), ("ppo", {"delta": 1.6}),
    ("reinforce", {}), ("cispo", {}), ("cispo", {"clip_low": 10.0, "clip_high": 0.5}), ("aipo", {"rho": 1.5}),
    ("sapo", {}), ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}), ("dppo_tv", {}), ("dppo_tv", {"ratio_cap": 1.2}),
    ("dppo_kl", {}), ("dro", {"beta": 0.7}), ("gspo", {}), ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gmpo", {}), ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}), ("vespo", {}),
    ("vespo", {"k_pos": 1.1, "lambda_neg": 0.7}), ("topr", {}), ("sppo", {"eta": 0.7}), ("kl_cov", {"coeff": 0.5}),
    ("clip_cov", {}),
]  # fmt: skip
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(EVERY)]
BY_LOSS = pytest.mark.parametrize(("name", "options"), EVERY, ids=IDS)


def call(name: str, inputs: LossInputs, options: dict[str, Any]) -> TokenLoss:
    found: TokenLoss = getattr(losses, name)(inputs, **options)
    return found


def test_every_loss_of_the_registry_has_a_formula_here() -> None:
    assert {entry.target for entry in algorithms.LOSSES.values()} <= {f"losses:{name}" for name in FORMULAS}
    assert {name for name, _ in EVERY} == set(FORMULAS)


# ---------------------------------------------------------------- batches


def batch(lengths: list[int], seed: int, *, apart: float = 0.4, valid: float = 0.8) -> LossInputs:
    """Flat tokens of rows with holes; advantages of both signs; a few weights of 0."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def draw() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    behaviour = -3 * uniform() - 0.05
    proximal, current = (torch.clamp(behaviour + apart * draw(), max=-0.01) for _ in range(2))
    mask, weights = uniform() < valid, torch.where(uniform() < 0.1, 0.0, uniform() * 2)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    return LossInputs(current.requires_grad_(), proximal, behaviour, draw(), mask, sequences, weights, uniform() < 0.3)


def taken(inputs: LossInputs, places: Tensor) -> LossInputs:
    """These tokens in this order, rows numbered anew; current is a new leaf."""
    parts: list[Any] = [part[places] for part in inputs]
    parts[0] = parts[0].detach().requires_grad_()
    parts[5] = torch.unique_consecutive(parts[5], return_inverse=True)[1]
    return LossInputs(*parts)


def places_of(inputs: LossInputs, rows: list[int]) -> Tensor:
    return torch.cat([torch.nonzero(inputs.sequences == row)[:, 0] for row in rows] or [torch.zeros(0).long()])


@st.composite
def batches(draw: st.DrawFn) -> LossInputs:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    return batch(
        lengths,
        draw(st.integers(0, 2**31)),
        apart=draw(st.sampled_from([0.01, 0.4, 5.0])),
        valid=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


# ---------------------------------------------------------------- values and gradients


def spelled_out(name: str, options: dict[str, Any], inputs: LossInputs, *, moved: int = -1, by: float = 0.0) -> Tensor:
    """The formula over the trained tokens, with the current log-prob of one of them moved where it has a gradient."""
    still = inputs.current.detach().tolist()
    columns = [part.tolist() for part in (inputs.proximal, inputs.behaviour, inputs.advantages, inputs.weights)]
    found = torch.zeros(len(still), dtype=torch.float64)
    for row in inputs.sequences.unique().tolist():
        places = torch.nonzero((inputs.sequences == row) & inputs.mask)[:, 0].tolist()
        if places:
            tokens = [
                Token(
                    still[p] + by * (p == moved), still[p], *(column[p] for column in columns), bool(inputs.chosen[p])
                )
                for p in places
            ]
            found[places] = torch.tensor(FORMULAS[name](tokens, **options), dtype=torch.float64)
    return found


@BY_LOSS
@pytest.mark.parametrize("seed", [1, 2])
def test_values_and_gradients_are_those_of_the_formula(name: str, options: dict[str, Any], seed: int) -> None:
    inputs = batch([5, 1, 4, 6], seed)
    found = call(name, inputs, options)
    torch.testing.assert_close(found.loss, spelled_out(name, options, inputs), rtol=1e-9, atol=1e-9)
    coefficients = torch.randn(found.loss.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((coefficients * found.loss).sum(), inputs.current)
    step = 1e-6
    for place in range(inputs.current.numel()):
        up, down = (
            (coefficients * spelled_out(name, options, inputs, moved=place, by=by)).sum() for by in (step, -step)
        )
        assert float(gradient[place]) == pytest.approx(float(up - down) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", algorithms.LOSSES)
def test_every_name_of_the_registry_as_the_learner_calls_it(name: str) -> None:
    """Its function with the options of the configuration, and with the tokens that it chooses over the whole batch."""
    algorithm = AlgorithmConfig(loss=name, loss_options=required_options("loss", name))
    found, inputs = registry.choose(algorithm, "loss"), batch([5, 1, 4, 6], 3)._replace(chosen=None)
    chooser = registry.chooser_for(algorithm)
    chosen = torch.zeros_like(inputs.mask) if chooser is None else chooser(inputs)
    inputs, formula = inputs._replace(chosen=chosen), found.function.__name__
    known = inspect.signature(FORMULAS[formula]).parameters
    options = {key: value for key, value in found.options.items() if key in known}
    loss = registry.loss_for(algorithm)(inputs).loss
    torch.testing.assert_close(loss, spelled_out(formula, options, inputs), rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.current)
    for place in range(16):
        up, down = (spelled_out(formula, options, inputs, moved=place, by=by).sum() for by in (1e-6, -1e-6))
        assert float(gradient[place]) == pytest.approx(float(up - down) / 2e-6, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@BY_LOSS
def test_aggregated_gradients_are_those_of_the_aggregated_formula(
    name: str, options: dict[str, Any], mode: str
) -> None:
    inputs = batch([3, 4], 5)

    def reduce(values: Tensor) -> Tensor:
        return aggregate(
            values,
            inputs.mask,
            inputs.sequences,
            mode=mode,
            loss_scale_factor=7.0,
            denominators=count(inputs.mask, inputs.sequences),
        )

    (gradient,) = torch.autograd.grad(reduce(call(name, inputs, options).loss), inputs.current)
    for place in range(7):
        up, down = (reduce(spelled_out(name, options, inputs, moved=place, by=by)) for by in (1e-6, -1e-6))
        assert float(gradient[place]) == pytest.approx(float(up - down) / 2e-6, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------- rules for all


@BY_LOSS
@settings(max_examples=15, deadline=None)
@given(inputs=batches(), seed=st.integers(0, 1000))
def test_the_order_of_rows_does_not_matter(name: str, options: dict[str, Any], inputs: LossInputs, seed: int) -> None:
    rows = int(inputs.sequences.max()) + 1
    places = places_of(inputs, torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist())
    before, after = call(name, inputs, options), call(name, taken(inputs, places), options)
    torch.testing.assert_close(before.loss[places], after.loss, rtol=1e-9, atol=1e-12)
    assert torch.equal(before.clipped[places], after.clipped)


@BY_LOSS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@settings(max_examples=8, deadline=None)
@given(inputs=batches(), seed=st.integers(0, 1000))
def test_what_is_masked_has_no_influence_and_no_gradient(
    name: str, options: dict[str, Any], poison: float, inputs: LossInputs, seed: int
) -> None:
    """Every token gets a twin outside the mask, full of poison, somewhere in its row; so has what was masked before."""
    size = inputs.mask.numel()
    twice = torch.arange(size).repeat_interleave(2)
    real = torch.arange(2 * size) % 2 == torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed))[twice]
    keep = real & inputs.mask[twice]
    padded = taken(inputs, twice)
    for number in (0, 1, 2, 3, 6):
        part: Any = torch.where(keep, padded[number], poison)  # type: ignore[arg-type]
        padded = LossInputs(*(part if n == number else other for n, other in enumerate(padded)))
    current = padded.current.detach().requires_grad_()
    padded = padded._replace(current=current, mask=keep)
    before, after = call(name, inputs, options), call(name, padded, options)
    gradient = torch.autograd.grad(after.loss.sum(), current)[0]
    torch.testing.assert_close(before.loss[inputs.mask], after.loss[keep], rtol=1e-9, atol=1e-12)
    wanted = torch.autograd.grad(before.loss.sum(), inputs.current)[0]
    torch.testing.assert_close(wanted[inputs.mask], gradient[keep], rtol=1e-9, atol=1e-12)
    assert not after.loss[~keep].any() and not gradient[~keep].any() and not after.clipped[~keep].any()


@pytest.mark.parametrize("mode", MODES)
@BY_LOSS
@settings(max_examples=6, deadline=None)
@given(inputs=batches(), cuts=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_the_cut_into_ranks_and_pieces_does_not_matter(
    name: str, options: dict[str, Any], mode: str, inputs: LossInputs, cuts: list[int]
) -> None:
    """Row i goes to piece cuts[i]; pieces 0 and 1 are of one rank, 2 and 3 of another, and gradients are averaged."""
    counts = count(inputs.mask, inputs.sequences)

    def share(part: LossInputs, ranks: int) -> Tensor:
        return aggregate(
            call(name, part, options).loss,
            part.mask,
            part.sequences,
            mode=mode,
            denominators=counts,
            loss_scale_factor=7.0,
            ranks=ranks,
        )

    whole = share(inputs, 1)
    (wanted,) = torch.autograd.grad(whole, inputs.current)
    rows = range(int(inputs.sequences.max()) + 1)
    total, gradient = 0.0, torch.zeros_like(wanted)
    for piece in range(4):
        places = places_of(inputs, [row for row in rows if cuts[row] == piece])
        part = taken(inputs, places)
        value = share(part, 2)
        total += float(value.detach()) / 2
        gradient[places] += torch.autograd.grad(value, part.current)[0] / 2
    assert total == pytest.approx(float(whole.detach()), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@BY_LOSS
def test_no_tokens_is_zero_and_still_connected(name: str, options: dict[str, Any], mode: str) -> None:
    nothing = taken(batch([2], 0), torch.zeros(0, dtype=torch.int64))
    masked_out = batch([2, 3], 0)._replace(mask=torch.zeros(5, dtype=torch.bool))
    for inputs in (nothing, masked_out, nothing._replace(chosen=None), masked_out._replace(chosen=None, weights=None)):
        found = call(name, inputs, options)
        value = aggregate(
            found.loss,
            inputs.mask,
            inputs.sequences,
            mode=mode,
            loss_scale_factor=7.0,
            denominators=count(inputs.mask, inputs.sequences),
        )
        (gradient,) = torch.autograd.grad(value, inputs.current)
        assert float(value.detach()) == 0 and not gradient.any() and not found.clipped.any()


@BY_LOSS
def test_nothing_but_the_current_log_probs_has_a_gradient(name: str, options: dict[str, Any]) -> None:
    inputs = batch([3, 4], 3)
    parts = [part.detach().requires_grad_() for part in (*inputs[:4], inputs.weights) if part is not None]
    call(name, LossInputs(*parts[:4], *inputs[4:6], parts[4], inputs.chosen), options).loss.sum().backward()
    assert parts[0].grad is not None and all(part.grad is None for part in parts[1:])


@BY_LOSS
def test_extreme_ratios_stay_finite_and_half_precision_is_widened(name: str, options: dict[str, Any]) -> None:
    other = torch.tensor([-200.0, -1.0, -1.0, 0.0], dtype=torch.bfloat16)
    for gain in (1.0, -1.0):
        current = torch.tensor([-1.0, -90.0, -1.0, 0.0], dtype=torch.bfloat16, requires_grad=True)
        inputs = LossInputs(
            current, other, other, torch.full((4,), gain), torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 2, 3])
        )
        found = call(name, inputs, options)
        found.loss.sum().backward()
        assert found.loss.dtype == torch.float32 and bool(found.loss.isfinite().all())
        assert current.grad is not None and bool(current.grad.isfinite().all())


# ---------------------------------------------------------------- what only some of them do


def inputs_of(gaps: list[float], gains: list[float], **more: Any) -> LossInputs:
    """One row, proximal log-probs -1."""
    proximal = torch.full((len(gaps),), -1.0, dtype=torch.float64)
    current = (proximal + torch.tensor(gaps, dtype=torch.float64)).requires_grad_()
    sequences = torch.zeros(len(gaps), dtype=torch.int64)
    return LossInputs(
        current,
        proximal,
        proximal,
        torch.tensor(gains, dtype=torch.float64),
        torch.ones(len(gaps), dtype=torch.bool),
        sequences,
    )._replace(**more)


def test_ppo_says_what_was_clipped_and_what_the_dual_clip_did() -> None:
    inputs = inputs_of([0.5, -0.5, 0.5, 2.0, 0.0], [1.0, 1.0, -1.0, -1.0, 1.0])
    found = losses.ppo(inputs, dual_clip=3.0)
    assert found.clipped.tolist() == [True, False, False, False, False]
    assert found.dual_clipped is not None and found.dual_clipped.tolist() == [False, False, False, True, False]
    assert float(found.loss[3].detach()) == 3.0
    assert losses.ppo(inputs).dual_clipped is None


def test_a_token_outside_the_clip_learns_with_cispo_alone() -> None:
    for loss, learns in ((losses.ppo, False), (losses.cispo, True)):
        inputs = inputs_of([0.5], [2.0])
        assert bool(torch.autograd.grad(loss(inputs).loss.sum(), inputs.current)[0].any()) is learns


def test_gspo_keeps_the_clip_of_the_row_for_all_its_tokens() -> None:
    found = losses.gspo(inputs_of([0.9, -0.1], [1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    assert found.clipped.tolist() == [True, True]
    assert losses.ppo(inputs_of([0.9, -0.1], [1.0, 1.0])).clipped.tolist() == [True, False]


def test_a_sequence_weight_counts_once_in_gmpo_and_the_logs_of_token_weights_add_up_in_vespo() -> None:
    weights = torch.full((2,), 0.5, dtype=torch.float64)
    plain, weighted = (losses.gmpo(inputs_of([0.1, 0.2], [1.0, 1.0], weights=w)).loss for w in (None, weights))
    torch.testing.assert_close(weighted, plain * 0.5)
    one = (
        losses.vespo(inputs_of([0.1, 0.2], [1.0, 1.0], weights=weights)).loss
        / losses.reinforce(inputs_of([0.1, 0.2], [1.0, 1.0])).loss
    )
    log_w = 0.3 + 2 * math.log(0.5)
    assert one.tolist() == pytest.approx([math.exp(3 + 2 * log_w - 3 * math.exp(log_w))] * 2)


def test_a_fresh_row_has_weight_one_in_vespo_and_topr() -> None:
    fresh = inputs_of([0.0, 0.0], [1.5, -1.0])
    for loss in (losses.vespo, losses.topr):
        torch.testing.assert_close(loss(fresh).loss, losses.reinforce(fresh).loss)


def test_topr_tapers_negative_rows_that_became_unlikely_alone() -> None:
    gone, grown = inputs_of([-1.0, -1.0], [-1.0, 1.0]), inputs_of([0.6, 0.6], [-1.0, 1.0])
    assert (losses.topr(gone).loss / losses.reinforce(gone).loss).tolist() == pytest.approx([math.exp(-2), 1.0])
    assert (losses.topr(grown).loss / losses.reinforce(grown).loss).tolist() == pytest.approx([1.0, 1.0])
    assert losses.topr(grown).clipped.tolist() == [True, False]


def test_without_a_correction_the_weights_are_one() -> None:
    inputs = batch([4, 3], 11)
    ones = torch.ones_like(inputs.advantages)
    for name, options in EVERY:
        plain, weighted = (call(name, inputs._replace(weights=w), options).loss for w in (None, ones))
        torch.testing.assert_close(plain, weighted, rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- tokens chosen over the whole mini-batch


@settings(max_examples=30, deadline=None)
@given(inputs=batches(), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.1, 0.34, 1.0]))
def test_kl_cov_chooses_the_largest_covariances_in_any_order(inputs: LossInputs, seed: int, share: float) -> None:
    chosen = losses.choose_kl_cov(inputs, ratio=share)
    trained = int(inputs.mask.sum())
    assert int(chosen.sum()) == min(max(1, int(trained * share)), trained) and not (chosen & ~inputs.mask).any()
    logs, gains = inputs.current.detach()[inputs.mask], inputs.advantages[inputs.mask]
    found = (gains - gains.mean()) * (logs - logs.mean())
    inside = chosen[inputs.mask]
    if 0 < int(inside.sum()) < trained:
        assert float(found[inside].min()) >= float(found[~inside].max())
    rows = int(inputs.sequences.max()) + 1
    places = places_of(inputs, torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist())
    again = losses.choose_kl_cov(taken(inputs, places), ratio=share)[inputs.mask[places]]
    mixed = (inputs.advantages - gains.mean()) * (inputs.current.detach() - logs.mean())
    mixed = mixed[places][inputs.mask[places]]  # of two equal ones (always so with two tokens) either may be taken
    torch.testing.assert_close(mixed[again].sort().values, found[inside].sort().values)


def test_a_choice_over_the_whole_batch_is_not_that_of_its_pieces() -> None:
    """What `chosen` is for: without it the cut would matter."""
    inputs = batch([5, 5], 7, valid=1.0)._replace(chosen=None)
    chosen = losses.choose_kl_cov(inputs, ratio=0.1)
    pieces = [taken(inputs._replace(chosen=chosen), places_of(inputs, [row])) for row in (0, 1)]
    together = torch.cat([losses.kl_cov(piece, ratio=0.1).loss for piece in pieces])
    torch.testing.assert_close(together, losses.kl_cov(inputs, ratio=0.1).loss)
    alone = torch.cat([losses.choose_kl_cov(piece, ratio=0.1) for piece in pieces])
    assert not torch.equal(alone, chosen)


def test_clip_cov_draws_eligible_tokens_by_seed() -> None:
    inputs = batch([40, 40], 6, apart=0.1, valid=1.0)
    bounds = {"lower": 0.05, "upper": 5.0, "ratio": 0.1}
    picks = [losses.choose_clip_cov(inputs, seed=seed, **bounds) for seed in (0, 0, 1)]
    assert torch.equal(picks[0], picks[1]) and not torch.equal(picks[0], picks[2])
    logs, gains = inputs.current.detach(), inputs.advantages
    found = (gains - gains.mean()) * (logs - logs.mean())
    for pick in picks:
        assert int(pick.sum()) == 8
        assert bool((found[pick] > 0.05).all()) and not (pick & losses.ppo(inputs).clipped).any()
    inputs = inputs._replace(chosen=None)
    assert not losses.clip_cov(inputs, seed=1, **bounds).loss[picks[2]].any()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ppo", {"clip_low": -0.1}, "clip_low"),
        ("ppo", {"dual_clip": 1.0}, "above 1"),
        ("ppo", {"delta": 1.1}, "delta"),
        ("cispo", {"clip_high": -1.0}, "clip_high"),
        ("aipo", {"rho": 0.0}, "rho"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg"),
        ("dro", {"beta": 0.0}, "beta"),
        ("gspo", {"clip_low": 2.0}, "clip_low"),
        ("gmpo", {"clip_low": -1.0}, "clip_low"),
        ("kl_cov", {"ratio": 2.0}, "share"),
        ("clip_cov", {"ratio": -1.0}, "share"),
        ("clip_cov", {"clip_low": 3.0}, "clip_high"),
    ],
)
def test_options_that_make_no_sense_are_errors(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        call(name, batch([3], 0)._replace(chosen=None), options)
    assert caught.value.code == "config.type"


def test_aggregations_by_hand_and_their_errors() -> None:
    values, mask, rows = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    counts = count(mask, rows)
    wanted = dict(zip(MODES, (2.0, 6.0, 2.25, 3.0, 0.75), strict=True))
    found = {
        mode: float(aggregate(values, mask, rows, mode=mode, denominators=counts, loss_scale_factor=4.0))
        for mode in MODES
    }
    assert found == wanted
    with pytest.raises(ConfigError, match="token-mean"):
        aggregate(values, mask, rows, mode="mean", denominators=counts)
    for factor in (None, 0.0):
        with pytest.raises(ConfigError, match="loss_scale_factor"):
            aggregate(values, mask, rows, mode="seq-mean-token-sum-norm", denominators=counts, loss_scale_factor=factor)
