"""`[evaluation]`: what contradicts the rest, what is derived, what `asyncrl check` says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bare_config import BARE

from asyncrl.config import Config, parse
from asyncrl.config.judges import row_data_source
from asyncrl.config.mode import evaluation_data, evaluation_sampling, is_evaluation_due, present_roles
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.evaluation.ids import (
    FIRST,
    MAX_ROWS,
    SOURCE_CHARS,
    evaluation_group,
    is_evaluation,
    row_seed,
    row_source,
    split_group,
)
from asyncrl.launcher.launch import LaunchOptions, roles_here
from asyncrl.preflight.derived import derive_findings, notes_on, what_starts
from asyncrl.preflight.files import check_data
from asyncrl.process_plan.plan import TARGETS, plan
from producers.data.evaluation_prompts import HeldOutPrompts
from producers.main import refuse_unable

ON = "\n[evaluation]\npath = 'held.jsonl'\n"


def made(text: str, *overrides: str) -> Config:
    return parse(f"{BARE}\n{text}", overrides=overrides)


def codes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigErrors) as found:
        made(text, *overrides)
    return [f"{error.code}: {error.message}" for error in found.value.errors]


def test_off_by_default() -> None:
    config = made("")
    assert not config.evaluation.enabled
    assert not any(is_evaluation_due(config, step) for step in range(5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["evaluation.every=2"], "evaluation.every is set without"),
        (["evaluation.at_start=true"], "evaluation.at_start is set without"),
        (["evaluation.path=a.jsonl", "evaluation.source=m:f"], "at most one of"),
        (
            ["evaluation.path=a.jsonl", "producers.engine=dataset", "learner.mode=sft", "sampling.group_size=1"],
            "generates nothing",
        ),
        (["evaluation.path=a.jsonl", "evaluation.top_k=5"], "greedy"),
        (["evaluation.path=a.jsonl", "evaluation.share=0"], "share"),
        (
            [
                "evaluation.path=a.jsonl",
                "evaluation.lane=evaluators",
                "producers.engine=sglang",
                "producers.url=['h:1']",
            ],
            "starts engines of its own",
        ),
        (
            ["evaluation.path=a.jsonl", "evaluation.lane=second_weights", "weightsync.in_place=true"],
            "no second set of weights",
        ),
        (["evaluation.path=a.jsonl", "evaluation.samples=0"], "samples"),
    ],
)
def test_contradictions_are_said(settings: list[str], words: str) -> None:
    assert any(words in text for text in codes("", *settings))


def test_evaluators_exist_in_their_lane_alone() -> None:
    config = made(ON, "evaluation.lane=evaluators", "evaluation.evaluators=2")
    roles = present_roles(TARGETS["all"], config)
    names = [one.name for one in plan(config, roles, config_path=Path("c"))]
    assert names == ["buffer", "weightsync", "producer-0", "evaluator-0", "evaluator-1", "reward-0", "learner"]
    assert "2 evaluators" in what_starts(config, roles)
    found = {finding.name: finding for finding in derive_findings(config)}
    assert "on evaluators alone" in found["evaluations"].arithmetic
    usual = made(ON)
    assert usual.evaluation.evaluator_count == 0 and "evaluator" not in present_roles(TARGETS["all"], usual)
    with pytest.raises(ConfigError, match="the run has no evaluators"):
        roles_here(usual, LaunchOptions(target="evaluators"))
    assert roles_here(config, LaunchOptions(target="evaluators")) == ("evaluator",)


def test_a_second_set_of_weights_delays_nothing_and_is_of_the_engine() -> None:
    config = made(ON, "evaluation.lane=second_weights", "evaluation.samples=4", "producers.slots=64")
    assert config.held_out_slots == config.held_out_prompts * 4 == 32, "a quarter of 128"
    assert made(ON, "evaluation.samples=4").held_out_slots == 0
    assert made(ON, "evaluation.lane=second_weights", "evaluation.samples=500").held_out_slots == 64
    found = {finding.name: finding for finding in derive_findings(config)}
    assert "keeps their weights next to newer ones" in found["evaluations"].arithmetic
    long = made(ON, "evaluation.lane=second_weights", "evaluation.timeout_s=700")
    assert not any("training may wait" in note for note in notes_on(long, ["buffer"], cores=8))
    refuse_unable(config, EngineCapabilities("e", 1, 1, second_weights=True))
    refuse_unable(made(ON), EngineCapabilities("e", 1, 1))
    with pytest.raises(ConfigError, match=r"producers\.engine = 'hf' keeps no version") as caught:
        refuse_unable(config, EngineCapabilities("e", 1, 1))
    assert (caught.value.code, caught.value.where) == ("config.conflict", "evaluation.lane") and caught.value.remedy


def test_when_it_is_due() -> None:
    config = made(ON, "evaluation.every=3", "evaluation.at_start=true", "learner.steps=10")
    assert [step for step in range(11) if is_evaluation_due(config, step)] == [0, 3, 6, 9, 10]
    config = made(ON, "evaluation.every=3", "evaluation.at_end=false", "learner.steps=10")
    assert [step for step in range(11) if is_evaluation_due(config, step)] == [3, 6, 9]
    config = made(ON, "learner.steps=10")
    assert [step for step in range(11) if is_evaluation_due(config, step)] == [10]


def test_sampling_is_its_own() -> None:
    base = ("sampling.group_size=8", "sampling.over_issue=2", "sampling.temperature=0.7", "sampling.top_p=0.9")
    base += ("sampling.truncation=biased",)
    greedy = evaluation_sampling(made(ON, *base))
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.asked_samples) == (1.0, 1, 1.0, 1)
    assert not greedy.wants_support
    assert greedy.max_new_tokens == 16
    warm = evaluation_sampling(
        made(
            ON,
            *base,
            "evaluation.samples=4",
            "evaluation.temperature=0.6",
            "evaluation.top_k=20",
            "evaluation.min_p=0.05",
            "evaluation.max_new_tokens=99",
        )
    )
    assert (warm.temperature, warm.top_k, warm.asked_samples, warm.max_new_tokens) == (0.6, 20, 4, 99)
    assert warm.min_p == 0.05 and not warm.wants_support


def test_ids() -> None:
    assert not is_evaluation(FIRST - 1) and is_evaluation(evaluation_group(0, 0))
    for step, row in ((0, 0), (7, 12), (1_000_000, MAX_ROWS - 1)):
        assert split_group(evaluation_group(step, row)) == (step, row)
        assert evaluation_group(step, row) < 1 << 53
    assert row_seed(1, 2) == row_seed(1, 2) != row_seed(1, 3) != row_seed(2, 3)
    assert row_source('{"data_source":"gsm8k"}') == "gsm8k"
    assert row_source("{}") == row_source("not json") == row_source("[1]") == "default"
    long = msgspec.json.encode({"data_source": "m" * 10_000}).decode()
    assert row_source(long) == row_data_source(long) == "m" * SOURCE_CHARS


def test_share_of_a_producer() -> None:
    evaluation = made(ON, "evaluation.share=0.25", "evaluation.samples=4").evaluation
    assert evaluation.held_groups(training_samples=128) == 8
    assert evaluation.held_groups(training_samples=4) == 1, "never nothing"


def write(path: Path, rows: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{n}="}) + "\n" for n in range(rows)))
    return path


def test_check_looks_at_the_file_and_counts(tmp_path: Path) -> None:
    train, held = write(tmp_path / "train.jsonl", 8), write(tmp_path / "held.jsonl", 5)
    config = made(ON, f"data.path={train}", f"evaluation.path={held}", "evaluation.every=2", "evaluation.samples=3")
    assert list(check_data(config)) == []
    found = {finding.name: finding for finding in derive_findings(config)}
    assert found["evaluations"].value == "2", "steps 2 and 4"
    assert "5 prompts x 3" in found["evaluations"].arithmetic
    (error,) = check_data(msgspec.structs.replace(config, evaluation=made(ON).evaluation))
    assert error.where == "evaluation.path = 'held.jsonl'"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.path=a.jsonl", "evaluation.path=./a.jsonl"], "nothing is held out"),
        (["evaluation.samples=4"], "are the same"),
        (["evaluation.at_end=false"], "nothing is evaluated"),
        (["evaluation.timeout_s=700"], "training may wait that long"),
    ],
)
def test_notes(settings: list[str], words: str) -> None:
    assert any(words in note for note in notes_on(made(ON, *settings), ["buffer"], cores=8))


def test_prompts_are_the_first_rows_in_their_order(tmp_path: Path) -> None:
    train, held = write(tmp_path / "train.jsonl", 8), write(tmp_path / "held.jsonl", 5)
    config = made(ON, f"data.path={train}", f"evaluation.path={held}", "data.shuffle=true")
    prompts = HeldOutPrompts(config)
    assert prompts.rows == 5 and not evaluation_data(config).shuffle
    assert [prompts.row_for(evaluation_group(7, row))["prompt"] for row in range(5)] == ["0=", "1=", "2=", "3=", "4="]
    assert HeldOutPrompts(made(ON, f"evaluation.path={held}", "evaluation.max_prompts=3")).rows == 3
    assert HeldOutPrompts(made("")).rows == 0


def test_held_out_rows_do_not_follow_the_ratios_of_the_data(tmp_path: Path) -> None:
    train, more, held = write(tmp_path / "a.jsonl", 8), write(tmp_path / "b.jsonl", 8), write(tmp_path / "c.jsonl", 5)
    other = write(tmp_path / "d.jsonl", 2)
    mixed = [f"data.path={train},{more}", "data.ratios=[2, 1]"]
    prompts = HeldOutPrompts(made(ON, *mixed, f"evaluation.path={held}"))
    assert [prompts.row_for(evaluation_group(7, row))["prompt"] for row in range(5)] == ["0=", "1=", "2=", "3=", "4="]
    both = HeldOutPrompts(made(ON, *mixed, f"evaluation.path={held},{other}"))
    rows = [both.row_for(evaluation_group(7, row))["prompt"] for row in range(7)]
    assert rows == ["0=", "1=", "2=", "3=", "4=", "0=", "1="]


def test_a_source_without_a_length_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held_source.py").write_text(
        "import itertools\n"
        "def some():\n    return ({'prompt': str(n)} for n in range(6))\n"
        "def endless():\n    return ({'prompt': str(n)} for n in itertools.count())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "\n[evaluation]\nsource = 'held_source:%s'\n"
    assert HeldOutPrompts(made(text % "some")).rows == 6
    assert HeldOutPrompts(made(text % "some", "evaluation.max_prompts=4")).rows == 4
    assert HeldOutPrompts(made(text % "endless", "evaluation.max_prompts=4")).rows == 4
