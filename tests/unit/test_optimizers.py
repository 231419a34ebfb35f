"""Optimizers of the learner: who has which parameter, what is remembered, and norms of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl import config
from asyncrl.config import OptimConfig
from asyncrl.errors import ConfigErrors
from learners.backends.layout import clip_gradients
from learners.backends.optimizers import Optimizers, make_optimizer


class Toy(nn.Module):
    """An embedding, two layers of two matrices and a norm, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


def made(name: str, **settings: Any) -> tuple[Toy, Optimizers]:
    toy = Toy()
    optim = OptimConfig(name=name, lr=0.1, **settings)  # type: ignore[arg-type]
    return toy, make_optimizer(toy, toy.layers, optim, fused=False)


def step(toy: Toy, optimizer: Optimizers, lr: float = 0.1) -> None:
    nn.functional.cross_entropy(toy(torch.arange(6)), torch.arange(6).roll(1)).backward()
    optimizer.step(lr)
    optimizer.forget()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_have_the_same_names_and_shapes_before_the_first_step_as_after_it(name: str) -> None:
    toy, optimizer = made(name)
    before = [parameter.clone() for parameter in toy.parameters()]
    optimizer.prime()
    primed = [{key: value.shape for key, value in optimizer.states(one).items()} for one in toy.parameters()]
    assert all(primed) and all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))
    fresh, other = made(name)
    step(fresh, other)
    assert primed == [{key: value.shape for key, value in other.states(one).items()} for one in fresh.parameters()]
    step(toy, optimizer)  # and a step from them is that of a new optimizer
    assert all(torch.equal(a, b) for a, b in zip(toy.parameters(), fresh.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in toy.parameters())


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    toy, optimizer = made("muon")
    step(toy, optimizer)
    for name, parameter in toy.named_parameters():
        matrix = name.startswith("layers") and parameter.dim() == 2
        assert ("momentum_buffer" in optimizer.states(parameter)) is matrix, name
        assert ("exp_avg" in optimizer.states(parameter)) is not matrix, name


def test_adamw_is_that_of_torch() -> None:
    toy, optimizer = made("adamw", weight_decay=0.1, beta2=0.9)
    other = Toy()
    plain = torch.optim.AdamW(other.parameters(), lr=0.05, betas=(0.9, 0.9), weight_decay=0.1)
    for _ in range(3):
        step(toy, optimizer, lr=0.05)
        nn.functional.cross_entropy(other(torch.arange(6)), torch.arange(6).roll(1)).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(toy.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_gradients_are_clipped_as_by_torch(max_norm: float) -> None:
    ours, theirs = Toy(), Toy()
    for toy in (ours, theirs):
        nn.functional.cross_entropy(toy(torch.arange(6)), torch.arange(6).roll(1)).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    assert clip_gradients(ours.parameters(), max_norm) == pytest.approx(wanted, rel=1e-6)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    ours.embed.weight.grad[0, 0] = math.nan  # type: ignore[index]
    assert math.isnan(clip_gradients(ours.parameters(), max_norm))
    assert clip_gradients([], 1.0) == 0.0


TOML = """
model.path = "m"
data.source = "a:b"
[[reward]]
function = "a:b"
"""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["learner.ranks=2", "learner.parallel.tensor=2", "learner.optim.name=muon"], "needs whole matrices"),
        (["learner.ranks=2", "learner.parallel.expert=2", "learner.critic.name=muon"], "learner.critic.name"),
        (["learner.ranks=2", "learner.parallel.sequence=2", "learner.compile=true"], "is not supported"),
        (["learner.ranks=2", "learner.parallel.tensor=2", "learner.cpu_offload=true"], "stay on the device"),
        (["learner.ranks=4", "learner.parallel.tensor=2", "learner.parallel.sequence=2"], "one of them at a time"),
        (["learner.ranks=4", "learner.parallel.expert=2", "learner.parallel.replicate=2"], "one of them at a time"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(TOML, overrides=settings)
    assert says in " ".join(error.message for error in caught.value.errors)
