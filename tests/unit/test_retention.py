"""Which checkpoints stay: the rule alone, the scores, and the settings that say so."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from bare_config import BARE

from asyncrl.config import Config, parse
from asyncrl.config.rules import notes as rules
from asyncrl.errors import ConfigErrors
from learners.checkpoints import retention
from learners.checkpoints.retention import Ranking, Scores, best, select

EVALUATED = (
    "learner.steps=100",
    "evaluation.path=held_out.jsonl",
    "evaluation.every=20",
    "learner.checkpoint_best=2",
    "learner.checkpoint_metric=val-core/aime/reward/mean@1",
)
NAME = "val-core/aime/reward/mean@1"


def bare(*settings: str) -> Config:
    return parse(BARE, overrides=settings)


def test_the_last_stay_and_the_best_beside_them() -> None:
    steps, scores = [20, 40, 60, 80, 100], {20: 0.5, 40: 0.7, 60: 0.6, 80: 0.1, 100: 0.2}
    assert select(steps, newest=100, keep=2) == {80, 100}
    assert select(steps, newest=100, keep=2, ranking=Ranking(1, "m", scores=scores)) == {40, 80, 100}
    assert select(steps, newest=100, keep=2, ranking=Ranking(2, "m", scores=scores)) == {40, 60, 80, 100}
    assert select(steps, newest=100, keep=2, ranking=Ranking(1, "m", "min", scores)) == {
        80,
        100,
    }  # among the last anyway
    assert select(steps, newest=60, keep=1, ranking=Ranking(1, "m", scores=scores)) == {
        40,
        60,
    }  # later ones are damaged
    waiting = Ranking(1, "m", scores=scores, awaited=(20, 60))
    assert select(steps, newest=100, keep=1, ranking=waiting) == {20, 40, 100}  # one more: its evaluation runs


def test_ties_and_what_is_no_number() -> None:
    scores = {20: 0.5, 40: 0.5, 60: float("nan"), 80: float("inf")}
    assert best(scores, Ranking(4, "m", scores=scores)) == (40, 20)
    assert best([20], Ranking(4, "m", scores=scores)) == (20,)


def test_the_rule_holds_for_any_scores() -> None:
    rng = random.Random(1)
    for _ in range(500):
        steps = rng.sample(range(1, 40), rng.randrange(0, 12))
        newest, keep, count = rng.randrange(1, 40), rng.randrange(1, 4), rng.randrange(0, 4)
        scores = {step: rng.choice([0.1, 0.2, 0.3, float("nan")]) for step in steps if rng.random() < 0.7}
        goal = rng.choice(["max", "min"])
        ranking = Ranking(count, "m", goal, scores, tuple(rng.sample(steps, len(steps) // 3)))  # type: ignore[arg-type]
        stay = select(steps, newest=newest, keep=keep, ranking=ranking)
        usable = [step for step in steps if step <= newest]
        assert stay <= set(usable) and len(stay) <= keep + 2 * count
        assert set(sorted(usable)[-keep:]) <= stay
        chosen = best(usable, ranking)
        sign = 1 if goal == "max" else -1
        left = [
            sign * score
            for step, score in scores.items()
            if step in usable and step not in chosen and not math.isnan(score)
        ]
        assert not left or not chosen or min(sign * scores[step] for step in chosen) >= max(left)
        # Asked again with what stayed, nothing more goes.
        assert select(stay, newest=newest, keep=keep, ranking=ranking) == stay


def test_a_score_of_steps_is_the_mean_since_the_checkpoint_before(tmp_path: Path) -> None:
    scores = Scores(tmp_path, bare("learner.checkpoint_best=1"), say=pytest.fail)
    for value in (0.2, float("nan"), 0.4):
        scores.add_metrics({"reward_mean": value, "loss": 9.0})
    scores.add_checkpoint(20)
    scores.add_checkpoint(40)  # no step since
    scores.add_metrics({"loss": 1.0})
    scores.add_metrics({"reward_mean": 0.5})
    scores.add_checkpoint(60)
    found = scores.ranking([20, 40, 60])
    assert found is not None and found.scores == pytest.approx({20: 0.3, 60: 0.5}) and found.awaited == ()
    scores.forget_after(20)
    again = scores.ranking([20])
    assert again is not None and list(again.scores) == [20]
    assert Scores(tmp_path, bare(), say=pytest.fail).ranking([20]) is None


def test_a_score_of_an_evaluation_comes_later(tmp_path: Path) -> None:
    said: list[str] = []
    scores = Scores(tmp_path, bare(*EVALUATED), say=said.append)
    found = scores.ranking([20, 30, 40])
    assert found is not None and found.awaited == (20, 40)  # 30 is not evaluated
    assert not scores.add_evaluations({})
    assert scores.add_evaluations({20: {NAME: 0.25}}) and not scores.add_evaluations({20: {NAME: 0.25}})
    found = scores.ranking([20, 30, 40])
    assert found is not None and (found.scores, found.awaited) == ({20: 0.25}, (40,))
    assert not scores.add_evaluations({20: {NAME: 0.25}, 40: {"val-core/gsm8k/reward/mean@1": 1.0}})
    assert (
        "the evaluation of step 40 has no val-core/aime/reward/mean@1; it has val-core/gsm8k/reward/mean@1" in said[0]
    )
    found = scores.ranking([20, 30, 40])
    assert found is not None and found.awaited == ()  # it will not come any more


def test_scores_outlive_the_process_and_are_forgotten_with_their_metric(tmp_path: Path) -> None:
    said: list[str] = []
    ranking = Ranking(1, "reward_mean", scores={20: 0.5, 40: 0.75, 60: 0.25})
    retention.write(tmp_path, [40, 60], ranking)
    found = retention.read(tmp_path)
    assert found is not None and (found.best, found.scores) == ((40,), {40: 0.75, 60: 0.25})
    mine = Scores(tmp_path, bare("learner.checkpoint_best=1"), say=said.append).ranking([40, 60])
    assert mine is not None and mine.scores == {40: 0.75, 60: 0.25} and not said
    for extra in ("learner.checkpoint_metric=loss", "learner.checkpoint_goal=min"):
        other = Scores(tmp_path, bare("learner.checkpoint_best=1", extra), say=said.append).ranking([40])
        assert other is not None and other.scores == {} and "ranked by reward_mean (max)" in said.pop()
    for data in (b"", b"{", b'{"metric": "\xff"}', (tmp_path / retention.BEST).read_bytes()[:-9]):
        (tmp_path / retention.BEST).write_bytes(data)
        assert Scores(tmp_path, bare("learner.checkpoint_best=1"), say=said.append).ranking([40]) is not None
        assert "best.json cannot be read" in said.pop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("learner.checkpoint_best=1", "learner.checkpoint_metric=rewards_mean"), "is neither a metric of the learner"),
        (("learner.checkpoint_best=1", "learner.checkpoint_metric=live_slots"), "is neither a metric of the learner"),
        (("learner.checkpoint_best=1", f"learner.checkpoint_metric={NAME}"), "set evaluation.path"),
        ((*EVALUATED, "evaluation.every=0"), "and evaluation.every"),
        (("learner.checkpoint_goal=most",), "one of max, min"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        bare(*settings)
    assert said in caught.value.render()


def test_settings_that_surprise_are_noted() -> None:
    def notes(config: Config) -> list[str]:
        return list(rules.notes(config))

    assert notes(bare()) == notes(bare(*EVALUATED)) == []  # checkpoints every 20 steps, too
    assert notes(bare("learner.checkpoint_best=1", "learner.checkpoint_metric=reward/exact")) == []
    (told,) = notes(bare(*EVALUATED, "learner.checkpoint_every=15"))
    assert "only those of every 60 steps" in told
