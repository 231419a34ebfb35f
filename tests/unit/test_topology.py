"""Places of ranks in a layout, what a gang makes of them, and layouts that are refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import config
from asyncrl.config import ParallelConfig
from asyncrl.config.rules import learner
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.preflight import files as check_files
from learners.gang.gang import Gang
from learners.gang.topology import Topology

SIZES = st.sampled_from([1, 2, 3])


def every(size: int, **layout: int) -> list[Topology]:
    return [Topology.from_config(ParallelConfig(**layout), rank=rank, size=size) for rank in range(size)]


@given(tensor=SIZES, sequence=SIZES, pipeline=SIZES, shares=SIZES)
def test_places_are_all_different_and_one_rank_of_each_share_counts(
    tensor: int, sequence: int, pipeline: int, shares: int
) -> None:
    size = tensor * sequence * pipeline * shares
    ranks = every(size, tensor=tensor, sequence=sequence, pipeline=pipeline)
    places = {(one.tensor_place, one.sequence_place, one.share, one.stage) for one in ranks}
    assert places == set(itertools.product(range(tensor), range(sequence), range(shares), range(pipeline)))
    assert [one.rank for one in ranks if one.lead] == [0] and ranks[0].share == 0
    counting = [one for one in ranks if one.counts]
    assert sorted(one.share for one in counting) == list(range(shares))
    assert all(one.stage == pipeline - 1 and one.tensor_place == one.sequence_place == 0 for one in counting)
    for one in ranks:
        assert [ranks[rank].share for rank in one.counting] == list(range(shares))


def test_the_example_of_the_module() -> None:
    ranks = every(8, tensor=2, pipeline=2)
    assert ranks[0].shares == 2
    assert (ranks[5].tensor_place, ranks[5].share, ranks[5].stage, ranks[5].counts) == (1, 0, 1, False)
    assert ranks[4].counts and ranks[0].lead and not ranks[0].counts
    assert ranks[0].counting == [4, 6]


def test_neighbours_split_matrices_and_then_rows() -> None:
    ranks = every(8, tensor=2, sequence=2)
    assert [one.tensor_place for one in ranks] == [0, 1] * 4
    assert [one.sequence_place for one in ranks] == [0, 0, 1, 1] * 2
    assert [one.share for one in ranks] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("size", "layout"),
    [(3, {"tensor": 2}), (4, {"tensor": 2, "replicate": 4}), (6, {"expert": 4}), (1, {"sequence": 2})],
)
def test_a_size_that_does_not_divide_is_refused(size: int, layout: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="do not divide by") as caught:
        Topology.from_config(ParallelConfig(**layout), rank=0, size=size)
    assert caught.value.code == "config.conflict"


class Table(Gang):
    """A gang whose other ranks have already spoken."""

    def __init__(self, topology: Topology, said: list[bytes]) -> None:
        super().__init__(topology.rank, topology.size, None, topology)  # type: ignore[arg-type]
        self._said = said

    def gather(self, data: bytes) -> list[bytes]:
        assert self._said[self.rank] == data
        return self._said


def gangs(said: list[Any], encode: Any, **layout: int) -> list[Table]:
    return [Table(place, [encode(word) for word in said]) for place in every(len(said), **layout)]


def test_sums_count_once_per_share_and_maxima_over_all() -> None:
    import msgspec

    said = [{}, {"x_max": 9.0}, {"x": 1.0, "x_max": 2.0}, {"x": 50.0, "x_max": 3.0}, {}, {}, {"x": 4.0}, {"x": 70.0}]
    for gang, mine in zip(gangs(said, msgspec.msgpack.encode, tensor=2, pipeline=4), said, strict=True):
        assert gang.total(mine) == {"x": 4.0, "x_max": 9.0}
    said = [{"x": 1.0, "y_max": math.nan}, {"x": 1.0, "y_max": 1.0}, {"x": 3.0, "y_max": 0.0}, {"x": 3.0, "y_max": 5.0}]
    for gang, mine in zip(gangs(said, msgspec.msgpack.encode, sequence=2), said, strict=True):
        found = gang.total(mine)
        assert found["x"] == 4.0 and math.isnan(found["y_max"])


def test_sums_of_micro_batches_are_added_and_maxima_kept() -> None:
    import torch

    from learners.backends.base import add_sums

    sums: dict[str, torch.Tensor] = {}
    for loss, most in ((1.0, 5.0), (2.0, 3.0)):
        add_sums(sums, torch.tensor(loss), {"tokens": torch.tensor(4.0), "ratio_max": torch.tensor(most)})
    assert {name: float(value) for name, value in sums.items()} == {"loss": 3.0, "tokens": 8.0, "ratio_max": 5.0}


def test_what_shares_say_is_said_once() -> None:
    for gang, word in zip(gangs([b"a", b"b", b"c", b"d"], bytes, tensor=2), [b"a", b"b", b"c", b"d"], strict=True):
        assert gang.gather_shares(word) == [b"a", b"c"]
        assert gang.shares == 2


TOML = """
model.path = "m"
data.source = "a:b"
[[reward]]
function = "a:b"
"""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["learner.ranks=4", "cluster.learner_hosts=2", "learner.parallel.replicate=3"],
            "learner.ranks * cluster.learner_hosts / (tensor * sequence * pipeline) = 8 does not divide",
        ),
        (["learner.ranks=4", "learner.parallel.replicate=3"], "= 4 does not divide by learner.parallel.replicate = 3"),
        (["learner.ranks=2", "learner.parallel.pipeline=2"], "backend 'fsdp2' cannot split so"),
        (["learner.ranks=4", "learner.parallel.tensor=2", "learner.parallel.expert=2"], "by one plan of transformers"),
        (["learner.ranks=4", "learner.parallel.replicate=2", "learner.parallel.expert=4"], "replicate) = 2 does not"),
        (["learner.ranks=3", "learner.backend=other", "learner.parallel.tensor=2"], "learner.ranks = 3"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(TOML, overrides=settings)
    assert says in str(caught.value) + " ".join(error.message for error in caught.value.errors)


@pytest.mark.parametrize(
    "layout", ["replicate=2", "expert=4 sequence=4", "expert=2 replicate=2", "tensor=2 sequence=2"]
)
def test_layouts_that_fit_are_taken(layout: str) -> None:
    made = config.parse(TOML, overrides=["learner.ranks=4", *(f"learner.parallel.{part}" for part in layout.split())])
    assert not list(learner.problems(made))
    assert Topology.from_config(made.learner.parallel, rank=3, size=4).size == 4


@pytest.mark.parametrize(
    ("layout", "model", "key"),
    [
        ("sequence=4", {"num_attention_heads": 8, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("tensor=3", {"num_attention_heads": 8}, "num_attention_heads = 8"),
        ("expert=2", {"num_attention_heads": 8}, "num_experts = 0"),
        ("expert=3", {"num_attention_heads": 8, "num_local_experts": 8}, "num_experts = 8"),
        ("tensor=2", {"text_config": {"num_attention_heads": 3}}, "num_attention_heads = 3"),
        ("tensor=2", {"num_attention_heads": 4, "num_key_value_heads": 2}, ""),
    ],
)
def test_heads_and_experts_divide(tmp_path: Path, layout: str, model: dict[str, Any], key: str) -> None:
    made = config.parse(TOML, overrides=["learner.ranks=12", "learner.backend=other", f"learner.parallel.{layout}"])
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = [error.message for error in check_files.check_layout(made, tmp_path / "config.json")]
    assert any(key in message for message in found) if key else not found
    (tmp_path / "config.json").write_text("{")
    assert not list(check_files.check_layout(made, tmp_path / "config.json"))
