"""How weights are cut into parts on their way to rank 0; what arrives is in the contract suite of the backends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.backends.fsdp2.gathering import Row, group_rows, share_rows


def row(*shape: int) -> Row:
    return Row("w", shape, torch.zeros(0))


@given(total=st.integers(0, 50), ranks=st.integers(1, 9))
def test_rows_are_those_of_torch_chunk(total: int, ranks: int) -> None:
    """FSDP cuts by `torch.chunk`: trailing ranks may have fewer rows, or none."""
    chunks = [len(part) for part in torch.arange(total).chunk(ranks)] if total else []
    mine = [share_rows(total, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [end - first for first, end in mine] == chunks + [0] * (ranks - len(chunks))


def test_neighbours_share_a_part_and_a_large_tensor_has_its_own() -> None:
    rows = [row(4, 2), row(4, 2), row(4, 2), row(100, 10), row(1)]
    parts = group_rows(rows, itemsize=4, part_bytes=64)
    assert [len(part) for part in parts] == [2, 1, 1, 1]
    assert [one for part in parts for one in part] == rows


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_an_empty_tensor_is_no_part_of_its_own(shape: tuple[int, int]) -> None:
    assert [len(part) for part in group_rows([row(2), row(*shape), row(2)], itemsize=4)] == [3]
