"""Optimizers of the learner: who has which parameter, what is remembered, and norms of gradients."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl import config
from asyncrl.config import OptimConfig
from asyncrl.errors import ConfigError, ConfigErrors
from learners.backends.fsdp2.mesh import clip_gradients
from learners.backends.muon import Muon, orthogonalized
from learners.backends.optimizers import Optimizers, make_optimizer
from learners.backends.sharded_checkpoint import host_shard, load_shards, local_parts


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


def test_muon_is_that_of_torch_to_the_precision_of_bfloat16() -> None:
    random = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=random)) for shape in ((12, 20), (20, 12))]
    theirs = [nn.Parameter(one.detach().clone()) for one in matrices]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    ours = Muon(matrices, **settings)
    library = torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    before = [one.detach().clone() for one in matrices]
    for _ in range(3):
        for mine, other in zip(matrices, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=random)
            other.grad = mine.grad.clone()
        ours.step()
        library.step()
    for mine, other, start in zip(matrices, theirs, before, strict=True):
        moved = (other - start).norm()
        assert (mine - other).norm() < 0.02 * moved and moved > 0.1


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_muon_iterates_in_float32_on_a_cpu(shape: tuple[int, int]) -> None:
    """A CPU without instructions for bfloat16 takes 24 times as long with it."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = orthogonalized(matrix.double())
    assert (orthogonalized(matrix) - exact).abs().max() < 1e-5
    assert torch.linalg.svdvals(exact).sub(1).abs().max() < 0.4


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


# ---------------------------------------------------------------- moments in 8 bits


class Wide(nn.Module):
    """A matrix whose moments are kept in 8 bits, and one that is too small for that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = nn.Linear(64, 128, bias=False)
        self.small = nn.Linear(128, 6, bias=False)


def walk(optimizer: Optimizers, wide: Wide, steps: range) -> None:
    for number in steps:
        for place, parameter in enumerate(wide.parameters()):
            generator = torch.Generator().manual_seed(10 * number + place)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(0.01)
        optimizer.forget()


def read_state(wide: Wide, optimizer: Optimizers) -> dict[str, torch.Tensor]:
    optimizer.prime()
    return {
        f"{key}/{name}": value
        for name, one in wide.named_parameters()
        for key, value in (("model", one.data), *optimizer.states(one).items())
    }


def wide_with(name: str) -> tuple[Wide, Optimizers]:
    if name == "adamw_8bit":
        import aside  # noqa: F401 - where torchao is

        pytest.importorskip("torchao", reason="the extra optim-8bit is not installed")
    wide = Wide()
    return wide, make_optimizer(wide, [], OptimConfig(name=name, lr=0.01), fused=False)  # type: ignore[arg-type]


def test_moments_in_8_bits_follow_adamw_in_a_quarter_of_their_memory() -> None:
    (wide, eight), (other, plain) = wide_with("adamw_8bit"), wide_with("adamw")
    for one, optimizer in ((wide, eight), (other, plain)):
        walk(optimizer, one, range(5))
    moved = (other.big.weight - Wide().big.weight).detach().abs().max()
    assert float((wide.big.weight - other.big.weight).detach().abs().max()) < 0.1 * float(moved)
    torch.testing.assert_close(wide.small.weight, other.small.weight)  # that one is in float32 still
    assert not torch.equal(wide.big.weight, other.big.weight)
    parts = local_parts(eight.states(wide.big.weight)["exp_avg"])
    assert parts["#codes"].dtype == torch.uint8 and parts["#scale"].numel() == 64 * 128 // 256


def test_a_checkpoint_in_8_bits_goes_on_bitwise(tmp_path: Path) -> None:
    wide, optimizer = wide_with("adamw_8bit")
    walk(optimizer, wide, range(3))
    host_shard(read_state(wide, optimizer), rank=0, extra={}, copy=False).save(tmp_path)
    walk(optimizer, wide, range(3, 6))
    fresh, other = wide_with("adamw_8bit")
    load_shards(tmp_path, read_state(fresh, other), rank=0, ranks=1)
    assert not torch.equal(fresh.big.weight, wide.big.weight)
    walk(other, fresh, range(3, 6))
    assert torch.equal(fresh.big.weight, wide.big.weight) and torch.equal(fresh.small.weight, wide.small.weight)


@pytest.mark.parametrize(("first", "then"), [("adamw_8bit", "adamw"), ("adamw", "adamw_8bit")])
def test_a_checkpoint_goes_from_8_bits_to_32_and_back(tmp_path: Path, first: str, then: str) -> None:
    wide, optimizer = wide_with(first)
    walk(optimizer, wide, range(3))
    host_shard(read_state(wide, optimizer), rank=0, extra={}, copy=False).save(tmp_path)
    fresh, other = wide_with(then)
    load_shards(tmp_path, read_state(fresh, other), rank=0, ranks=1)
    for key in ("exp_avg", "exp_avg_sq"):
        held, got = optimizer.states(wide.big.weight)[key], other.states(fresh.big.weight)[key]
        held, got = (one.dequantize() if hasattr(one, "codes") else one for one in (held, got))
        assert float(held.abs().max()) > 0
        limit = 0.0 if then == "adamw" else 0.02 * float(held.abs().max())
        torch.testing.assert_close(got, held, atol=limit, rtol=0)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="torchao") as caught:
        make_optimizer(Wide(), [], OptimConfig(name="adamw_8bit"), fused=False)
    assert caught.value.code == "config.extra"


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
        (
            ["learner.ranks=4", "learner.parallel.sequence=2", "learner.parallel.expert=2", "learner.optim.name=muon"],
            "not with learner.parallel.expert",
        ),
        (["learner.ranks=2", "learner.parallel.sequence=2", "learner.compile=true"], "is not supported"),
        (["learner.ranks=2", "learner.parallel.tensor=2", "learner.cpu_offload=true"], "stay on the device"),
        (["learner.ranks=4", "learner.parallel.tensor=2", "learner.parallel.expert=2"], "one plan of transformers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(TOML, overrides=settings)
    assert says in " ".join(error.message for error in caught.value.errors)
