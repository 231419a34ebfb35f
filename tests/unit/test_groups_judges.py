"""The state machine with several judges: each scores a sample under a lease of its own, the reward is their sum."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from groups_run import Run

from asyncrl.config import parse
from asyncrl.wire import RewardFailure, SampleHead, Samples, Score, Scores, TeacherLogprobs
from buffers.groups.diagnosis import describe_judges
from buffers.groups.judgements import Judgement, JudgeRule
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Record, Sample, State, settings_of
from buffers.groups.scoring import TEXT_CHARS, TOKEN_CHARS, VERSION_CHARS

JUDGES = (JudgeRule("", 2), JudgeRule("deep", 1), JudgeRule("math", 0, ("math",)))


class Judges(Run):
    """A run with three judges, one of them for rows of `math` alone."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"judges": JUDGES, **changes})
        self.tokens: dict[tuple[str, int, int], int] = {}

    def arrive(self, *indices: int, source: str = "code", row: str | None = None, checksum: int = 1) -> None:
        """Samples of the leased group 0."""
        text = f'{{"data_source":"{source}"}}' if row is None else row
        heads = tuple(SampleHead(index, 1, "stop", ((0, 1),)) for index in indices)
        head = Samples("p", 0, self.g.table.groups[0].token, heads, {}, (), text, 1)
        taken = self.g.samples(
            head, checksum=checksum, invalid=str, keep=lambda: Record(0, 0, 0, 0, checksum), now=self.now
        )
        assert taken.accepted == indices

    def work(self, judge: str = "", name: str = "", count: int = 9) -> list[int]:
        """Lease; which samples that gave."""
        self.requests += 1
        who = name or f"r-{judge}"
        self.g.workers.see("reward", who, self.now)
        items = self.g.reward_lease(who, max_samples=count, request=self.requests, now=self.now, judge=judge)
        self.tokens |= {(judge, item.group, item.index): item.token for item in items}
        assert all(item.judge == judge for item in items)
        return [item.index for item in items]

    def score(
        self, index: int, reward: float, judge: str = "", *, name: str = "", version: str = "", **parts: float
    ) -> str:
        """Send a score; why it was refused."""
        score = Score(0, index, self.tokens[judge, 0, index], reward, parts)
        message = Scores(name or f"r-{judge}", (score,), (), version, judge)
        return self.g.scores(message, now=self.now).refused.get(f"0:{index}", "")

    def fail(self, index: int, judge: str = "", *, name: str = "") -> str:
        failure = RewardFailure(0, index, self.tokens[judge, 0, index], "raised", "score: ValueError: no")
        message = Scores(name or f"r-{judge}", (), (failure,), "", judge)
        return self.g.scores(message, now=self.now).refused.get(f"0:{index}", "")

    def sample(self, index: int) -> Sample:
        return self.g.table.groups[0].samples[index]


def arrived(**changes: Any) -> Judges:
    run = Judges(**changes)
    run.lease()
    run.arrive(0, 1)
    return run


def test_a_sample_has_its_reward_when_all_of_its_judges_have_answered() -> None:
    run = arrived()
    assert run.work() == [0, 1] and run.work("deep") == [0, 1] and run.work("math") == []
    assert run.score(0, 1.0, exact=1.0) == "" and run.sample(0).reward is None
    assert run.score(0, 0.25, "deep", style=0.5) == ""
    assert (run.sample(0).reward, run.sample(0).parts) == (1.25, {"exact": 1.0, "style": 0.5})
    assert run.sample(0).judged == {}, "what was summed up is not kept"
    run.g.check()
    assert run.score(1, 0.5, "deep") == "" and run.state(0) == "UNSCORED"
    assert run.score(1, 2.0) == "" and run.state(0) == "READY"


def test_the_sum_is_the_same_in_any_order_of_answers() -> None:
    found = []
    for order in ((0, 1), (1, 0)):
        run = arrived(judges=(JudgeRule("", 0), JudgeRule("deep", 0)))
        values = [("", 0.1), ("deep", 0.2)]
        for judge, _ in values:
            run.work(judge)
        for at in order:
            run.score(0, values[at][1], values[at][0], **{f"part{at}": 1.0})
        found.append((run.sample(0).reward, list(run.sample(0).parts)))
    assert found[0] == found[1] == (0.1 + 0.2, ["part0", "part1"])


