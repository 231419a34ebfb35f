"""Moments in 8 bits over two ranks: close to one rank, bitwise after a checkpoint, and loaded in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eight_bit_cases as cases
import pytest
import ranks

from learners.gang.gang import Gang

pytestmark = [
    pytest.mark.timeout(1200),  # the first one waits for the launch of all jobs of two ranks
    pytest.mark.skipif(not cases.HAS_TORCHAO, reason="the extra optim-8bit is not installed"),
]
LEARNING_RATE = 1e-3


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_two_ranks_walk_as_one(two: Any, one: Any, layout: str) -> None:
    """Blocks of 256 are of what a rank holds: their scales differ with the layout, by what 8 bits can tell."""
    got, wanted, plain = two[0][layout], one[0]["eight"], one[0]["plain"]
    assert got["narrow"] >= 4 and wanted["narrow"] >= got["narrow"] and plain["narrow"] == 0
    assert got["metrics"][0]["loss"] == pytest.approx(wanted["metrics"][0]["loss"], abs=1e-3)
    assert got["metrics"][0]["grad_norm"] == pytest.approx(wanted["metrics"][0]["grad_norm"], rel=0.02)
    assert (
        ranks.apart(got, wanted) < LEARNING_RATE and ranks.apart(got, plain) < LEARNING_RATE
    )  # of three steps of about 1e-3
    assert ranks.apart(got, plain) > 0


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_a_checkpoint_continues_bitwise(two: Any, layout: str) -> None:
    resume = two[0][layout]
    assert resume["saved"] == resume["loaded"] != resume["digest"] == resume["digest_again"]
    assert resume["third"] == resume["again"]


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("extra", ["", cases.EIGHT])
def test_it_continues_on_one_rank_in_8_or_32_bits(two: Any, one: Any, gang: Gang, layout: str, extra: str) -> None:
    got = cases.load(one[1] / "wide", gang, Path(two[1]) / layout / "checkpoint", extra)
    assert got["metrics"][0]["loss"] == pytest.approx(two[0][layout]["third"]["loss"], abs=1e-5)
    assert ranks.apart(got, two[0][layout]) < LEARNING_RATE / 10
