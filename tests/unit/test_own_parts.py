"""The page "Bring your own": each of its files is written, named by its place, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from asyncrl.config import parse
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.plugins import find, is_place, load_object
from asyncrl.preflight.check import check_files
from asyncrl.testing import check_loss
from buffers.groups.failure_budget import load_filters
from learners.algorithms.registry import advantage_for, correction_for, loss_for
from learners.algorithms.types import LossInputs, Rollouts
from learners.trackers.callbacks import make_callback
from producers.data.prompts import Prompts
from producers.rewards.loading import load_reward

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own-parts.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (own_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
LEAST = '[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n[[reward]]\nfunction = "own_reward.py:right"\n'
PLACES = ("own_losses:mine", "own.py:mine", "a/b c/own.py:Class.method", "/abs/own.py:mine", "pkg.sub:a.b")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 7
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_places_are_told_from_names() -> None:
    assert all(map(is_place, PLACES))
    assert not any(map(is_place, ("grpo", "builtin", "a b:c", "own.py", "own.py:", ":mine", "http://host:80/x")))


def test_a_reward_and_rows_of_a_file(place: Path) -> None:
    right = load_reward("own_reward.py:right")
    assert right(["p", "q"], ["2 ", "3"], ["2", "4"]) == [1.0, 0.0]
    config = parse(LEAST.replace('path = "rows.jsonl"', 'source = "own_rows.py:sums"\nshuffle = false'))
    prompts = Prompts(config.data, seed=0)
    assert prompts.count(10**6) == 2500 and prompts.row_for(51)["answer"] == "2"


def test_a_filter_of_a_file() -> None:
    [(name, function)] = load_filters(["own_filter.py:too_long"])
    given = {"rewards": [0.0, 1.0], "parts": [{}, {}], "group": 3}
    assert name == "own_filter.py:too_long" and function(lengths=[3000, 2001], **given)
    assert function(lengths=[3000, 20], **given) == ""
    assert parse(LEAST + '[buffer]\nfilters = ["own_filter.py:too_long"]\n').buffer.filters == (name,)


def test_a_loss_of_a_file_has_options_and_the_gradient_that_it_states() -> None:
    algorithm = AlgorithmConfig(loss="own_loss.py:floored", loss_options={"floor": 0.8})
    torch.manual_seed(0)
    current = torch.randn(12, dtype=torch.float64).mul(0.3).requires_grad_()
    zero, mask = torch.zeros(12, dtype=torch.float64), torch.arange(12) > 1
    advantages = torch.randn(12, dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(12, dtype=torch.int64)
        return loss_for(algorithm)(
            LossInputs(values, zero, zero, advantages, mask, rows, torch.full_like(zero, 2.0))
        ).loss

    assert torch.autograd.gradcheck(loss, (current,))
    found = loss_for(algorithm)(LossInputs(current, zero, zero, advantages, mask, torch.zeros(12, dtype=torch.int64)))
    assert found.clipped.any() and torch.equal(found.clipped, (current.exp() < 0.8) & mask)
    assert (found.loss[~mask] == 0).all()
    with pytest.raises(ConfigError, match="has the options floor"):
        loss_for(AlgorithmConfig(loss="own_loss.py:floored", loss_options={"flor": 0.8}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("own_loss.py:floored", "loss"),
        ("own_advantage.py:above_median", "advantage"),
        ("own_correction.py:square_root", "correction"),
    ],
)
def test_the_parts_of_the_page_pass_their_tests(name: str, kind: str) -> None:
    assert {check.verdict for check in check_loss(name, kind=kind)} == {"ok"}


def test_a_callback_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    watch = make_callback("own_callback.py:Watch")
    watch.on_step({"reward_mean": 0.95}, 3)
    watch.on_evaluation({"val-core/add/acc/mean@4": 0.5, "reward_mean": 0.1}, 3)
    watch.on_checkpoint(Path("checkpoints/step_000003"), 3)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 3: reward 0.950" and said[1] == "{'val-core/add/acc/mean@4': 0.5}" and len(said) == 3


def test_an_advantage_and_a_correction_of_a_file() -> None:
    rewards, mask = torch.zeros(6, 4, dtype=torch.float64), torch.ones(6, 4, dtype=torch.bool)
    rewards[:, 3] = torch.tensor([0.0, 1.0, 5.0, 2.0, 2.0, 8.0])
    mask[0, 0] = False
    rollouts = Rollouts(rewards, mask, torch.tensor([0, 0, 0, 1, 1, 1]))
    found = advantage_for(AlgorithmConfig(advantage="own_advantage.py:above_median"))(rollouts).advantages
    assert found[:, 3].tolist() == [-1.0, 0.0, 4.0, 0.0, 0.0, 6.0] and found[0, 0] == 0
    gap = torch.tensor([0.0, 2.0, -2.0, 9.0])
    kept = torch.tensor([True, True, True, False])
    correct = correction_for(AlgorithmConfig(correction="own_correction.py:square_root"))
    weights = correct(gap, torch.zeros(4), kept, torch.zeros(4, dtype=torch.int64)).weights
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, 0.36788, 0.0]), atol=1e-4)


def test_check_imports_own_parts_and_tells_what_is_missing(place: Path) -> None:
    def said(text: str) -> str:
        (place / "run.toml").write_text(LEAST + text)
        found = check_files(place / "run.toml")[1].errors
        return "\n".join(f"{error.where}: {error.message}".replace(str(place), "") for error in found)

    good = '[learner.algorithm]\nloss = "own_loss.py:floored"\nadvantage = "own_advantage.py:above_median"\n'
    assert "own_" not in said(good)
    assert "has no 'flored'" in said('[learner.algorithm]\nloss = "own_loss.py:flored"\n')
    assert "there is no file" in said('[learner.algorithm]\nloss = "owned.py:floored"\n')
    assert "has the options floor" in said(good + "loss_options = { flor = 1.0 }\n")
    assert "has no 'Engine'" in said('[producers]\nengine = "own_loss.py:Engine"\n')


def test_names_that_are_none_are_refused_as_before() -> None:
    with pytest.raises(ConfigErrors, match="is not known"):
        parse(LEAST + '[learner.algorithm]\nloss = "floored"\n')
    with pytest.raises(ConfigError, match="or your own"):
        find("asyncrl.engines", "mine")
    with pytest.raises(ConfigError, match="there is no file"):
        load_object("nowhere.py:f", code="config.extra")


def test_one_file_is_one_module(place: Path) -> None:
    assert load_object("own_filter.py:too_long", code="x") is load_object(f"{place}/own_filter.py:too_long", code="x")
    (place / "broken.py").write_text("import own_filter\nraise RuntimeError('broken')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            load_object("broken.py:f", code="x")