def test_rows_choose_their_judges() -> None:
    run = Judges()
    run.lease()
    run.arrive(0, 1, source="math")
    assert run.g.judges.judges_for(run.g.table.groups[0].source) == ("", "deep", "math")
    assert [run.work(judge) for judge in ("", "deep", "math")] == [[0, 1]] * 3
    only = Judges(judges=(JudgeRule("math", 0, ("math",)), JudgeRule("code", 0, ("code",))))
    only.lease()
    only.arrive(0, 1, source="poetry")
    assert only.work("code") == [] and only.work("math") == [0, 1], "somebody must say why nobody can"


def test_nobody_is_asked_before_the_row_is_there() -> None:
    run = Judges()
    run.lease()
    run.arrive(1, row="")
    assert run.work() == []
    run.arrive(0, source="math", checksum=2)
    assert sorted(run.work("math")) == [0, 1]


def test_a_group_whose_row_nobody_sent_is_judged_like_one_without_a_source() -> None:
    run = Judges()
    run.lease()
    run.arrive(0, 1, row="")
    assert run.work() == [0, 1] and run.work("math") == []


def test_each_judge_has_its_own_failures() -> None:
    run = arrived()
    run.work("deep", "a"), run.work("", "b")
    assert run.fail(0, "deep", name="a") == "" and run.fail(0, name="b") == ""
    assert run.sample(0).judged["deep"].failures == run.sample(0).judged[""].failures == 1
    assert run.work("deep", "a") == [0], "no other worker of that judge lives: b is of another one"
    assert run.work("deep", "c") == []
    assert run.fail(0, "deep", name="a") == ""
    ended = run.g.table.ended[0]
    assert (ended.state, ended.reason) == (State.DEAD, "reward_failed")
    assert ended.detail == "raised: score: ValueError: no (judge deep)"
    assert not run.g.scoring.queue, "what the other judges had to do is void"
    assert run.score(1, 1.0, name="b").startswith("gone: dead (reward_failed)")
    run.g.check()


def test_a_failure_goes_to_another_worker_of_the_same_judge() -> None:
    run = arrived()
    run.work("deep", "a")
    run.g.workers.see("reward", "b", run.now).judge = "deep"
    run.fail(0, "deep", name="a")
    assert run.work("deep", "a") == [] and run.work("deep", "b") == [0]


def test_a_failure_told_twice_counts_once() -> None:
    run = arrived()
    run.work("deep")
    assert run.fail(0, "deep") == "" and run.fail(0, "deep") == "already counted"
    assert run.sample(0).judged["deep"].failures == 1 and run.state(0) == "UNSCORED"


def test_a_judge_answers_once() -> None:
    run = arrived()
    run.work(), run.work("deep")
    assert run.score(0, 1.0) == "" and run.score(0, 1.0) == "already scored"
    assert run.fail(0) == "already scored"
    assert run.g.scoring.counts["", "refused:already scored"] == 2
    assert run.score(0, 1.0, "deep") == "" and run.sample(0).reward == 2.0


def test_who_is_not_asked_is_not_heard() -> None:
    run = arrived()
    run.work()
    run.tokens["math", 0, 0] = run.tokens["", 0, 0]
    assert run.score(0, 9.0, "math") == "judge: math is not asked about this row"


def test_a_late_score_counts_once_and_a_token_never_granted_does_not() -> None:
    run = arrived(judges=(JudgeRule("", 0), JudgeRule("deep", 0)))
    run.work("deep", "a")
    run.now = 40.0
    run.g.tick(run.now)
    early = dict(run.tokens)
    assert run.work("deep", "b") == [0, 1]
    late = dict(run.tokens)
    run.tokens = {key: token + 100 for key, token in late.items()}
    assert run.score(0, 1.0, "deep", name="z") == "token: the reward lease was lost"
    run.tokens = early
    assert run.score(0, 1.0, "deep", name="a") == "" and run.g.scoring.counts["deep", "late"] == 1
    run.tokens = late
    assert run.score(0, 7.0, "deep", name="b") == "already scored"
    assert run.sample(0).judged["deep"].reward == 1.0


