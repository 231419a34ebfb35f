"""float16 with a loss scale: gradients as in float32, overflows that change nothing, equal on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import float16_cases as cases
import pytest
import torch
from critic_cases import make_config as critic_config

from learners.backends.fsdp2.backend import FSDP2Backend
from learners.backends.fsdp2.loss_scale import GROWTH_UPDATES, LEAST, MOST, START, LossScale
from learners.gang.gang import Gang

pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all jobs of two ranks
COUNTS = pytest.mark.parametrize("count", ["one", "two"])


@pytest.fixture
def found(count: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(count)[0]


def test_the_scale_halves_on_overflow_and_doubles_after_many_updates() -> None:
    scale = LossScale()
    scale.begin()
    assert scale.now == START and scale.lower() and scale.now == START / 2
    scale.begin()  # no update: as if nothing had been
    assert scale.now == START and scale.kept.tolist() == [START, 0]
    assert scale.lower() and scale.lower() and scale.take_overflows() == 3 and scale.take_overflows() == 0
    scale.settle()
    assert scale.kept.tolist() == [START / 4, 1]
    for _ in range(GROWTH_UPDATES - 1):
        assert scale.kept[0] == START / 4
        scale.begin()
        scale.settle()
    assert scale.kept.tolist() == [START / 2, 0]
    scale.kept.copy_(torch.tensor([MOST, GROWTH_UPDATES - 1]))
    scale.begin()
    scale.settle()
    assert scale.kept.tolist() == [MOST, 0]
    scale.now = LEAST
    assert not scale.lower() and scale.now == LEAST


@COUNTS
def test_gradients_are_those_of_float32(found: Any) -> None:
    """Without the scale most of the gradient of a large step vanishes: the test can fail."""
    for tokens, errors in zip(cases.TOKENS, found["gradients"], strict=True):
        assert errors["scaled"] < 0.005, tokens
    assert found["gradients"][1]["plain"] > 0.1


@COUNTS
def test_an_overflow_repeats_the_pass_and_leaves_no_trace(found: Any) -> None:
    falls, fits = found["overflow"]["falls"], found["overflow"]["fits"]
    assert falls["metrics"]["grad_overflows"] > 0 and fits["metrics"]["grad_overflows"] == 0
    assert falls["metrics"]["loss_scale"] == fits["metrics"]["loss_scale"] < MOST
    assert falls["digest"] == fits["digest"] and falls["weights"] == fits["weights"]
    assert falls["metrics"] | {"grad_overflows": 0.0} == fits["metrics"]
    assert falls["counts"] == fits["counts"]  # no sample counts twice
    assert all(kept == [falls["metrics"]["loss_scale"], 1.0] for kept in falls["kept"])


@COUNTS
def test_all_ranks_take_the_same_scale(found: Any) -> None:
    info, kept = found["one_rank"]["info"], found["one_rank"]["kept"]
    assert len({tuple(one) for one in kept}) == 1 and kept[0][0] < START
    assert len({tuple(one) for one in info}) == 1 and not info[0][1] and info[0][3] > 0


@COUNTS
def test_what_is_not_finite_at_any_scale_changes_nothing(found: Any) -> None:
    broken = found["broken"]
    assert all(broken["skipped"]) and broken["same"] and broken["kept"] == [START, 0.0]


@COUNTS
def test_steps_go_as_in_float32(found: Any) -> None:
    for got, wanted in zip(found["steps"]["metrics"], found["steps"]["wanted"], strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], abs=5e-3)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.02)


@COUNTS
def test_a_checkpoint_holds_the_scale_and_continues_bitwise(found: Any) -> None:
    resume = found["resume"]
    assert resume["saved"] == resume["loaded"] != resume["digest"] == resume["digest_again"]
    assert resume["third"] == resume["again"]
    assert resume["after_two"][1] == 2 and all(kept == [START / 8, 77.0] for kept in resume["kept"])


def test_a_checkpoint_without_a_scale_still_loads(model: Path, gang: Gang, tmp_path: Path) -> None:
    _, backend = cases.make(model, gang)
    backend._sharded.scale = None  # as before there was one
    backend.save(tmp_path)
    _, again = cases.make(model, gang)
    again.load(tmp_path)
    assert again._sharded.scale.kept.tolist() == [START, 0.0]


def test_companions_have_scales_of_their_own(model: Path, gang: Gang) -> None:
    backend = FSDP2Backend(critic_config(model, extra=cases.HALF), gang)
    assert {name for name in backend._state() if "loss_scale" in name} == {"loss_scale", "critic/loss_scale"}
    plain = FSDP2Backend(critic_config(model), gang)
    assert not [name for name in plain._state() if "loss_scale" in name]
