"""The page "Bring your own": each of its files is written, named by its place, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from quick_checks import no_parts_are_tried

from asyncrl.config import DataConfig, OptimConfig, parse
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.plugins import find, is_place, load_object
from asyncrl.preflight.check import check_files
from asyncrl.process_plan.plan import onlookers
from asyncrl.testing import check_environment, check_loss
from buffers.groups.failure_budget import load_filters
from learners.algorithms.aggregation import Denominators
from learners.algorithms.registry import advantage_for, correction_for, divergence_for, loss_for, reduction_for
from learners.algorithms.types import LossInputs, Rollouts
from learners.step.lr_schedule import learning_rate
from learners.trackers.callbacks import make_callback
from learners.trackers.main import tracker_run
from producers.data.prompts import Prompts
from producers.rewards.loading import load_reward
from producers.tools.base import make_toolbox

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own-parts.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (own_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
LEAST = '[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n[[reward]]\nfunction = "own_reward.py:right"\n'
assert no_parts_are_tried  # a fixture
PLACES = ("own_losses:mine", "own.py:mine", "a/b c/own.py:Class.method", "/abs/own.py:mine", "pkg.sub:a.b")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 14
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
        ("own_aggregation.py:root_length", "aggregation"),
        ("own_kl.py:huber", "kl"),
    ],
)
def test_the_parts_of_the_page_pass_their_tests(name: str, kind: str) -> None:
    assert {check.verdict for check in check_loss(name, kind=kind)} == {"ok"}


def test_a_sampler_of_a_file_orders_each_epoch(place: Path) -> None:
    (place / "rows.jsonl").write_text("".join(f'{{"prompt": "{"x" * length}"}}\n' for length in (5, 1, 4, 2, 3)))

    def prompts(sampler: str, **more: Any) -> Prompts:
        return Prompts(DataConfig(path="rows.jsonl", sampler=sampler, **more), seed=7)

    found = prompts("own_sampler.py:easy_first")
    assert [len(found.row_for(group)["prompt"]) for group in range(7)] == [1, 2, 3, 4, 5, 1, 2]
    (place / "wrong.py").write_text(
        "import itertools\n"
        "def short(rows, epoch, seed): return [0]\n"
        "def beyond(rows, epoch, seed): return range(1, len(rows) + 1)\n"
        "def texts(rows, epoch, seed): return [row['prompt'] for row in rows]\n"
        "def broken(rows, epoch, seed): return rows[9]\n"
        "def later(rows, epoch, seed): return [seed - 7, -1, 2, 3, 4] if epoch else [4, 4, 3, 0, 0]\n"
        "turn = itertools.cycle([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]])\n"
        "def changing(rows, epoch, seed): return next(turn)\n"
    )
    wrong = {"short": "5 row numbers", "beyond": "from 0 to 4", "texts": "row numbers", "broken": "IndexError"}
    for name, said in {**wrong, "changing": "another order", "none": "has no 'none'"}.items():
        with pytest.raises(ConfigError, match=said) as caught:
            prompts(f"wrong.py:{name}")
        assert caught.value.code == "config.data" and "data.sampler" in caught.value.where
    later = prompts("wrong.py:later")
    assert [len(later.row_for(group)["prompt"]) for group in range(5)] == [3, 3, 2, 5, 5]
    with pytest.raises(ConfigError, match="epoch 1"):
        later.row_for(5)
    (place / "endless.py").write_text("def rows():\n    yield {'prompt': 'x'}\n")
    with pytest.raises(ConfigError, match="no sequence"):
        Prompts(DataConfig(source="endless.py:rows", sampler="own_sampler.py:easy_first"), seed=7)


def test_an_aggregation_a_kl_and_a_schedule_of_a_file() -> None:
    mask = torch.tensor([True, True, True, False, True])
    rows = torch.tensor([0, 0, 1, 1, 1])
    reduce = reduction_for(
        AlgorithmConfig(aggregation="own_aggregation.py:root_length"), Denominators(tokens=9, sequences=4)
    )
    loss = torch.tensor([1.0, 2.0, 3.0, float("nan"), 5.0])
    found = reduce(loss, mask, rows, siblings=torch.tensor([2, 0]))
    assert float(found) == pytest.approx((3 / 2 + 8 / 2**0.5) / 4)
    estimate = divergence_for("own_kl.py:huber")
    current = torch.tensor([0.5, -2.0, float("nan")], requires_grad=True)
    value = estimate(current, torch.zeros(3), torch.tensor([True, True, False]))
    assert value.tolist() == [0.125, 1.5, 0.0]
    [slope] = torch.autograd.grad(value.sum(), current)
    assert slope.tolist() == [0.5, -1.0, 0.0]
    optim = OptimConfig(lr=2.0, warmup_steps=2, schedule="own_schedule.py:restarts")
    rates = [learning_rate(optim, step=step, steps=10) for step in range(1, 11)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.1, 2.0, 1.1, 2.0, 1.1, 2.0, 1.1])


@pytest.mark.parametrize(
    ("kind", "text", "failing"),
    [
        ("aggregation", "1 / mask.sum()", "the sum over the pieces"),
        ("aggregation", "1 / lengths[sequences].float().pow(2) / denominators.sequences", ""),
        ("kl", "log_probs", "it is 0 if both policies are the same"),
        ("kl", "(log_probs - reference).exp() - 1", "it is finite"),
        ("kl", "(log_probs - reference).mean()", "has the shape"),
        ("kl", "(log_probs - reference).detach().abs()", ""),
    ],
)
def test_what_is_wrong_with_an_aggregation_or_a_kl_is_named(place: Path, kind: str, text: str, failing: str) -> None:
    given = "mask, sequences, lengths, denominators" if kind == "aggregation" else "log_probs, reference"
    (place / "tried.py").write_text(f"def tried({given}):\n    return {text}\n")
    found = [check.text for check in check_loss(f"{place}/tried.py:tried", kind=kind) if check.verdict == "fails"]
    assert len(found) == bool(failing) and all(failing in said for said in found), found


def test_an_environment_and_a_tool_of_a_file() -> None:
    row = {"prompt": "2+2=", "answer": "4"}
    found = check_environment("own_environment.py:Guess", row=row, args={"hint": "no"})
    assert found and all(one.kept for one in found), [one for one in found if not one.kept]
    box = make_toolbox(["own_tool.py:weather"], {}, sandbox=lambda: None, env=())
    [schema] = box.schemas
    wanted = schema["function"]["parameters"]
    assert schema["function"]["description"] == "The weather of a city."
    assert wanted["required"] == ["city"] and wanted["properties"]["days"]["description"] == "from today on"


def test_a_tracker_of_a_file_has_a_process_and_a_folder(place: Path) -> None:
    """Its name is the last part of its place; two of one name would share their files."""
    config = parse(LEAST + f'[run]\ndir = "{place}/run"\n[trackers]\nuse = ["own_tracker.py:Lines", "callbacks"]\n')
    names = [plan.name for plan in onlookers(config, config_path=place / "run.toml")]
    assert names == ["tracker-Lines", "tracker-callbacks"]
    given = tracker_run(config, "own_tracker.py:Lines", place / "trackers")
    tracker = find("asyncrl.trackers", "own_tracker.py:Lines")(given)
    tracker.log({"health/lag_mean": 1.0}, step=3)
    tracker.close()
    assert (place / "trackers" / "Lines" / "lines.txt").read_text() == "3 {'health/lag_mean': 1.0}\n"
    with pytest.raises(ConfigErrors, match="names one twice"):
        parse(LEAST + '[trackers]\nuse = ["own_tracker.py:Lines", "other.py:Lines"]\n')


@pytest.mark.parametrize("kind", ["aggregation", "kl"])
def test_options_that_would_do_nothing_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="no options"):
        check_loss("own_kl.py:huber", kind=kind, options={"delta": 2.0})


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


def test_check_imports_own_parts_and_tells_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.preflight.code.subprocess.run", warm.run)

    def said(text: str) -> str:
        (place / "run.toml").write_text(LEAST + text)
        found = check_files(place / "run.toml")[1].errors
        return "\n".join(f"{error.where}: {error.message}".replace(str(place), "") for error in found)

    good = '[learner.algorithm]\nloss = "own_loss.py:floored"\nadvantage = "own_advantage.py:above_median"\n'
    assert "own_" not in said(good)
    assert "has no 'flored'" in said('[learner.algorithm]\nloss = "own_loss.py:flored"\n')
    assert "there is no file" in said('[learner.algorithm]\nloss = "owned.py:floored"\n')
    assert "has the options floor" in said(good + "loss_options = { flor = 1.0 }\n")
    own = '[learner.algorithm]\naggregation = "own_aggregation.py:root_length"\nkl.kind = "own_kl.py:huber"\n'
    own += '[learner.optim]\nschedule = "own_schedule.py:restarts"\n[trackers]\nuse = ["own_tracker.py:Lines"]\n'
    assert "own_" not in said(own)
    assert "has no 'root'" in said(own.replace("root_length", "root"))
    assert "has no 'hubert'" in said(own.replace("huber", "hubert"))
    assert "has no 'Line'" in said(own.replace("Lines", "Line"))
    (place / "own_schedule.py").write_text("def restarts(step, steps):\n    return 1.0 if step < steps else -0.1\n")
    assert "gives -0.1 for step 100" in said(own + "[learner]\nsteps = 100\n")
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
