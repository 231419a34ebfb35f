"""Rescoring without its process: what is scored with which limits, the file of scores, the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import dump, parse
from asyncrl.errors import ConfigError
from asyncrl.runs.rescore import plan_rescore, render, summary
from asyncrl.runs.score_file import GroupScores, Head, read_scores, responses_digest, write_scores
from asyncrl.runtime.run_dir import RunDir

TOML = """
model.path = "m"
data.path = "d.jsonl"
[[reward]]
function = "a:exact"
weight = 2.0
[[reward]]
function = "a:deep"
judge = "slow"
[[judge]]
name = "slow"
timeout_s = 90
count = 3
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder with two archived steps, as far as their names go."""
    made = RunDir(tmp_path / "run").create()
    made.config.write_text(dump(parse(TOML, overrides=[f'run.dir="{tmp_path}/run"'])))
    made.archive.mkdir()
    for step in (1, 2):
        (made.archive / f"step-{step:08d}.batch").write_bytes(b"")
    return made


def test_the_runs_own_functions_are_asked_again(run: RunDir) -> None:
    config, plan = plan_rescore(run, rewards=(), judge="")
    assert [reward.function for reward in config.reward] == ["a:exact", "a:deep"] and plan.steps == (1, 2)
    assert plan.kept == {}
    config, plan = plan_rescore(run, rewards=(), judge="slow")
    assert [reward.function for reward in config.reward] == ["a:deep"] and plan.kept == {"exact": 2.0}
    config, plan = plan_rescore(run, rewards=(), judge="default")
    assert [reward.function for reward in config.reward] == ["a:exact"] and plan.kept == {"deep": 1.0}
    assert config.judge == ()


def test_new_functions_stand_in_for_all_or_for_one_judge(run: RunDir) -> None:
    config, plan = plan_rescore(run, rewards=("b:strict", "c:strict"), judge="")
    assert [reward.label for reward in config.reward] == ["b:strict", "c:strict"] and plan.kept == {}
    config, plan = plan_rescore(run, rewards=("b:exact",), judge="slow")
    assert [reward.label for reward in config.reward] == ["b:exact"], "the short name is that of a part that stays"
    assert plan.kept == {"exact": 2.0}
    assert (config.reward_workers.timeout_s, config.reward_workers.count) == (90.0, 3), "with the limits of the judge"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"judge": "fast", "rewards": ()}, "'fast': this run has default, slow"),
        ({"judge": "", "rewards": ("a:b", "a:b")}, "there twice"),
    ],
)
def test_what_cannot_be_planned_says_why(run: RunDir, words: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=message):
        plan_rescore(run, **words)


def test_a_run_without_an_archive_says_so(tmp_path: Path) -> None:
    made = RunDir(tmp_path / "run").create()
    made.config.write_text(TOML)
    with pytest.raises(ConfigError, match=r"log\.archive"):
        plan_rescore(made, rewards=(), judge="")


GROUPS = [
    GroupScores(1, 4, "c", {0: 1.0, 1: 0.0}, {0: 1.0, 1: 0.5}, {1: {"x": 0.5}}),
    GroupScores(2, 5, "d", {0: 1.0, 1: 1.0}, {0: 1.0 + 1e-12}, {}, {1: "timeout: f: no result within 1 s"}),
]
HEAD = Head("/r", ("b:strict",), versions={"": "new"}, recorded={"old": 4})


def test_the_file_reads_back(tmp_path: Path) -> None:
    write_scores(tmp_path / "s.jsonl", HEAD, GROUPS)
    assert read_scores(tmp_path / "s.jsonl") == (HEAD, GROUPS)


@pytest.mark.parametrize(
    "text", ["", "{}", "no", '{"run":"r","functions":[],"format":9}', '{"run":"r","functions":[]}\n{"step":']
)
def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_scores(tmp_path / "s.jsonl")
    assert caught.value.code == "rescore.file" and caught.value.where.endswith("s.jsonl")


def test_the_report_counts_what_changed_and_what_failed(tmp_path: Path) -> None:
    found = summary(HEAD, GROUPS, path=tmp_path / "s.jsonl", wall_s=1.0)
    assert (found.changed_groups, found.changed_samples, found.samples, found.groups) == (1, 1, 4, 2)
    assert found.failed == {"timeout": 1} and found.mean_before == pytest.approx(2 / 3)
    assert found.mean_after == pytest.approx(2.5 / 3), "over the samples that could be scored"
    text = render(found)
    assert "changed     1 samples in 1 groups" in text and "group      4 of step     1: 0.5000 -> 0.7500" in text
    assert "old (4 scores) in the log, new now" in text and "1 samples: timeout" in text and "note:" not in text


def test_other_rewards_of_the_same_version_are_told_to_be_odd(tmp_path: Path) -> None:
    head = Head("/r", ("b:strict",), versions={"": "old"}, recorded={"old": 4})
    assert "not deterministic" in render(summary(head, GROUPS, path=tmp_path, wall_s=1.0))


def test_the_content_of_a_group_is_its_tokens_and_where_they_end() -> None:
    one, other = np.array([1, 2], np.int32), np.array([3], np.int32)
    assert responses_digest([one, other]) == responses_digest([one.copy(), other.copy()])
    assert (
        len({responses_digest([one, other]), responses_digest([other, one]), responses_digest([np.append(one, other)])})
        == 3
    )
