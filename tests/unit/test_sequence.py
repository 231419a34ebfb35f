"""Rows split over ranks: padding, parts of rows, and what is refused. The exchange itself is in the contract suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.config import parse
from asyncrl.config.rules.learner import model_problems
from asyncrl.errors import AsyncRLError, ConfigError
from learners.models.segments import attend_last, attend_part, sequence_lengths
from learners.models.sequence_parallel import (
    Split,
    _attend_chunk,
    _Cut,
    _wrap_attention,
    count_shared,
    hidden_states_at,
)

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2}


def split(place: int = 1, size: int = 2) -> Split:
    return Split(None, place=place, size=size)


@pytest.mark.parametrize(("rows", "width", "size"), [(1, 7, 2), (3, 5, 4), (2, 8, 4), (1, 1, 3)])
def test_padding_goes_on_with_the_last_sequence(rows: int, width: int, size: int) -> None:
    ids = torch.arange(rows * width).view(rows, width)
    positions = torch.arange(width).expand(rows, -1)
    if rows == 1 and width > 3:
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3][:width]])
    longer, further = split(size=size).pad(ids, positions)
    assert longer.shape == further.shape == (rows, -(-width // size) * size)
    assert torch.equal(longer[:, :width], ids) and torch.equal(further[:, :width], positions)
    assert len(sequence_lengths(further)) == len(sequence_lengths(positions))


def test_a_layer_gets_its_part_of_the_row() -> None:
    hidden, rotary = torch.randn(2, 8, 3), (torch.randn(1, 8, 4), torch.randn(1, 8, 4))
    positions = torch.arange(8).expand(2, -1)
    given: dict[str, Any] = {"position_embeddings": rotary, "position_ids": positions}
    (mine,), cut = _Cut(split(), first=True)(nn.Identity(), (hidden,), given)
    assert torch.equal(mine, hidden[:, 4:]) and torch.equal(cut["position_embeddings"][0], rotary[0][:, 4:])
    assert cut["position_ids"] is positions  # attention needs those of the whole row
    (later,), _ = _Cut(split(), first=False)(nn.Identity(), (mine,), given)
    assert later is mine
    paused = split()
    with paused.disable():
        assert _Cut(paused, first=True)(nn.Identity(), (hidden,), given) is None
    assert not paused.paused


def test_layers_without_ready_rotary_embeddings_are_refused() -> None:
    with pytest.raises(AsyncRLError, match="takes no rotary embeddings") as caught:
        _Cut(split(), first=True)(nn.Identity(), (torch.randn(1, 4, 2),), {})
    assert caught.value.code == "config.model"


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "tensor", "shared"),
    [(4, 2, 2, 1, 2), (4, 2, 4, 1, 2), (4, 1, 4, 1, 1), (28, 4, 6, 1, 2), (4, None, 4, 1, 4), (8, 4, 4, 2, 2)],
)
def test_heads_are_shared_as_far_as_they_divide(
    heads: int, groups: int | None, ranks: int, tensor: int, shared: int
) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    assert count_shared(config, ranks, tensor=tensor) == shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_chunks_of_queries_attend_as_the_whole_row(dtype: torch.dtype, chunks: int) -> None:
    """Sequences that begin, end and lie inside chunks; results and all gradients."""
    lengths, generator = [7, 3, 15, 5], torch.Generator().manual_seed(0)

    def heads(count: int) -> torch.Tensor:
        return torch.randn(2, count, 30, 8, dtype=dtype, generator=generator).requires_grad_()

    query, key, value = heads(4), heads(2), heads(2)
    owner = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    mask = (owner[:, None] == owner) & torch.ones(30, 30).tril().bool()
    wide = (one.repeat_interleave(2, 1) for one in (key, value))
    wanted = nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.3).transpose(1, 2)
    parts = zip(range(0, 30, 30 // chunks), query.chunk(chunks, 2), strict=True)
    got = torch.cat([attend_part(part, key, value, lengths, start, scale=0.3) for start, part in parts], 1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    grad = torch.randn(wanted.shape, dtype=dtype, generator=generator)
    for mine, theirs in zip(
        *(torch.autograd.grad(one, (query, key, value), grad) for one in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_values_of_another_width_attend_too() -> None:
    """By torch's own mask, as on other devices."""
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 4)
    mask = torch.ones(3, 7).tril(4).bool()
    wide = (one.repeat_interleave(2, 1) for one in (key, value))
    wanted = nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=mask)
    torch.testing.assert_close(attend_last(query, key, value, scale=None), wanted)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("model.attn_implementation=auto", ""),
        ("model.attn_implementation=sdpa", ""),
        ("model.attn_implementation=flash_attention_2", "num_key_value_heads = 2 of the model does not divide by it"),
        ("model.attn_implementation=flash_attention_2 learner.parallel.sequence=2", ""),
    ],
)
def test_kernels_of_whole_rows_need_heads_that_divide(lines: str, says: str) -> None:
    settings = ("model.path=m", "data.source=a:b", 'reward=[{function = "a:b"}]', "learner.ranks=4")
    made = parse("", overrides=[*settings, "learner.parallel.sequence=4", *lines.split()])
    found = " ".join(problem.message for problem in model_problems(made, MODEL))
    assert says in found and bool(says) is bool(found)


def test_attention_that_takes_no_chunks_is_refused_at_the_start() -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    with pytest.raises(ConfigError, match="takes whole rows") as caught:
        _wrap_attention(model, Split(None, place=0, size=4, heads=2))
    assert caught.value.code == "config.conflict" and "varlen" in caught.value.remedy


@pytest.mark.parametrize(("given", "says"), [({}, "no positions"), ({"dropout": 0.1, "position_ids": 1}, "drops")])
def test_chunks_need_positions_and_no_dropout(given: dict[str, Any], says: str) -> None:
    heads = torch.zeros(1, 4, 2, 8)
    with pytest.raises(AsyncRLError, match=says):
        _attend_chunk(None, Split(None, place=0, size=4, heads=2), nn.Identity(), heads, heads, heads, None, **given)


def test_every_place_is_of_one_rank() -> None:
    """Each rank finds the states of its own places; together they are those of the row."""
    row = torch.randn(2, 5, 3)
    places = torch.tensor([0, 2, 4, 5, 9])

    def body(*, input_ids: torch.Tensor, place: int, **_: Any) -> Any:
        whole = torch.cat((row, row[:, -1:]), 1)  # padded to 6
        assert input_ids.shape == (2, 6)
        return SimpleNamespace(last_hidden_state=whole.chunk(2, 1)[place])

    found = torch.zeros(5, 3)
    for place in (0, 1):
        states = hidden_states_at(
            lambda place=place, **given: body(place=place, **given),
            torch.zeros(2, 5, dtype=torch.long),
            torch.arange(5).expand(2, -1),
            places,
            split=split(place),
        )
        assert states.mine is not None
        found[states.mine] += states.hidden
        assert torch.equal(states.select(places), places[states.mine])
    assert torch.equal(found, row.flatten(0, 1)[places])
