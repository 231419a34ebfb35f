"""Routing replay on two ranks: the same steps as on one, in every layout that takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import routing_cases as cases

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs of two ranks


def apart(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference of two results' weights."""
    assert got["weights"].keys() == wanted["weights"].keys()
    return max(
        float(np.abs(np.subtract(values, wanted["weights"][name])).max()) for name, values in got["weights"].items()
    )


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_two_ranks_replay_as_one(two: Any, one: Any, layout: str) -> None:
    got, wanted = two[0][layout], one[0]["replay"]
    for mine, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert apart(got, wanted) < 1e-5


def test_replay_changes_the_step(one: Any) -> None:
    """The tests above could not pass by ignoring the experts."""
    assert apart(one[0]["replay"], one[0]["own"]) > 1e-4