def test_a_reward_that_is_no_number_is_a_failure_of_its_judge() -> None:
    run = arrived()
    run.work("deep")
    assert run.score(0, math.nan, "deep") == ""
    assert run.sample(0).judged["deep"].failures == 1 and run.sample(0).reward is None


def test_answers_survive_a_restart_of_the_service() -> None:
    run = arrived()
    run.work(), run.work("deep")
    run.score(0, 1.0)
    run.fail(1, "deep")
    run.reload()
    run.g.check()
    assert run.work() == [1] and run.work("deep") == [0, 1]
    assert run.sample(1).judged["deep"].failures == 1
    assert run.score(0, 0.5, "deep") == "" and run.sample(0).reward == 1.5


def other_judges(run: Judges, judges: tuple[JudgeRule, ...]) -> None:
    """The service starts again with these."""
    rows = [(change.key, change.value) for change in run.g.rows() if change.value is not None]
    settings = msgspec.structs.replace(run.g.settings, judges=judges)
    run.g = GroupMachine(settings, epoch=run.g.service_epoch + 1)
    run.g.load(rows)
    run.g.note_start(run.now)
    run.g.check()


def test_a_judge_that_is_gone_is_not_waited_for() -> None:
    run = arrived()
    run.work(), run.work("deep")
    assert [run.score(index, 1.0) for index in (0, 1)] == ["", ""]
    other_judges(run, ())
    assert run.state(0) == "READY" and [run.sample(index).reward for index in (0, 1)] == [1.0, 1.0]


def test_a_judge_that_is_new_is_asked_about_what_waits() -> None:
    run = arrived(judges=())
    run.work()
    run.score(0, 1.0)
    other_judges(run, (JudgeRule("", 0), JudgeRule("new", 0)))
    assert run.work() == [1] and run.work("new") == [1], "what had its reward keeps it"


def test_rows_of_before_judges_had_names_keep_their_failures() -> None:
    old = msgspec.msgpack.encode([5, 1, 0, 0, "stop", None, {}, 2, ["a"]])
    sample = msgspec.msgpack.decode(old, type=Sample)
    assert sample.judged == {} and sample.failures == 2
    run = arrived(judges=())
    run.sample(0).failures = 2  # of `reward_retries` = 2
    run.work()
    run.fail(0)
    assert run.g.table.ended[0].reason == "reward_failed"


def test_the_history_tells_every_answer_and_the_sum_once() -> None:
    run = arrived()
    run.work(), run.work("deep")
    run.score(0, 1.0, version="v1", exact=1.0)
    run.score(0, 0.5, "deep", version="v2")
    told = [event for event in run.g.take().events if isinstance(event, dict) and event["e"] in ("judged", "score")]
    assert [event["e"] for event in told] == ["judged", "judged", "score"]
    assert [(event["judge"], event["version"]) for event in told[:2]] == [("", "v1"), ("deep", "v2")]
    assert told[2]["reward"] == 1.5 and told[2]["versions"] == {"": "v1", "deep": "v2"}


def test_the_status_and_the_diagnosis_name_judges() -> None:
    run = arrived()
    run.work(name="a")
    run.g.heartbeat("reward", "a", pid=1, host="h", now=0.0, stats={"reward_call_s": 0.25})
    run.score(0, 1.0, name="a")
    run.fail(1, name="a")
    told = {one["judge"]: one for one in describe_judges(run.g.scoring)}
    assert told["default"] == {
        "judge": "default",
        "workers": 1,
        "waiting": 1,
        "leased": 0,
        "scored": 1,
        "late": 0,
        "failures": 1,
        "refused": {},
        "call_s": 0.25,
    }
    assert (told["deep"]["waiting"], told["deep"]["workers"], told["deep"]["call_s"]) == (2, 0, None)
    run.g.claim(epoch=run.epoch, step=1, version=0, now=0.0)
    assert "2 samples wait for judge deep, which has no living worker" in run.g.diagnosis(0.0)


