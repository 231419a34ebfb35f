"""The audit of evaluations: a good log is fine, every way to be wrong is said."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic_run import Event, digest_of, good_history

from asyncrl.audit.evaluation import VERSIONS
from asyncrl.audit.prove import audit, render
from asyncrl.audit.verdict import Expected
from asyncrl.evaluation.ids import evaluation_group
from asyncrl.evaluation.statistics import Outcome, figures, metric_names

REWARDS = ((1.0, 0.0), (1.0, 1.0))


def evaluation(step: int = 2, *, number: int = 900) -> list[Event]:
    """Two prompts, two samples each, all scored, made by version step + 1."""
    events: list[Event] = [
        {"e": "eval_begin", "step": step, "round": number, "digest": digest_of(step), "prompts": 2, "samples": 2}
    ]
    for row, rewards in enumerate(REWARDS):
        group, token = evaluation_group(step, row), number + 1 + row
        events.append({"e": "eval_lease", "g": group, "token": token, "attempt": 0, "producer": "p", "w": step})
        for index, reward in enumerate(rewards):
            events.append(
                {
                    "e": "eval_sample",
                    "g": group,
                    "i": index,
                    "token": token,
                    "producer": "p",
                    "length": 3,
                    "runs": [[step + 1, 3]],
                    "digests": {str(step + 1): digest_of(step + 1)},
                }
            )
            events.append(
                {
                    "e": "eval_score",
                    "g": group,
                    "i": index,
                    "reward": reward,
                    "answer": "x",
                    "parts": {},
                    "source": "a",
                    "worker": "r",
                }
            )
    found = figures([Outcome("a", rewards, ("x", "x")) for rewards in REWARDS], correct_above=0.5)
    line = {
        "step": step,
        "round": number,
        "evaluation_prompts": 2,
        "evaluation_scored": 2,
        "evaluation_failed": 0,
        "evaluation_missing": 0,
        "evaluation_samples": 2,
        **metric_names(found, k=2),
    }
    return [*events, {"e": "eval_end", **line}]


def judged(events: list[Event], **expected: Any) -> Any:
    history = good_history()
    return audit([*history[:-1], *events, history[-1]], expected=Expected(**expected))


def violations(events: list[Event]) -> list[str]:
    return [text for text in judged(events, correct_above=0.5).violations if text.startswith("evaluation:")]


def changed(place: int, **fields: Any) -> list[Event]:
    events = evaluation()
    events[place] = {**events[place], **fields}
    return events


def measured(place: int = 0, **fields: Any) -> list[Event]:
    """Events that name the version; `fields` replace those of the event at `place`, if it is not the first."""
    events = evaluation()
    events[-1] = {**events[-1], **dict.fromkeys(VERSIONS, 3)}
    if place:
        events[place] = {**events[place], **fields}
    events.insert(1, {"e": "eval_version", "step": 2, "round": 900, "version": 3})
    return events


def test_an_evaluation_has_one_version() -> None:
    assert violations(measured()) == []
    two = {"3": digest_of(3), "4": digest_of(4)}
    (bad,) = violations(measured(2, runs=[[3, 2], [4, 1]], digests=two))
    assert "was made by version 4, version 3 is measured" in bad
    for field in VERSIONS:
        (bad,) = violations(measured(-1, **{field: 4}))
        assert f"measured version 3, {field} is 4" in bad


def test_an_evaluation_has_one_set_of_weights() -> None:
    again = {"e": "commit", "step": 3, "version": 3, "epoch": 1, "digest": "other", "groups": []}
    mixed = measured(2, digests={"3": "other"})
    found = violations([again, *mixed])
    assert any(f"measured several weights of version 3: other, {digest_of(3)}" in text for text in found), found


def test_what_came_before_a_lost_version_does_not_count() -> None:
    lost = measured()[:-1]
    restart = {"e": "eval_restart", "step": 2, "round": 900, "now": 950, "version": 3, "why": "gone"}
    whole = [{**event, "round": 950} if "round" in event else event for event in measured()[1:]]
    assert violations([*lost, restart, *whole]) == []
    assert any("reported 2 scored prompts, the log has 0" in text for text in violations([*lost, restart, whole[-1]]))


def test_a_good_log() -> None:
    found = judged(evaluation(), correct_above=0.5)
    assert found.ok, found.violations
    assert found.evaluations == [2] and found.evaluation_samples == 4
    assert found.evaluation_prompts == {"prompts": 2, "scored": 2, "failed": 0, "missing": 0}
    assert "none of their 4 scored samples was trained" in render(found)
    assert judged([]).ok and "evaluations" not in render(judged([]))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (changed(2, token=7), "under token 7, which none of its leases has"),
        (changed(2, runs=[[1, 3]]), "was made by version 1"),
        (changed(2, digests={"3": "wrong"}), "the digest of version 3 is wrong"),
        (changed(2, digests={}), "the digest of version 3 is missing"),
        (changed(3, reward=0.0), "val-core/a/reward/mean@2"),
        (changed(3, answer="y"), "val-core/a/reward/maj@2/mean"),
        (changed(-1, evaluation_prompts=3), "3 prompts are not 2 scored"),
        (changed(-1, evaluation_prompts=1, evaluation_scored=1), "reported 1 scored prompts, the log has 2"),
        (changed(-1, **{"val-core/a/acc/pass@2/mean": 0.5}), "val-core/a/acc/pass@2/mean"),
        (changed(-1, round=5), "had never begun"),
        (evaluation()[:-1], "that of step 2 has no ending"),
        (evaluation()[:-1] + evaluation(number=950), "that of step 2 has no ending"),
        (changed(1, token=1), "is one of a trained group"),
    ],
)
def test_what_cannot_be_is_said(events: list[Event], words: str) -> None:
    assert any(words in text for text in violations(events)), violations(events)


def test_a_held_out_prompt_in_a_batch_is_said() -> None:
    history = good_history()
    claim = next(place for place, event in enumerate(history) if event["e"] == "claim")
    history[claim] = {**history[claim], "groups": [*history[claim]["groups"], evaluation_group(2, 1)]}
    found = audit(history)
    assert any("holds prompt 1 of the evaluation of step 2" in text for text in found.violations)


def test_after_a_restart_of_the_service_a_missing_end_is_a_note() -> None:
    events = [*evaluation()[:-1], {"e": "service", "service_epoch": 2}]
    found = judged(events, correct_above=0.5)
    assert found.ok, found.violations
    assert any("has no ending; the service was restarted" in note for note in found.notes)


@pytest.mark.parametrize("later", [0, 3], ids=["nothing since", "the next one had begun"])
def test_store_that_comes_back_from_before_an_end_goes_on_with_that_evaluation(later: int) -> None:
    whole = measured()
    following = evaluation(3, number=950)
    lease = next(event for event in reversed(whole) if event["e"] == "eval_lease")
    again = [{"e": "service", "service_epoch": 2}, {**lease, "token": 990}]
    again += [{**event, "token": 990} if "token" in event else event for event in whole[-3:]]
    events = [*whole, *following[:later], *again, *following]
    found = judged(events, correct_above=0.5)
    assert found.ok, found.violations
    assert found.evaluations == [2, 3] and found.evaluation_prompts["prompts"] == 4
    same = [event for event in events if event["e"] != "service"]
    assert "evaluation: that of step 2 ended and had never begun" in violations(same)
    again[-1] = {**again[-1], "evaluation_scored": 1}
    assert any("scored" in text for text in violations([*whole, *following[:later], *again, *following]))


def test_pass_at_k_needs_the_threshold() -> None:
    assert judged(changed(-1, **{"val-core/a/acc/pass@2/mean": 0.5})).ok, "not known from the log alone"


def test_scored_sample_that_never_came() -> None:
    events = [*good_history(), *evaluation()]
    gone = next(event for event in events if event["e"] == "eval_sample")
    found = audit([event for event in events if event is not gone])
    assert any("sample 0 of prompt 0 was scored and never came" in text for text in found.violations)


@pytest.mark.parametrize("kind", ["begin", "version", "lease", "sample", "score", "end"])
def test_no_garbled_event_ends_the_audit_of_evaluations(kind: str) -> None:
    events = [*good_history(), *measured()]
    place = next(place for place, event in enumerate(events) if event["e"] == f"eval_{kind}")
    for key in set(events[place]) - {"e"}:
        for value in (None, "x", -99, 1e300, [], [None], {"a": None}, 1 << 70, 10**400, "inf"):
            assert render(audit([*events[:place], {**events[place], key: value}, *events[place + 1 :]]))
        audit([*events[:place], {k: v for k, v in events[place].items() if k != key}, *events[place + 1 :]])


@pytest.mark.parametrize("rewards", [("inf", "-inf"), ("nan", 0.0), (1e308, 1e308)])
def test_scores_that_have_no_mean(rewards: tuple[Any, Any]) -> None:
    events = [*good_history(), *measured()]
    scores = [event for event in events if event["e"] == "eval_score"]
    for event, reward in zip(scores, rewards, strict=False):
        event["reward"] = reward
    assert not audit(events).ok
