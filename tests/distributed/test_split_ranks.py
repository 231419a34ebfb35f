"""Critic, process rewards, SFT, DPO and reward models in the layouts of two ranks against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import split_cases as cases

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs of two ranks


def same(got: Any, wanted: Any, where: str) -> int:
    """Compare all numbers of two results to rounding; how many there were."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        return sum(same(got[key], value, f"{where}/{key}") for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)) and not all(isinstance(value, (int, float)) for value in wanted):
        assert len(got) == len(wanted), where
        return sum(same(*pair, f"{where}/{place}") for place, pair in enumerate(zip(got, wanted, strict=True)))
    if isinstance(wanted, (int, float, list, tuple)):
        np.testing.assert_allclose(got, wanted, atol=3e-5, rtol=3e-5, err_msg=where)
        return int(np.size(wanted))
    assert got == wanted, where
    return 0


@pytest.mark.chaos_cases(*(name.replace(" ", "-") for name in cases.LONG))
@pytest.mark.parametrize(("layout", "name"), [(one, name) for one in cases.LAYOUTS for name in cases.LAYOUTS[one][0]])
def test_two_ranks_equal_one_process(two: Any, one: Any, layout: str, name: str) -> None:
    import msgspec

    wanted = msgspec.json.decode(
        msgspec.json.encode(one[0][f"{cases.LAYOUTS[layout][1]} {name}"])
    )  # keys as results of other processes have them
    assert same(two[0][f"{layout} {name}"], wanted, name) > 10_000  # metrics and every weight
