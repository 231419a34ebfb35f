"""The audit: a good history passes, each kind of damage is found and named."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from synthetic_run import Event, digest_of, good_history, issue, register, train, write_history

from asyncrl.audit import Audit, audit, audit_file, render


def kinds(found: Audit) -> set[str]:
    return {violation.partition(":")[0] for violation in found.violations}


def find(events: list[Event], kind: str, **wanted: object) -> Event:
    return next(event for event in events if event["e"] == kind and all(event[k] == v for k, v in wanted.items()))


def test_good_history() -> None:
    found = audit(good_history(steps=5, batch=3))
    assert found.ok and found.violations == [] and found.done
    assert (found.issued, found.trained, found.dropped, found.in_flight) == (16, 15, {"late": 1}, 0)
    assert (found.steps, found.batch_groups, found.lost, found.doubled) == (5, 3, 0, 0)
    assert found.lag_max == 1 and found.bound_max == 2 and found.lag_counts == {0: 3, 1: 12}
    assert found.spans == found.spans_matched == 30


def test_the_history_is_not_changed() -> None:
    events = good_history()
    before = copy.deepcopy(events)
    audit(events)
    assert events == before


def test_lost_group() -> None:
    events = [event for event in good_history() if event["e"] != "drop"]
    found = audit(events)
    assert not found.ok and found.lost == 1 and kinds(found) == {"lost"}


def test_unfinished_groups_of_a_run_that_goes_on_are_in_flight() -> None:
    events = [event for event in good_history() if event["e"] not in ("drop", "end")]
    found = audit(events)
    assert found.ok and found.in_flight == 1 and not found.ended
    stopped = audit([*events, {"e": "end", "done": False, "reason": "SIGTERM"}])
    assert stopped.ok and stopped.in_flight == 1 and stopped.ended and not stopped.done


def test_group_in_two_steps() -> None:
    events = good_history()
    for event in events:
        if event.get("step") == 3 and event["e"] in ("claim", "commit"):
            event["groups"] = [0, 5]  # 0 was trained in step 1; 4 is left without an ending
    found = audit(events)
    assert found.doubled == 1 and found.lost == 1 and {"doubled", "lost"} <= kinds(found)


def test_group_trained_and_dropped() -> None:
    events = good_history()
    events.insert(-1, {"e": "drop", "g": 0, "reason": "late"})
    assert audit(events).doubled == 1


def test_step_committed_twice_with_other_groups() -> None:
    events = good_history()
    events = [*events[:-1], *issue(90, version=3), *issue(91, version=3), *train(4, [90, 91]), events[-1]]
    assert "doubled" in kinds(audit(events))


def test_over_the_bound() -> None:
    events = good_history()
    find(events, "sample", g=6)["runs"] = [[2, 3], [0, 2]]  # step 4 starts from version 3: lag 3
    find(events, "sample", g=6)["digests"] = {"2": digest_of(2), "0": digest_of(0)}
    found = audit(events)
    assert kinds(found) == {"lag"} and found.over_bound == 1 and found.lag_max == 3
    allowed = audit(events, allow_over_bound=True)
    assert allowed.ok and allowed.over_bound == 1 and len(allowed.notes) == 1


def test_lag_exactly_at_the_bound_is_fine() -> None:
    events = good_history()
    for event in events:
        if event["e"] == "sample" and event["g"] == 6:
            event["runs"], event["digests"] = [[1, 5]], {"1": digest_of(1)}
    found = audit(events)
    assert found.ok and found.lag_max == 2


def test_tokens_newer_than_the_weights_of_the_step() -> None:
    events = good_history()
    find(events, "sample", g=2)["runs"] = [[2, 5]]
    find(events, "sample", g=2)["digests"] = {"2": digest_of(2)}
    find(events, "sample", g=2, i=1)["runs"] = [[2, 5]]
    find(events, "sample", g=2, i=1)["digests"] = {"2": digest_of(2)}
    assert kinds(audit(events)) == {"lag"}


@pytest.mark.parametrize("digests", [{"1": "f" * 32}, {"1": ""}, {}])
def test_digest_of_other_weights(digests: dict[str, str]) -> None:
    events = good_history()
    find(events, "sample", g=4)["digests"] = digests
    found = audit(events)
    assert kinds(found) == {"digest"} and found.spans_matched == found.spans - 1


def test_start_weights_must_agree_with_each_other() -> None:
    events = good_history()
    find(events, "sample", g=1)["digests"] = {"0": "f" * 32}
    assert kinds(audit(events)) == {"digest"}


def test_step_left_out_and_short_step() -> None:
    gap = [event for event in good_history() if not (event["e"] == "commit" and event["step"] == 2)]
    assert "steps" in kinds(audit(gap))
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2]
    assert "steps" in kinds(audit(events))


def test_quarantined_group_leaves_its_step() -> None:
    events = good_history()
    place = events.index(find(events, "commit", step=2))
    events[place]["groups"] = [2]
    events.insert(place, {"e": "dead", "g": 3, "reason": "sample.invalid", "detail": "nan"})
    found = audit(events)
    assert found.ok and found.dead == {"sample.invalid": 1} and found.trained == 7


def test_group_that_was_never_issued() -> None:
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2, 99]
    assert "unknown" in kinds(audit(events))


def test_replay_after_a_restart_is_no_double() -> None:
    events = good_history(steps=3)
    head = [event for event in events if event["e"] not in ("retire", "end", "drop")]
    again = [register(2, 1), *train(2, [2, 3], epoch=2, replayed=True), *train(3, [4, 5], epoch=2, replayed=True)]
    found = audit([*head, *again, *events[-3:]])
    assert found.ok and found.doubled == 0 and found.trained == 6 and found.replayed_steps == 2
    assert found.learner_starts == 2


def test_restart_takes_back_what_was_not_in_the_checkpoint() -> None:
    head = [event for event in good_history(steps=3) if event["e"] not in ("retire", "end", "drop")]
    found = audit([*head, register(2, 1)])
    assert found.ok and found.trained == 2 and found.in_flight == 5 and found.steps == 1
    lost = audit([*head, register(2, 1), *issue(50, version=1), *issue(51, version=1), *train(2, [50, 51], epoch=2),
                  *train(3, [4, 5], epoch=2), {"e": "drop", "g": 6, "reason": "late"},
                  {"e": "end", "done": True, "reason": ""}])  # fmt: skip
    assert not lost.ok and lost.lost == 2  # groups 2 and 3: trained once, taken back, never seen again


def test_groups_rolled_back_by_an_older_checkpoint_are_accounted_for() -> None:
    events = good_history(steps=3)
    head = [event for event in events if event["e"] not in ("end", "drop")]
    again: list[Event] = [{"e": "drop", "g": group, "reason": "rolled_back"} for group in (2, 3)]
    again += [register(2, 1), *issue(7, version=0), *issue(8, version=0)]
    again += [*train(2, [7, 8], epoch=2), *train(3, [4, 5], epoch=2)]
    found = audit([*head, *again, *events[-3:]])
    assert found.ok and found.dropped == {"rolled_back": 2, "late": 1} and found.trained == 6


def test_store_that_was_lost_issues_again() -> None:
    head = [event for event in good_history(steps=3) if event["e"] not in ("retire", "end", "drop")]
    again = [{"e": "service", "service_epoch": 2}, register(2, 1)]
    for group in (2, 3, 4, 5):
        again += issue(group, version=1)
    again += [*train(2, [2, 3], epoch=2), *train(3, [4, 5], epoch=2), {"e": "end", "done": True, "reason": ""}]
    found = audit([*head, *again])
    assert found.ok and found.trained == 6 and found.superseded == 1  # group 6 was forgotten with the store


def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history.jsonl", good_history())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":1,"e":"iss')
    found = audit_file(path)
    assert found.ok and found.torn and "cut" in render(found)
    path.write_bytes(whole[:-1])  # only the newline is missing
    assert audit_file(path).ok and not audit_file(path).torn
    path.write_bytes(whole.replace(b'"e":"ready"', b'"e":', 1))
    assert kinds(audit_file(path)) == {"log"}
    path.write_bytes(b"")
    assert not audit_file(path).ok


def test_event_with_a_missing_field_is_a_violation() -> None:
    events = good_history()
    del find(events, "commit", step=2)["groups"]
    assert "log" in kinds(audit(events))


def test_many_violations_are_cut_short() -> None:
    events = [event for event in good_history(steps=60) if event["e"] != "claim"]
    assert len(audit(events).violations) < 100
