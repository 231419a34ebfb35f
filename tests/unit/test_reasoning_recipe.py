"""The recipe of examples/reasoning: problems, teacher, rewards, and its two configurations."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "reasoning"
sys.path.insert(0, str(FOLDER))
import problems  # noqa: E402, RUF100
import recipe  # noqa: E402, RUF100

PLACES = range(200)
JUDGED = tuple(kind for kind in problems.KINDS if kind != "code")


def each(kind: str) -> Iterator[Any]:
    return (problems.problem(kind, seed=3, index=index) for index in PLACES)


@pytest.mark.parametrize("kind", JUDGED)
def test_the_teacher_is_right_and_a_wrong_answer_is_not(kind: str) -> None:
    for found in each(kind):
        assert problems.reward(kind, found.solution, found.truth) == 1.0, found
        wrong = {"reach": {"yes": "no", "no": "yes"}.get(found.answer)}.get(kind) or f"{found.answer}1"
        assert problems.reward(kind, found.solution.replace(f"#{found.answer}", f"#{wrong}"), found.truth) == 0.0, found
        assert problems.reward(kind, found.answer, found.truth) == 0.0, "no mark"


def test_programs_do_what_their_words_say() -> None:
    for found in each("code"):
        names: dict[str, Any] = {}
        exec(problems.PREFIX + found.solution, names)
        assert [names["f"](*given) for given in found.truth["inputs"]] == found.truth["outputs"], found


def test_a_countdown_is_judged_by_value_and_numbers() -> None:
    truth = {"target": 8, "numbers": [3, 5, 2]}
    given = {"3+5": 1, "(5+3)": 1, "2*4": 0, "3+3+2": 0, "5+3+2-2": 0, "8": 0, "__import__('os')": 0, "3**2": 0, "": 0}
    assert {text: problems.reward("countdown", f"#{text}", truth) for text in given} == given
    assert problems.reward("countdown", "#" + "(" * 5000, truth) == 0.0


def test_a_way_must_follow_the_edges() -> None:
    truth = {"edges": ["ab", "bd", "ce"], "start": "a", "goal": "d", "reachable": True}
    given = {"a:b;b:d#yes": 1, "a:d#yes": 0, "a:b#yes": 0, "b:d#yes": 0, "#yes": 0, "a:b;b:d#no": 0, "a:b;c:e#yes": 0}
    assert {text: problems.reward("reach", text, truth) for text in given} == given


def test_difficulty_grows_with_the_level() -> None:
    for kind in problems.KINDS:
        easy, hard = (
            [len(problems.problem(kind, seed=0, index=n, level=level).prompt) for n in PLACES] for level in (1, 6)
        )
        assert sum(hard) > 1.3 * sum(easy), kind
    with pytest.raises(ValueError, match="level 9"):
        problems.problem("sort", seed=0, index=0, level=9)


def test_mistakes_are_as_frequent_as_asked() -> None:
    def share(noise: float) -> float:
        rights = [
            problems.reward(kind, problems.demonstration(found, noise=noise, rng=random.Random(n)), found.truth)
            for kind in JUDGED
            for n, found in enumerate(each(kind))
        ]
        return sum(rights) / len(rights)

    assert share(0.0) == 1.0 and 0.3 < share(0.06) < 0.9 and share(0.06) > share(0.3)


def test_rows_are_reproducible_and_fit_the_configurations() -> None:
    first, again = problems.rows(100, 7), problems.rows(100, 7)
    assert first == again and first != problems.rows(100, 8) and first != problems.rows(100, 7, split="heldout")
    letters = set(problems.CHARACTERS) | {" "}
    rl, sft = (load(FOLDER / name) for name in ("rl.toml", "sft.toml"))
    for n in range(500):
        found = problems.problem(problems.KINDS[n % 5], seed=1, index=n)
        plain = found.prompt + found.solution
        for word in problems.WORDS:
            plain = plain.replace(word, "")
        assert set(plain) <= letters, found
        assert len(found.prompt) <= min(rl.data.max_prompt_tokens, sft.data.max_prompt_tokens) or found.kind == "story"
        assert len(found.solution) < min(rl.sampling.max_new_tokens, sft.sampling.max_new_tokens), found
    assert {source for one in rl.reward for source in one.data_sources} == set(problems.KINDS)


def test_the_report_keeps_runs_from_elsewhere_that_began_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {**dict.fromkeys(recipe.CURVES, 0.5), "step": step, "reward_mean": step / 10, "tokens": 100, "step_s": 36.0}
        for step in range(1, 21)
    ]
    looks = [
        {
            "evaluation_version_min": v,
            "evaluation_version_max": v,
            "evaluation_version": v,
            **{f"val-core/{kind}/reward/mean@1": 0.5 + v / 100 for kind in ("all", *problems.KINDS)},
        }
        for v in (0, 20)
    ]
    weights = [{"version": v, "digest": f"d{v}", "state": "committed"} for v in (0, 20)]
    sample = {"lag": 1, "prompt": "1+1", "response": "2", "reward": 1.0, "length": 1}
    folder = tmp_path / "runs" / "rl-bound2-seed1"
    again = [*steps[:15], *steps[10:]]  # steps 11 to 15 were lost at a kill and trained again
    recipe.write_jsonl(folder / "metrics" / "learner.jsonl", again)
    recipe.write_jsonl(folder / "metrics" / "evaluation.jsonl", looks)
    recipe.write_jsonl(folder / "metrics" / "weightsync.jsonl", weights)
    recipe.write_jsonl(folder / "samples.jsonl", [{**sample, "step": step} for step in (1, 20, 20)])
    recipe.write_jsonl(folder / "result.json", [{"done": True, "steps": 20}])
    monkeypatch.setattr(recipe, "wanted_steps", lambda _: 20)
    log_lines = [
        "learner: ready",
        "step 1/20",
        "learner: waits 10 s",
        *2 * ["learner: evaluation of step 0: 0.5"],
        "step 2/20",
    ]
    (folder / "logs").mkdir()
    (folder / "logs" / "learner.log").write_text("\n".join(log_lines))
    (tmp_path / "runs" / "rl-bound4-seed1").mkdir()
    for name in ("RUNS", "RESULTS", "LOGS", "PAGE"):
        monkeypatch.setattr(recipe, name, tmp_path / {"RUNS": "runs"}.get(name, name))
    elsewhere = {
        "run": "rl-bound0-seed1", "digests": {"0": "d0", "20": "e20"}, "steps": 20, "lag_mean": 0.0, "tokens": 3000,
        "held_out": {kind: {"0": 0.5, "20": 0.75} for kind in ("all", *problems.KINDS)}, "audit": "OK",
    }  # fmt: skip
    old = [elsewhere, {"run": "rl-bound0-seed0", "digests": {"0": "x"}}, {"run": "rl-bound2-seed1", "steps": 3}]
    recipe.RESULTS.write_text(json.dumps(old))
    recipe.PAGE.write_text(f"head\n\n{recipe.BEGIN}\nold\n{recipe.END}\nrest\n")
    recipe.LOGS.mkdir()
    (recipe.LOGS / "rl-bound0-seed0.log").write_text("step 1/20\n")
    recipe.report(argparse.Namespace())
    said = capsys.readouterr().out
    assert not (recipe.LOGS / "rl-bound0-seed0.log").exists()
    assert "rl-bound0-seed0: left out, it began with other weights" in said
    assert "rl-bound4-seed1: left out, it is not complete" in said
    other, mine = json.loads(recipe.RESULTS.read_text())
    assert other == elsewhere
    assert mine["steps"] == 20 and mine["hours"] == 0.2 and mine["held_out"]["all"] == {"0": 0.5, "20": 0.7}
    assert mine["tokens"] == 2000
    assert mine["curves"]["reward_mean"] == [0.55, 1.55] and mine["digests"] == {"0": "d0", "20": "d20"}
    assert [one["step"] for one in mine["samples"]] == [20]
    assert mine["audit"] == "wrong"  # it has no ledger
    log = (recipe.LOGS / "rl-bound2-seed1.log").read_text()
    assert log == "step 1/20\nlearner: evaluation of step 0: 0.5\nstep 2/20\n"
    page = recipe.PAGE.read_text()
    assert page.startswith("head\n") and page.endswith(f"{recipe.END}\nrest\n") and "old" not in page
    assert "| 20 | 0.750 | 0.700 |\n| last, less bound 0 | - | -0.050 |" in page
    assert "| 2 | 1 | 0.50 | 0.00 M | 0.700 | 0.700 | 0.700 | 0.700 | 0.700 | 0.700 | wrong | `d20` |" in page


def test_a_report_without_a_complete_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rl-bound0-seed0").mkdir()
    monkeypatch.setattr(recipe, "RUNS", tmp_path)
    before = [path.read_bytes() for path in (recipe.RESULTS, recipe.PAGE)]
    recipe.report(argparse.Namespace())
    said = capsys.readouterr().out
    assert "rl-bound0-seed0: left out, it is not complete" in said and "no run in" in said
    assert [path.read_bytes() for path in (recipe.RESULTS, recipe.PAGE)] == before


def test_a_run_is_complete_at_the_last_step_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export of a shorter pre-training is not that of the whole one."""
    monkeypatch.setattr(recipe, "RUNS", tmp_path)
    recipe.write_jsonl(tmp_path / "demonstrations.jsonl", [{}] * 640)
    for name, steps in (("sft", 10), ("rl-bound2-seed0", load(FOLDER / "rl.toml").learner.steps)):
        recipe.write_jsonl(tmp_path / name / "export" / "config.json", [{}])
        assert not recipe.is_complete(tmp_path / name)
        for made, done in ((steps - 1, True), (steps, False)):
            recipe.write_jsonl(tmp_path / name / "result.json", [{"done": done, "steps": made}])
            assert not recipe.is_complete(tmp_path / name)
        recipe.write_jsonl(tmp_path / name / "result.json", [{"done": True, "steps": steps}])
        assert recipe.is_complete(tmp_path / name)


def test_the_comparison_with_trl_begins_with_the_pre_training_that_the_page_makes() -> None:
    import reasoning_trl

    page = (recipe.ROOT / "docs" / "recipes.md").read_text()
    assert f"run.dir={reasoning_trl.START.parent.relative_to(recipe.ROOT)}\n" in page
    assert reasoning_trl.START != recipe.RUNS / "sft" / "export"


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (recipe.ROOT / "docs" / "recipes.md").read_text()
    made = page.split(recipe.BEGIN)[1].split(recipe.END)[0]
    assert made == f"\n\n{recipe.tables(json.loads(recipe.RESULTS.read_text()))}\n"
