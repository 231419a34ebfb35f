"""Each rule of `asyncrl top`: the snapshot that makes it speak, and one that does not; and what docs/top.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.monitor import advice as rules
from asyncrl.monitor.advice import RULES, advice
from asyncrl.monitor.snapshot import Learner, Row, Snapshot, Trouble
from asyncrl.monitor.status_schema import Judge, Member

ROOT = Path(__file__).parents[2]


def steps(count: int = 6, **values: float) -> tuple[dict[str, object], ...]:
    return tuple({"step": number + 1, "lag_mean": 1.0, **values} for number in range(count))


def row(name: str = "producer-0", **changes: object) -> Row:
    return Row(**{"name": name, "host": "here", "pid": 7, "seen_s": 0.5, "busy": 0.9, **changes})  # type: ignore[arg-type]


def view(**changes: object) -> Snapshot:
    """A run that is well."""
    base: dict[str, object] = {
        "at": 1000.0, "folder": "runs/my", "steps": 50, "step": 6, "lines": steps(), "producers": (row(),),
        "rewards": (row("reward-0", busy=0.2, stats={"scored_samples": 900.0}),), "depth": 2, "max_staleness": 4,
        "queue": {"leased": 4, "unscored": 1, "ready": 3, "claimed": 4, "issued": 100}, "capacity": 16, "slots": 64,
        "weight_level": "token",
        "learner": Learner(waiting=0.1, training=0.85, other=0.05), "version": 6, "committed": 6,
        "members": {"producer-0": Member("serving", version=6)},
    }  # fmt: skip
    return Snapshot(**{**base, **changes})  # type: ignore[arg-type]


EXIT = Trouble(900.0, "exit", "producer-1 code 137")
SPEAK = {
    "the_run_failed": (view(ended="hang", exit_code=70), "code 70 (hang)"),
    "the_run_is_complete": (view(ended="done", exit_code=0), "asyncrl report runs/my"),
    "the_buffer_ends_the_run": (view(fault="poison.budget: 9 groups"), "poison.budget: 9 groups"),
    "the_buffer_is_silent": (view(live=False, silent="nothing listens at x"), "start the run again: it resumes"),
    "checkpoints_fail": (view(lines=steps(checkpoint_failures=2.0)), "2 checkpoints in a row"),
    "a_process_is_stopped": (view(rewards=(row("reward-0", state="T"),)), "kill -CONT 7"),
    "a_process_is_silent": (view(producers=(row(seen_s=34.0),)), "producer-0 (pid 7 on here) is silent for 34 s"),
    "a_process_keeps_ending": (view(troubles=(EXIT,) * 3), "producer-1 ended 3 times lately"),
    "nobody_generates": (view(producers=()), "no producer is there"),
    "nobody_scores": (view(rewards=(), queue={"unscored": 3}), "3 groups wait for scores"),
    "a_judge_is_missing": (view(judges=(Judge("slow", waiting=4),)), "4 samples wait for judge slow"),
    "weights_do_not_arrive": (
        view(members={"producer-0": Member("stale", version=3, why="received another digest")}),
        "producer-0 holds version 3 of 6 (stale): received another digest",
    ),
    "updates_are_skipped": (view(lines=({"step": 6, "skipped": ["grad_norm"]},)), "grad_norm not finite"),
    "rewards_fail": (
        view(rewards=(row("reward-0", stats={"failed_rewards": 30.0, "scored_samples": 900.0}),)),
        "30 reward calls failed (900 samples scored)",
    ),
    "groups_die": (view(queue={"dead": 2}, dead={"poison:length": 2}), "2 groups are dead (poison:length 2)"),
    "much_is_too_old": (view(dropped={"late": 20}), "20% of the groups came too late: raise max_staleness (4)"),
    "scores_are_late": (view(queue={"leased": 1, "unscored": 9}), "9 of 10 groups under way wait for scores"),
    "engine_and_learner_differ": (view(lines=steps(**{"lag/0/logprob_gap_mean": 0.2})), "differ by 0.2 nats"),
    "memory_is_short": (
        view(producers=(row(stats={"preempted_samples": 5.0, "kv_used": 0.97}),)), "preempted 5 samples",
    ),
    "the_learner_waits": (view(learner=Learner(waiting=0.41)), "waits 41% of the time: add producers (1 now)"),
    "the_pipeline_is_shallow": (
        view(learner=Learner(waiting=0.5), producers=(row(busy=0.3),)), "raise pipeline_depth (2)",
    ),
    "weights_count_for_little": (view(lines=steps(ess=0.2)), "effective sample size is 0.20"),
    "samples_are_old": (view(lines=steps(lag_mean=6.5)), "samples are 6.5 steps old: lower max_staleness (4)"),
    "nothing_to_learn": (view(lines=steps(zero_advantage_share=0.8, reward_mean=0.99)), "80% of the groups have no"),
    "answers_are_cut": (view(lines=steps(truncated_share=0.5)), "50% of the samples are cut"),
    "short_answers_win": (view(lines=steps(length_bias=-0.2)), "20% shorter"),
    "weights_take_long": (view(learner=Learner(waiting=0.1, other=0.3)), "take 30% of the learner's time"),
    "producers_wait": (view(producers=(row(busy=0.2),)), "producers wait 80% of the time"),
    "all_is_well": (view(), "nothing to do: the learner waits 10% of the time"),
}  # fmt: skip
NAMES = [rule.__name__ for rule in RULES]


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_speaks_of_its_case_and_the_advice_is_its(name: str) -> None:
    seen, words = SPEAK[name]
    assert words in getattr(rules, name)(seen)
    assert words in advice(seen), "a rule before it speaks too"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "all_is_well"])
def test_each_rule_is_silent_where_all_is_well_and_where_nothing_is_known(name: str) -> None:
    assert getattr(rules, name)(view()) == ""
    empty = Snapshot(at=0.0, producers=(row(busy=None),), rewards=(row("reward-0", busy=None),))
    assert getattr(rules, name)(empty) == ""


def test_the_most_urgent_comes_first() -> None:
    both = view(learner=Learner(waiting=0.9), producers=(), queue={"dead": 1}, fault="hang: x")
    assert advice(both).startswith("the buffer ends the run")
    assert advice(Snapshot(at=0.0, producers=(row(busy=None),))) == "the first step is still to come"


def test_a_deep_pipeline_is_not_told_to_be_deeper() -> None:
    seen = view(learner=Learner(waiting=0.5), producers=(row(busy=0.3),), depth=4)
    assert "raise max_staleness (4)" in advice(seen)


def test_weights_of_whole_responses_may_count_for_little_and_suit_old_samples() -> None:
    seen = view(lines=steps(ess=0.2, lag_mean=8.0), weight_level="sequence")
    assert rules.weights_count_for_little(seen) == rules.samples_are_old(seen) == ""
    other = view(lines=steps(ess=0.2, lag_mean=8.0), weight_level="")  # of another correction, or of the loss itself
    assert rules.weights_count_for_little(other) and not rules.samples_are_old(other)


def test_the_page_lists_every_rule_in_order() -> None:
    page = (ROOT / "docs" / "top.md").read_text()
    places = [page.find((rule.__doc__ or "?").strip().splitlines()[0]) for rule in RULES]
    assert -1 not in places, [rule.__name__ for rule, place in zip(RULES, places, strict=True) if place < 0]
    assert places == sorted(places)
