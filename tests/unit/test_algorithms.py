"""The registry of algorithms by name, and that the parts fit together: a correction's weights inside a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.algorithm import AlgorithmConfig, LagConfig
from asyncrl.errors import ConfigError
from learners.algorithms.aggregation import Denominators
from learners.algorithms.corrections import tis
from learners.algorithms.losses import ppo, reinforce
from learners.algorithms.registry import (
    advantage_for,
    aggregation_for,
    chooser_for,
    correction_for,
    find_function,
    loss_for,
    options_in,
)
from learners.algorithms.types import LossInputs
from learners.backends.base import Micro
from learners.step.update import loss_function

NAMES = [(kind, name) for kind, entries in algorithms.TABLES.items() for name in entries]


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[f"{kind}-{name}" for kind, name in NAMES])
def test_every_name_is_a_function_that_says_what_it_does(kind: str, name: str) -> None:
    function = find_function(kind, name)
    assert callable(function) and function.__doc__
    assert all(hint is not Any for hint, _ in options_in(function).values())


def test_unknown_names_are_errors_that_list_the_known() -> None:
    for build, wrong, known in (
        (advantage_for, AlgorithmConfig(advantage="gea"), "grpo"),
        (loss_for, AlgorithmConfig(loss="pop"), "gspo"),
        (correction_for, AlgorithmConfig(correction="sit"), "tis"),
    ):
        with pytest.raises(ConfigError, match=known) as caught:
            build(wrong)
        assert caught.value.code == "config.type"


@pytest.mark.parametrize(
    ("loss", "options", "code"),
    [
        ("gspo", {"clip_hi": 0.2}, "config.unknown_key"),
        ("gspo", {"clip_high": "wide"}, "config.type"),
        ("dro", {}, "config.missing"),
    ],
)
def test_options_that_a_loss_does_not_have_are_errors(loss: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loss_for(AlgorithmConfig(loss=loss, loss_options=options))
    assert caught.value.code == code


def test_options_reach_the_loss_and_its_choice_of_tokens() -> None:
    algorithm = AlgorithmConfig(loss="kl_cov", loss_options={"ratio": 0.5, "coeff": 2.0})
    choose = chooser_for(algorithm)
    current, count = torch.tensor([-1.0, -2.0, -3.0, -0.5]), 4
    inputs = LossInputs(
        current,
        current - 1,
        current - 1,
        torch.tensor([1.0, 0.5, -1.0, 0.1]),
        torch.ones(count).bool(),
        torch.zeros(count).long(),
    )
    assert choose is not None
    chosen = choose(inputs)
    assert int(chosen.sum()) == 2
    found = loss_for(algorithm)(inputs._replace(chosen=chosen)).loss
    wanted = -inputs.advantages * np.e + 2.0 * chosen  # the log-ratio is 1
    torch.testing.assert_close(found, wanted)
    assert chooser_for(AlgorithmConfig()) is None


def test_a_loss_with_one_aggregation_has_that_one() -> None:
    assert aggregation_for(AlgorithmConfig(loss="sapo", aggregation="token-mean")) == "seq-mean-token-mean"
    assert aggregation_for(AlgorithmConfig(loss="gspo", aggregation="token-sum")) == "token-sum"
    assert aggregation_for(AlgorithmConfig(loss="luspo")) == "seq-mean-token-sum"  # GSPO without the length
    assert find_function("loss", "luspo") is find_function("loss", "gspo")


def test_decoupled_with_current_as_proximal_is_the_weighted_gradient_of_reinforce() -> None:
    """One optimizer step per batch: the ratio is 1, so what is left is the truncated weight."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    gains, mask, rows = torch.tensor([1.0, -1.0, 2.0, -0.5]), torch.ones(4, dtype=torch.bool), torch.zeros(4).long()
    grads = []
    for function in (ppo, reinforce):
        current = torch.tensor([-0.8, -2.5, -0.1, -0.2], requires_grad=True)
        weights = tis(current.detach(), behaviour, mask, rows, upper=2.0).weights
        inputs = LossInputs(current, current.detach(), behaviour, gains, mask, rows, weights)
        function(inputs).loss.sum().backward()
        grads.append(current.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert float(grads[0][3]) == pytest.approx(0.5 * 2.0)  # exp(2.8) truncated to 2


@pytest.mark.parametrize("name", ["vespo", "gmpo", "ppo"])
def test_age_scales_the_loss_of_a_row_not_the_ratio_inside_it(name: str) -> None:
    """Two rows that are equal but for their weights by lag, 1 and 0.25."""
    tokens = 3
    behaviour = torch.tensor([-1.0, -2.0, -0.5]).repeat(2)
    rows = torch.arange(2).repeat_interleave(tokens)
    gains = torch.tensor([1.0, -1.0, 0.5]).repeat(2)
    nothing = torch.zeros(2 * tokens, dtype=torch.int64)
    micro = Micro(
        nothing[None],
        nothing[None],
        nothing,
        nothing,
        rows,
        behaviour,
        torch.ones(6).bool(),
        gains,
        nothing,
        torch.tensor([1.0, 0.25]),
        torch.zeros(2).bool(),
        torch.zeros(2, dtype=torch.int64),
    )
    grads = {}
    for weight in ("off", "exp"):
        current = (behaviour + torch.tensor([0.1, -0.2, 0.05]).repeat(2)).requires_grad_()
        algorithm = AlgorithmConfig(loss=name, proximal="behaviour", lag=LagConfig(weight=weight))
        value, _ = loss_function(algorithm, Denominators(6, 2))(current, torch.zeros(6), micro, 0)
        value.backward()
        assert current.grad is not None
        grads[weight] = current.grad
    assert bool(grads["off"].any())
    torch.testing.assert_close(grads["exp"][:tokens], grads["off"][:tokens])
    torch.testing.assert_close(grads["exp"][tokens:], 0.25 * grads["off"][tokens:])
