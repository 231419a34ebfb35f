"""`asyncrl new` writes parts that work; `asyncrl test-loss` accepts right ones and names what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.cli import main
from asyncrl.config import parse
from asyncrl.config.sections.algorithm_catalogue import TABLES
from asyncrl.configure.new_part import PARTS, write_part
from asyncrl.errors import ConfigError
from asyncrl.testing import check_environment, check_loss, check_reward
from learners import contract_test
from learners.algorithms.types import Correction, Estimate, LossInputs, TokenLoss
from producers.tools.base import make_toolbox

ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]
LEAST = '[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n[[reward]]\nfunction = "a:b"\n'
NEED_OPTIONS = {"dro": {"beta": 0.1}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", PARTS)
def test_the_command_writes_and_says_what_to_do(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", kind, "mine"]) == 0
    said = capsys.readouterr().out
    assert "written: mine.py" in said and "test it: asyncrl test-" in said and "mine.py:mine" in said
    compile(Path("mine.py").read_text(), "mine.py", "exec")
    assert main(["new", kind, "mine"]) == 2 and main(["new", kind, "not a name"]) == 2


def test_a_new_reward_keeps_the_contract(place: Path) -> None:
    write_part("reward", "mine", place)
    assert check_reward("mine.py:mine", ROWS).ok


def test_a_new_loss_keeps_the_contract(place: Path) -> None:
    write_part("loss", "mine", place)
    assert {check.verdict for check in check_loss("mine.py:mine", options={"clip": 0.1})} == {"ok"}
    assert parse(LEAST + '[learner.algorithm]\nloss = "mine.py:mine"\n').learner.algorithm.loss == "mine.py:mine"


def test_a_new_environment_keeps_the_contract(place: Path) -> None:
    write_part("environment", "Guess", place)
    found = check_environment("Guess.py:Guess", row=ROWS[0], args={"hint": "no"})
    assert all(one.kept for one in found), [one for one in found if not one.kept]


def test_a_new_tool_has_a_schema(place: Path) -> None:
    write_part("tool", "letters", place)
    box = make_toolbox(["letters.py:letters"], {}, sandbox=lambda: None, env=())
    [schema] = box.schemas
    assert schema["function"]["name"] == "letters"
    assert schema["function"]["parameters"]["properties"]["text"]["description"] == "the text"


# ---------------------------------------------------------------- the contract of losses


@pytest.mark.parametrize("name", sorted(TABLES["loss"]))
def test_losses_that_ship_keep_it(name: str) -> None:
    checks = check_loss(name, options=NEED_OPTIONS.get(name))
    assert not [check.text for check in checks if check.verdict == "fails"]


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_advantages_that_ship_keep_it(name: str) -> None:
    assert {check.verdict for check in check_loss(name, kind="advantage")} == {"ok"}


@pytest.mark.parametrize("name", ["tis", "mis"])
def test_corrections_that_ship_keep_it(name: str) -> None:
    assert {check.verdict for check in check_loss(name, kind="correction")} == {"ok"}


def plain(inputs: LossInputs, log_ratio: torch.Tensor | None = None, **changed: torch.Tensor) -> TokenLoss:
    clean = (inputs.current - inputs.proximal).where(inputs.mask, 0.0).clamp(-20, 20)
    loss = (-inputs.advantages.where(inputs.mask, 0.0) * (clean if log_ratio is None else log_ratio).exp()).where(
        inputs.mask, 0.0
    )
    return TokenLoss(**{"loss": loss, "clipped": inputs.mask & False, **changed})


WRONG = {
    "values outside the mask": lambda i: plain(i, i.current - i.proximal),
    "differs by": lambda i: plain(i, loss=plain(i).loss - plain(i).loss.mean() * i.mask),
    "is not finite for|not so: it is finite": lambda i: plain(i, (i.current - i.proximal).where(i.mask, 0.0)),
    "has the shape": lambda i: plain(i, loss=plain(i).loss[1:]),
    "return booleans|is torch.float64": lambda i: plain(i, clipped=plain(i).loss.detach()),
    "the same inputs": lambda i: plain(i, loss=plain(i).loss * torch.rand(())),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_loss_is_named(said: str) -> None:
    checks = contract_test.check_loss(WRONG[said])
    wrong = [f"{check.text} {check.remedy}" for check in checks if check.verdict == "fails"]
    assert any(part in text for part in said.split("|") for text in wrong), checks


def test_a_detached_factor_is_a_note() -> None:
    def detached(inputs: LossInputs) -> TokenLoss:
        ratio = (inputs.current - inputs.proximal).where(inputs.mask, 0.0).clamp(-20, 20).exp().detach()
        current = inputs.current.where(inputs.mask, 0.0)
        advantages = inputs.advantages.where(inputs.mask, 0.0).detach()
        return TokenLoss(-(ratio * advantages * current).where(inputs.mask, 0.0), inputs.mask & False)

    checks = contract_test.check_loss(detached)
    assert [check.verdict for check in checks].count("note") == 1
    assert not [check for check in checks if check.verdict == "fails"]


def test_a_wrong_advantage_and_a_wrong_correction_are_named() -> None:
    checks = contract_test.check_advantage(lambda r: Estimate(r.rewards.sum(1, keepdim=True) * torch.ones(1, 6)))
    assert any("outside the mask" in check.text for check in checks if check.verdict == "fails")
    first = contract_test.check_advantage(lambda r: Estimate((r.rewards - r.rewards[:1]).where(r.mask, 0.0)))
    assert any("order of the samples" in check.text for check in first if check.verdict == "fails")
    bare = contract_test.check_correction(lambda p, b, mask, rows: Correction((p - b).exp().where(mask, 0.0), mask))
    assert any("finite" in check.text for check in bare if check.verdict == "fails")


def test_the_command_ends_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert contract_test.main(["ppo"]) == 0
    assert "ok     its gradient is that of finite differences" in capsys.readouterr().out
    Path("bad.py").write_text("def bad(inputs):\n    return inputs\n")
    assert contract_test.main(["nothing"]) == 2 and contract_test.main(["ppo", "--options", "{"]) == 2
    with pytest.raises(ConfigError):
        check_loss("bad.py:nothing")
    assert json.loads("{}") == {}
