"""Checkpoints that two ranks write beside their training: durable on both or on none, and loaded by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract
import checkpoint_cases as cases  # noqa: F401 - the fixtures look for it
import pytest
from test_backend_contract import compare

from learners.checkpoints import checkpoint
from learners.gang.gang import Gang

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs of two ranks


@pytest.mark.parametrize("count", [2, 1])
def test_ranks_agree_on_what_is_durable(two: Any, one: Any, count: int) -> None:
    results = (two if count == 2 else one)[0]
    assert results["running"] == [True] * 3  # no word of the training waited for the writers
    assert results["failures"] == [[0] * count, [1] * count, [0] * count]
    assert results["durable"] == [1, 3] and results["steps"] == [3, 1]
    assert results["files"] == ["step_000001", "step_000003"]
    (said,) = results["said"]
    assert "checkpoint of step 2" in said and "No space left" in said and "The newest checkpoint is of step 1" in said


def test_one_rank_goes_on_from_what_two_wrote(model: Path, gang: Gang, two: Any, one: Any) -> None:
    """Another world size; and the files hold their own step, although the ranks had trained the next one before."""
    folders = [checkpoint.step_folder(out / "run" / "checkpoints", 1) for _, out in (two, one)]
    assert [checkpoint.find_problem(folder) for folder in folders] == ["", ""]
    assert [len(list(folder.glob("shard_*"))) for folder in folders] == [2, 1]
    got, wanted = (contract.continued(model, gang, folder) for folder in folders)
    compare(got, wanted)
    later = contract.continued(model, gang, checkpoint.step_folder(two[1] / "run" / "checkpoints", 3))
    assert later["metrics"] != got["metrics"]
