"""Routing replay on two ranks: the same steps as on one, in every layout that takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import routing_cases as cases
import torch

from learners.gang.gang import Gang

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs of two ranks


@pytest.mark.parametrize("layout", [*cases.LAYOUTS, *(cases.MEGATRON if ranks.HAS_MEGATRON else ())])
def test_two_ranks_replay_as_one(two: Any, one: Any, layout: str) -> None:
    got, wanted = two[0][layout], one[0]["replay"]
    for mine, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ranks.apart(got, wanted) < 1e-5


def test_replay_changes_the_step(one: Any) -> None:
    """The tests above could not pass by ignoring the experts."""
    assert ranks.apart(one[0]["replay"], one[0]["own"]) > 1e-4


def test_adapters_train_with_given_experts_and_the_base_chooses_for_itself(model: Path, gang: Gang) -> None:
    """With adapters of 0 the policy is the reference: they differ by the experts alone."""
    if not ranks.HAS_PEFT:
        pytest.skip("the extra lora is not installed")
    config = cases.contract.make_config(model / ranks.MOE, extra=f"{cases.REPLAY};learner.lora.rank=2")
    backend = cases.contract.make_backend(config, gang)
    given, own = (cases.cut(14, 1, config, gang, replay=replay)[0].micro for replay in (True, False))

    def joined(pieces: Any) -> Any:
        return torch.cat(list(pieces))

    replayed, plain = joined(backend.forward_logprobs(given)), joined(backend.forward_logprobs(own))
    assert float((replayed - plain).abs().max()) > 1e-3
    assert torch.equal(joined(backend.reference_logprobs(given)), plain)
