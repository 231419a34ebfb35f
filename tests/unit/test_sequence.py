"""Rows split over ranks: padding, parts of rows, and what is refused. The exchange itself is in the contract suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.errors import AsyncRLError, ConfigError
from learners.models.attention import sequence_lengths
from learners.models.sequence_parallel import Split, _Cut, check_heads, hidden_states_at


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


@pytest.mark.parametrize(("heads", "groups", "fits"), [(4, 2, True), (4, 1, False), (3, 3, False), (4, None, True)])
def test_heads_divide(heads: int, groups: int | None, fits: bool) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    if fits:
        check_heads(config, 2)
        return
    with pytest.raises(ConfigError, match="does not divide by it"):
        check_heads(config, 2)


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