@pytest.mark.parametrize("known", [True, False])
def test_settings_name_judges_where_there_are_any(known: bool) -> None:
    text = 'model.path = "m"\ndata.path = "d"\n[[reward]]\nfunction = "a:b"\n'
    more = '[[reward]]\nfunction = "a:c"\njudge = "deep"\n[[judge]]\nname = "deep"\nretries = 7\n'
    rules = settings_of(parse(text + more * known)).judges
    assert rules == ((JudgeRule("", 2), JudgeRule("deep", 7)) if known else ())


def test_the_row_of_a_sample_reads_back() -> None:
    sample = Sample(1, 1, 0, 0, "stop", judged={"deep": Judgement(0.5, {"x": 1.0}, 1, ("r",), 4, "v", "42")})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Sample) == sample


def test_texts_of_a_score_are_as_long_as_a_response_can_be() -> None:
    run = arrived(judges=JUDGES[:2])
    run.work()
    score = Score(0, 0, run.tokens["", 0, 0], 1.0, {}, "x" * 1_000_000, "y" * 1_000_000)
    assert run.g.scores(Scores("r-", (score,), (), "v" * 1_000_000), now=run.now).accepted == 1
    answer = run.sample(0).judged[""]
    assert (len(answer.answer), len(answer.version)) == (TEXT_CHARS + TOKEN_CHARS, VERSION_CHARS)


# ---------------------------------------------------------------- teachers

TEACHING = (JudgeRule("", 2), JudgeRule("big", 1, teaches=True), JudgeRule("maths", 1, ("math",), teaches=True))
KEPT = Record(3, 64, 8, 9, 77)


def tell(run: Judges, index: int, judge: str = "big", *, wrong: str = "") -> str:
    """A teacher's answer about a sample; why it was refused."""
    head = TeacherLogprobs(f"r-{judge}", judge, 0, index, run.tokens[judge, 0, index], "v1", ())
    run.g.begin(run.now)
    accepted, refused = run.g.scoring.take_teaching(head, invalid=lambda _: wrong, keep=lambda: KEPT)
    assert accepted == (not refused)
    return refused.get(f"0:{index}", "")


def test_what_a_teacher_says_is_a_record_of_the_group_and_no_reward() -> None:
    run = arrived(judges=TEACHING)
    assert run.work() == [0, 1] and run.work("big") == [0, 1] and run.work("maths") == []
    assert run.score(0, 1.0) == "" and run.sample(0).reward is None, "its teacher has not answered"
    assert tell(run, 0) == "" and run.sample(0).reward == 1.0
    assert run.g.table.groups[0].records[-1] == KEPT and run.sample(0).record == 0
    assert tell(run, 0) == "already scored" and run.g.table.groups[0].records.count(KEPT) == 1
    assert tell(run, 1) == "" and run.score(1, 0.5) == ""
    assert run.state(0) == "READY"
    told = [event for event in run.g.take().events if isinstance(event, dict) and event["e"] == "judged"]
    assert [event.get("logprobs", "") for event in told if event["judge"] == "big"] == [f"{77:016x}"] * 2
    run.g.check()


def test_a_teacher_answers_with_log_probs_alone() -> None:
    run = arrived(judges=TEACHING)
    run.work("big")
    assert run.score(0, 5.0, "big").startswith("log-probs are missing")
    assert run.sample(0).reward is None and run.sample(0).judged == {}


def test_log_probs_that_may_not_be_used_are_a_failure_of_the_teacher() -> None:
    run = arrived(judges=TEACHING)
    run.work()
    assert run.work("big") == [0, 1]
    assert tell(run, 0, wrong="logprobs: not finite") == "" and run.sample(0).judged["big"].failures == 1
    assert run.g.table.groups[0].records == [Record(0, 0, 0, 0, 1)]
    assert run.work("big", "other") == [0]
    assert tell(run, 0, wrong="logprobs: not finite") == "" and run.state(0) == "DEAD"


def test_teachers_are_not_asked_about_held_out_prompts() -> None:
    judges = Judges(judges=TEACHING).g.judges
    assert judges.drop_teachers().names == ("",) and judges.judges_for("math") == ("", "big", "maths")
    assert judges.teaches("big") and not judges.teaches("")
