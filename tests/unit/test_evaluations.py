"""The state machine of evaluations, transition by transition; after each the rows give the same state back."""

from __future__ import annotations

import doctest
from typing import Any

import msgspec
import pytest
from bare_config import BARE

import asyncrl.evaluation.ids
import asyncrl.evaluation.statistics
import buffers.evaluation.work
from asyncrl.config import parse
from asyncrl.errors import HandshakeError
from asyncrl.evaluation.ids import evaluation_group, split_group
from asyncrl.wire import Lease, LeaseReturn, RewardFailure, SampleHead, Samples, SamplesReply, Score, Scores
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.diagnosis import describe_judges
from buffers.groups.group_table import abandon_versions, ledger_counts
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Ledger, Record, settings_of

TEXT = f"{BARE}\nlease_timeout_s = 5.0\nmax_reissue = 1\n[evaluation]\npath = 'h.jsonl'\nevery = 2\nat_start = true\n"


@pytest.mark.parametrize(
    "module",
    [asyncrl.evaluation.ids, asyncrl.evaluation.statistics, buffers.evaluation.work],
    ids=lambda one: one.__name__,
)
def test_examples_of_the_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0


class Lab:
    """Groups, evaluations and a store that is a dict."""

    def __init__(self, *overrides: str, rows: int = 2) -> None:
        self.config = parse(TEXT, overrides=["evaluation.samples=2", "evaluation.timeout_s=100", *overrides])
        self.groups = GroupMachine(settings_of(self.config))
        self.e = Evaluations(self.config, self.groups)
        self.epoch = self.groups.register(name="l", pid=1, host="h", step=0, ledger=Ledger(), takeover=False, now=0.0)
        self.store: dict[str, bytes] = {}
        self.events: list[dict[str, Any]] = []
        self.freed: list[Record] = []
        self.lines: list[dict[str, Any]] = []
        self.request = 0
        self.now = 0.0
        self.e.greet("p", rows)
        self.settle()

    def settle(self) -> None:
        """What the service does after a drain, and the proof of the rows."""
        self.groups.begin(self.now)
        self.e.settle()
        taken = self.groups.take()
        lines, _ = self.e.take()
        for change in taken.rows:
            if change.key[0] not in "vw":
                continue
            if change.value is None:
                self.store.pop(change.key, None)
            else:
                self.store[change.key] = change.value
        self.events += [event for event in taken.events if isinstance(event, dict) and event["e"].startswith("eval_")]
        self.freed += taken.freed
        self.lines += lines
        self.e.table.check()
        again = Evaluations(self.config, self.groups)
        again.load(self.store.items())
        assert again.table.prompts == self.e.table.prompts and again.table.meta == self.e.table.meta
        assert again.table.ended == self.e.table.ended
        assert (again.table.indexes.pending, again.table.indexes.over) == (
            self.e.table.indexes.pending,
            self.e.table.indexes.over,
        )

    def due(self, step: int, digest: str | None = None) -> None:
        self.groups.begin(self.now)
        self.e.due(step, f"d{step}" if digest is None else digest)
        self.settle()

    def lease(self, producer: str = "p", version: int = 0, request: int = 0) -> list[Lease]:
        self.groups.workers.see("producer", producer, self.now)
        self.request += 1
        leases = self.e.prompt_leases.lease(producer, engine_version=version, request=request or self.request)
        self.settle()
        return list(leases)

    def answer(
        self,
        lease: Lease,
        *,
        version: int = 0,
        indices: tuple[int, ...] | None = None,
        producer: str = "p",
        digest: str = "",
        invalid: str = "",
        source: str = "a",
    ) -> SamplesReply:
        heads = tuple(
            SampleHead(index, 3, "stop", ((version, 3),)) for index in (lease.missing if indices is None else indices)
        )
        head = Samples(
            producer,
            lease.group,
            lease.token,
            heads,
            {version: digest} if digest else {},
            (),
            f'{{"data_source":"{source}"}}',
            1,
        )
        record = Record(0, lease.token, 1, 1, lease.token)
        reply = self.e.intake.take(head, checksum=lease.token, invalid=lambda: invalid, keep=lambda: record)
        self.settle()
        return reply

    def score(self, *rewards: float, worker: str = "r", answers: tuple[str, ...] = ()) -> tuple[int, dict[str, str]]:
        """Score what can be leased, with these rewards in turn."""
        self.groups.workers.see("reward", worker, self.now)
        self.request += 1
        items = self.e.scoring.lease(worker, max_samples=len(rewards), request=self.request)
        words = answers or tuple("x" for _ in rewards)
        scores = tuple(
            Score(item.group, item.index, item.token, reward, {"f": reward}, word)
            for item, reward, word in zip(items, rewards, words, strict=False)
        )
        taken = self.e.scoring.take(Scores(worker, scores))
        self.settle()
        return taken

    def fail(self, worker: str, reason: str = "raised") -> tuple[int, dict[str, str]]:
        self.groups.workers.see("reward", worker, self.now)
        self.request += 1
        (item,) = self.e.scoring.lease(worker, max_samples=1, request=self.request)
        failure = RewardFailure(item.group, item.index, item.token, reason, "no")
        taken = self.e.scoring.take(Scores(worker, (), (failure,)))
        self.settle()
        return taken

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.groups.begin(self.now)
        self.e.tick()
        self.settle()

    def names(self) -> list[str]:
        return [event["e"].removeprefix("eval_") for event in self.events]


def test_every_prompt_is_leased_sampled_scored_and_told() -> None:
    lab = Lab()
    lab.due(0)
    leases = lab.lease()
    assert [split_group(lease.group) for lease in leases] == [(0, 0), (0, 1)]
    assert all(lease.missing == (0, 1) for lease in leases) and leases[0].seed != leases[1].seed
    assert all(lab.answer(lease).accepted == (0, 1) for lease in leases)
    assert lab.score(1.0, 0.0, 1.0, 1.0, answers=("4", "5", "6", "6")) == (4, {})
    (line,) = lab.e.table.ended
    assert (line["evaluation_prompts"], line["evaluation_scored"]) == (2, 2)
    assert (line["evaluation_failed"], line["evaluation_missing"], line["why"]) == (0, 0, "")
    assert line["val-core/a/reward/mean@2"] == 0.75 and line["val-core/a/reward/maj@2/mean"] == 0.5
    assert (line["evaluation_version_min"], line["evaluation_version_max"]) == (0, 0)
    assert not any("/f/" in name for name in line), "with one function its part is the reward"
    assert lab.e.table.prompts == {} and lab.e.table.meta.round is None and len(lab.freed) == 2
    assert lab.names().count("score") == 4 and lab.names()[-1] == "end"
    assert [(one["row"], one["index"], one["reward"]) for one in lab.lines] == [
        (0, 0, 1.0),
        (0, 1, 0.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
    ]


def test_groups_of_training_know_nothing_of_it() -> None:
    lab = Lab()
    before = (ledger_counts(lab.groups.table), lab.groups.table.outstanding, lab.groups.rows())
    lab.due(0)
    for lease in lab.lease():
        lab.answer(lease)
    lab.score(1.0, 1.0, 1.0, 1.0)
    assert (ledger_counts(lab.groups.table), lab.groups.table.outstanding, lab.groups.rows()) == before
    lab.groups.check()


def test_the_same_prompts_have_the_same_seeds_in_every_evaluation() -> None:
    lab = Lab()
    lab.due(0)
    first = {split_group(lease.group)[1]: lease.seed for lease in lab.lease()}
    lab.e.finish()
    lab.groups.table.meta.newest = lab.groups.table.meta.version = 2
    lab.due(2)
    assert {split_group(lease.group)[1]: lease.seed for lease in lab.lease(version=2)} == first


def test_only_the_version_of_the_first_lease_makes_samples() -> None:
    lab = Lab("producers.max_groups_in_flight=1", rows=4)
    lab.groups.table.meta.newest = 3
    lab.due(2)
    assert lab.lease(version=1) == [], "older than the step"
    assert lab.lease(version=5) == [], "nobody has published that"
    (first,) = lab.lease(version=2)
    assert first.deadline_version == 2
    assert lab.lease("q", version=3) == [], "a newer one is another model"
    assert lab.lease("q", version=1) == []
    (other,) = lab.lease("r", version=2)
    assert lab.answer(first, version=2).accepted == (0, 1)
    for version in (1, 3):
        reply = lab.answer(other, version=version, producer="r")
        assert reply.refused[0].startswith(f"lease: other_version: {version} made tokens"), reply
        assert lab.answer(other, version=2, producer="r").refused[0].startswith("token"), "its lease is lost"
        (other, *_) = lab.lease("r", version=2)
        assert other.attempt == 0, "no fault of the prompt"
    while lab.e.table.meta.round is not None:
        lab.answer(other, version=2, producer="r")
        lab.score(1.0, 1.0, 1.0, 1.0)
        (other, *_) = lab.lease("r", version=2) or [other]
    (line,) = lab.e.table.ended
    versions = [line[f"evaluation_version{end}"] for end in ("", "_min", "_max")]
    assert versions == [2, 2, 2] and line["evaluation_refused"] == 4
    assert {(one["version"], *one["versions"]) for one in lab.lines} == {(2, 2, 2)}
    assert [event["why"] for event in lab.events if event["e"] == "eval_lost"] == ["other_version"] * 2


def test_a_sample_of_two_versions_is_refused() -> None:
    lab = Lab(rows=1)
    lab.groups.table.meta.newest = 1
    lab.due(0)
    (lease,) = lab.lease()
    heads = tuple(SampleHead(index, 3, "stop", ((0, 2), (1, 1))) for index in lease.missing)
    head = Samples("p", lease.group, lease.token, heads, {}, (), "{}", 1)
    reply = lab.e.intake.take(head, checksum=1, invalid=str, keep=lambda: Record(0, 1, 1, 1, 1))
    assert "other_version: 1 made tokens of it, version 0 is evaluated" in reply.refused[0]


def test_a_producer_keeps_the_version_until_every_prompt_is_generated() -> None:
    lab = Lab(rows=2)
    lab.groups.table.meta.newest = 2
    assert lab.e.prompt_leases.hold(0) == -1, "nothing is evaluated"
    lab.due(0)
    assert lab.e.prompt_leases.hold(0) == -1, "no version is measured yet"
    one, two = lab.lease()
    lab.lease("q")
    assert lab.e.prompt_leases.hold(0) == 0, "q too: it takes over if p is killed"
    assert lab.e.prompt_leases.hold(1) == -1, "of another version"
    lab.answer(one)
    assert lab.e.prompt_leases.hold(0) == 0
    lab.answer(two)
    assert lab.e.prompt_leases.hold(0) == -1, "scores need no engine"
    lab.score(1.0, 1.0, 1.0, 1.0)
    assert lab.e.prompt_leases.hold(0) == -1


def test_a_version_that_the_learner_went_back_from_is_not_kept() -> None:
    lab = Lab()
    lab.groups.table.meta.newest = 4
    lab.due(4)
    lab.lease(version=4)
    lab.groups.table.meta.newest = 1
    assert lab.e.prompt_leases.hold(4) == -1


def test_another_producer_of_the_version_takes_over_and_nothing_is_lost() -> None:
    lab = Lab("evaluation.share=1.0", rows=2)
    lab.due(0)
    one, two = lab.lease()
    lab.lease("q")
    lab.answer(one)
    lab.groups.begin(lab.now)
    lab.e.hello("producer", "p")  # killed and started again
    lab.settle()
    lab.tick(0.1)
    (again,) = lab.lease("q")
    assert (again.group, again.attempt) == (two.group, 1)
    lab.answer(again, producer="q")
    lab.score(1.0, 1.0, 1.0, 1.0)
    (line,) = lab.e.table.ended
    assert (line["evaluation_scored"], line["evaluation_restarts"]) == (2, 0)


def test_a_killed_producer_of_the_newest_version_gets_it_again_and_nothing_is_dropped() -> None:
    lab = Lab(rows=2)
    lab.due(0)
    one, two = lab.lease()
    lab.answer(one)
    lab.groups.begin(lab.now)
    lab.e.hello("producer", "p")
    lab.settle()
    lab.tick(0.1)
    assert lab.e.table.meta.round is not None and lab.e.table.meta.round.restarts == 0
    (again,) = lab.lease()
    assert (again.group, again.deadline_version) == (two.group, 0)


def test_a_lost_version_begins_again_with_another_one_and_mixes_nothing() -> None:
    lab = Lab(rows=2)
    lab.due(0)
    one, two = lab.lease()
    lab.answer(one)
    lab.score(0.0, 0.0)
    lab.groups.table.meta.newest = 3
    assert lab.lease(version=3) == [], "p swapped: it was killed, or its wait was over"
    lab.tick(0.1)
    assert [e["version"] for e in lab.events if e["e"] == "eval_restart"] == [0]
    assert lab.answer(two).refused[0].startswith("gone"), "of the lost version"
    assert lab.answer(one).refused[0].startswith("gone")
    fresh = lab.lease(version=3)
    assert [lease.group for lease in fresh] == [one.group, two.group], "all of them"
    for lease in fresh:
        assert lab.answer(lease, version=3).accepted == (0, 1)
    lab.score(1.0, 1.0, 1.0, 1.0)
    (line,) = lab.e.table.ended
    assert (line["step"], line["evaluation_version"], line["evaluation_restarts"]) == (0, 3, 1)
    assert line["val-core/a/reward/mean@2"] == 1.0, "nothing of version 0"
    assert len({sample["round"] for sample in lab.lines}) == 2, "the file tells them apart"


def test_a_version_that_was_trained_again_begins_again_and_mixes_no_weights() -> None:
    lab = Lab("evaluation.share=1.0", rows=2)
    lab.due(0)
    one, two = lab.lease(version=1)
    lab.groups.table.add_digest(1, "old")
    assert lab.answer(one, version=1, digest="old").accepted == (0, 1)
    assert "other weights of version 1" in lab.answer(two, version=1, digest="new").refused[0], "it is not committed"
    lab.groups.begin(lab.now)
    lab.groups.table.add_digest(1, "new")  # the learner went back and trained the step again
    lab.tick(0.1)
    assert [e["why"] for e in lab.events if e["e"] == "eval_restart"] == [
        "its version was trained again with other weights"
    ]
    held = lab.lease(version=1)
    assert lab.answer(held[0], version=1, digest="old").refused[0].startswith("not published"), "of the old weights"
    assert lab.lease(version=1) == [], "it takes the new ones first"
    fresh = lab.lease("q", version=1)
    for lease in fresh:
        assert lab.answer(lease, version=1, producer="q", digest="new").accepted == (0, 1)
    assert lab.groups.table.digests[1] == ("old", "new")


def test_a_version_that_the_learner_went_back_from_is_lost_at_once() -> None:
    for version, digests in ((4, {}), (1, {1: "old"})):
        lab = Lab()
        for known in range(1, 5):
            lab.groups.table.add_digest(known, digests.get(known, ""))
        lab.due(0)
        one, _ = lab.lease(version=version)
        lab.answer(one, version=version, digest=digests.get(version, ""))
        lab.groups.begin(lab.now)
        abandon_versions(lab.groups.table, 0)
        lab.tick(0.1)
        (event,) = [e for e in lab.events if e["e"] == "eval_restart"]
        assert event["why"] == "its version was trained again with other weights"
        assert lab.lease(version=4) == [] and lab.e.prompt_leases.hold(4) == -1


def test_a_lost_version_ends_if_a_newer_evaluation_waits_or_too_often() -> None:
    lab = Lab()
    lab.groups.table.meta.newest = 9
    lab.due(0)
    lab.lease()
    lab.due(2)
    lab.lease(version=2)
    lab.tick(0.1)
    assert [line["why"] for line in lab.e.table.ended] == ["no producer holds its version any more"]
    for version in range(3, 7):  # max_reissue = 1
        lab.lease(version=version)
        lab.tick(0.1)
    assert [(line["step"], line["evaluation_restarts"]) for line in lab.e.table.ended] == [(0, 0), (2, 1)]


def test_a_restarted_service_waits_until_producers_had_time_to_ask() -> None:
    lab = Lab()
    lab.due(0)
    lab.lease()
    later = GroupMachine(settings_of(lab.config), epoch=2)
    lab.groups, lab.e = later, Evaluations(lab.config, later)
    lab.e.load(lab.store.items())
    lab.groups.table.meta.newest = 1
    lab.tick(4.0)
    assert lab.e.table.meta.round is not None and lab.e.table.meta.round.version == 0
    assert lab.e.prompt_leases.hold(0) == 0
    lab.tick(6.0)
    assert lab.e.table.meta.round.version == -1, "nobody asked for lease_timeout_s"


def test_more_is_held_while_newer_weights_wait() -> None:
    lab = Lab("producers.max_groups_in_flight=4", "evaluation.share=0.5", rows=9)
    lab.due(0)
    assert len(lab.lease()) == 2, "half of what it holds for training"
    lab.groups.table.meta.newest = 1
    assert len(lab.lease()) == 2, "as much as that"


def test_a_second_set_of_weights_holds_its_share_and_no_more() -> None:
    """Nobody waits for it, and it has that many rows."""
    few = ("producers.max_groups_in_flight=4", "evaluation.share=0.5", "evaluation.lane='second_weights'")
    lab = Lab(*few, rows=9)
    lab.due(0)
    assert len(lab.lease()) == 2 == lab.config.held_out_prompts
    lab.groups.table.meta.newest = 1
    assert lab.lease() == [], "newer weights do not wait"
    assert lab.e.prompt_leases.hold(0) == 0 and lab.e.prompt_leases.hold(1) == -1


def test_evaluators_alone_get_the_prompts_of_their_lane_and_swap_on_request() -> None:
    lab = Lab("evaluation.lane='evaluators'", "producers.max_groups_in_flight=1", rows=3)
    lab.groups.table.meta.newest = 7
    hold = lab.e.prompt_leases.hold
    assert hold(3) == 3 and hold(3, trains=True) == -1, "nothing is due: an evaluator keeps what it has"
    lab.due(6)
    assert hold(3) == -1, "it is asked to take newer weights"
    lab.groups.workers.see("producer", "p", lab.now)
    assert lab.e.prompt_leases.lease("p", engine_version=6, request=90, trains=True) == (), "p trains"
    assert hold(6, trains=True) == -1
    lab.groups.begin(lab.now)
    leases = lab.lease("evaluator-0", version=6)
    assert len(leases) == 1 and leases[0].deadline_version == 6
    assert hold(6) == 6
    assert hold(9) == -1, "nobody has published that"


def test_rows_of_an_older_service_still_open() -> None:
    row = msgspec.msgpack.encode([2, {0: "d"}, None, [9, 0, "d", 2, 1.0, 1], 3])
    lab = Lab()
    lab.e.load([("vmeta", row), ("w0", b"{}"), ("w1", b"{}"), ("w2", b"{}")])
    current = lab.e.table.meta.round
    assert current is not None and (current.cursor, current.version, lab.e.table.meta.skipped) == (1, -1, 0)


def test_another_digest_than_the_published_one_is_refused_and_bars_the_producer() -> None:
    lab = Lab()
    lab.groups.table.digests[0] = ("good",)
    lab.due(0)
    lease, other = lab.lease()
    assert lab.answer(lease, digest="bad").refused[0].startswith("not published: digest: p holds bad")
    assert lab.lease() == [], "barred for a while"
    assert lab.answer(other, digest="good").accepted == (0, 1)


def test_a_share_of_what_is_held_and_all_of_it_at_the_end() -> None:
    few = ("producers.max_groups_in_flight=4", "evaluation.share=0.5")  # 4 groups x 2 samples: 8, half of them
    lab = Lab(*few, rows=9)
    lab.due(0)
    assert len(lab.lease()) == 2, "0.5 x 8 samples are 2 prompts x 2"
    assert lab.lease() == [], "until something is done"
    assert len(lab.lease("q")) == 2, "each producer has its share"
    lab.groups.table.batches = dict.fromkeys(range(1, 5))  # type: ignore[assignment, misc]  # all are in batches
    assert lab.groups.schedule.unclaimed == 0
    assert len(lab.lease()) == 2, "the rest of 4 prompts"


def test_a_request_sent_again_gets_the_same_leases() -> None:
    lab = Lab()
    lab.due(0)
    leases = lab.lease(request=7)
    assert lab.lease(request=7) == leases and lab.names().count("lease") == 2


def test_a_lost_lease_keeps_what_arrived_and_the_rest_is_made_elsewhere() -> None:
    lab = Lab()
    lab.due(0)
    lease, _ = lab.lease()
    assert lab.answer(lease, indices=(1,)).accepted == (1,)
    lab.now = 3.0
    assert lab.lease("q") == [], "it holds the version"
    lab.tick(3.0)  # p is silent for longer than lease_timeout_s
    assert lab.names().count("lost") == 2
    again = {split_group(one.group)[1]: one for one in lab.lease("q")}
    assert again[0].missing == (0,) and again[1].missing == (0, 1) and again[0].attempt == 1
    assert lab.answer(lease, indices=(0,)).refused == {0: "token: the lease was lost"}
    assert lab.answer(again[0], producer="q").accepted == (0,)
    assert lab.groups.workers.take_cancelled("p", again=True), "the silent one is told, should it come back"


def test_a_prompt_that_is_lost_too_often_has_failed() -> None:
    lab = Lab()
    lab.due(0)
    lab.lease()
    lab.now = 3.0
    lab.lease("q"), lab.lease("r")
    lab.tick(3.0)
    lab.lease("q")
    lab.now = 11.0
    lab.lease("r")
    lab.tick(1.0)
    (line,) = lab.e.table.ended
    assert line["failed"] == {"max_reissue": 2} and line["evaluation_failed"] == 2 and line["evaluation_missing"] == 0
    assert not any(name.startswith("val-") for name in line), "no figures of nothing"


def test_a_prompt_that_cannot_be_made_has_failed_and_one_given_back_has_not() -> None:
    lab = Lab()
    lab.due(0)
    bad, fine = lab.lease()
    lab.e.leases.give_back(LeaseReturn("p", ((bad.group, bad.token),), "too_long: 99 tokens", dead=True))
    lab.e.leases.give_back(LeaseReturn("p", ((fine.group, fine.token),), "stopping"))
    lab.settle()
    (again,) = lab.lease("q")
    assert again.group == fine.group and again.attempt == 0, "no fault of the prompt"
    lab.answer(again, producer="q")
    lab.score(1.0, 1.0)
    (line,) = lab.e.table.ended
    assert line["failed"] == {"prompt": 1} and line["val-core/a/reward/mean@2"] == 1.0, "never a reward of 0"


def test_the_same_answer_twice_changes_nothing() -> None:
    lab = Lab()
    lab.due(0)
    lease, _ = lab.lease()
    lab.answer(lease)
    assert lab.answer(lease).duplicate == (0, 1)
    lab.score(1.0, 1.0)
    assert lab.answer(lease).duplicate == (0, 1), "also after its payloads are free"
    assert lab.names().count("sample") == 2


def test_poison_is_refused_and_made_again() -> None:
    lab = Lab()
    lab.due(0)
    lease, _ = lab.lease()
    assert lab.answer(lease, invalid="logprobs: not finite").refused[0] == "poison: logprobs: not finite"
    assert lab.groups.budget.counts.poisoned == 0, "no budget of training is used"
    (again,) = lab.lease("q")
    assert again.group == lease.group


def test_a_reward_that_fails_goes_elsewhere_and_then_the_prompt_has_failed() -> None:
    lab = Lab("reward_workers.retries=1", rows=1)
    lab.due(0)
    (lease,) = lab.lease()
    lab.answer(lease, indices=(0,))
    lab.groups.workers.see("reward", "other", lab.now)
    lab.fail("r")
    assert lab.score(1.0) == (0, {}), "not to the one that failed while another lives"
    assert lab.fail("other") == (1, {})
    (line,) = lab.e.table.ended
    assert line["failed"] == {"reward_failed": 1}
    assert lab.groups.budget.fault is None and ledger_counts(lab.groups.table)["dead"] == 0


def test_several_judges_score_a_sample_and_name_its_answer() -> None:
    both = ('reward=[{function="m:f"}, {function="m:deep", judge="deep", data_sources=["a"]}]', 'judge=[{name="deep"}]')
    lab = Lab(*both, rows=2)
    lab.due(0)
    first, second = lab.lease()
    lab.answer(first)
    lab.answer(second, source="b")

    def judge(name: str, worker: str, reward: float, answer: str) -> list[tuple[int, int]]:
        lab.request += 1
        lab.groups.workers.see("reward", worker, lab.now)
        items = lab.e.scoring.lease(worker, max_samples=9, request=lab.request, judge=name)
        scores = tuple(Score(one.group, one.index, one.token, reward, {name or "f": reward}, answer) for one in items)
        for _ in range(2):  # a copy of it changes nothing
            lab.e.scoring.take(Scores(worker, scores, judge=name))
        lab.settle()
        return [(one.group, one.index) for one in items]

    assert judge("deep", "d", 0.5, "deep says") == [(first.group, 0), (first.group, 1)], "rows of a alone"
    assert not lab.e.table.ended and len(judge("", "r", 1.0, "")) == 4
    (line,) = lab.e.table.ended
    assert (line["val-core/a/reward/mean@2"], line["val-core/b/reward/mean@2"]) == (1.5, 1.0)
    told = [
        (sample["reward"], sample["answer"], sample["parts"]) for sample in lab.lines if sample["data_source"] == "a"
    ]
    assert told == [(1.5, "deep says", {"f": 1.0, "deep": 0.5})] * 2


def test_a_score_under_an_old_token_is_refused() -> None:
    lab = Lab(rows=1)
    lab.due(0)
    (lease,) = lab.lease()
    lab.answer(lease)
    (first, _) = lab.e.scoring.lease("r", max_samples=2, request=90)
    assert lab.e.scoring.lease("r", max_samples=2, request=90)[0] == first, "the same request"
    lab.groups.workers.see("reward", "r", lab.now)
    lab.tick(6.0)  # silent
    lab.score(0.0, 0.0, worker="s")
    (line,) = lab.e.table.ended
    assert line["val-core/a/reward/mean@2"] == 0.0
    assert "gone" in str(lab.e.scoring.take(Scores("r", (Score(first.group, 0, first.token, 1.0),))))
    nan = Score(first.group, 0, first.token, float("nan"))
    assert lab.e.scoring.take(Scores("r", (nan,)))[0] == 0


def test_scores_that_are_not_finite_are_failures() -> None:
    lab = Lab("reward_workers.retries=0", rows=1)
    lab.due(0)
    lab.answer(lab.lease()[0])
    lab.score(float("nan"))
    (line,) = lab.e.table.ended
    assert line["failed"] == {"reward_failed": 1}


def test_at_the_deadline_the_rest_is_missing_with_its_reason() -> None:
    lab = Lab("producers.max_groups_in_flight=4", "evaluation.share=0.75", rows=6)  # 3 prompts at a time
    lab.due(0)
    scored, unscored, held = lab.lease()
    lab.answer(scored)
    lab.score(1.0, 0.0)
    lab.answer(unscored)
    lab.now = 99.0
    lab.groups.workers.see("producer", "p", lab.now)
    lab.tick(0.5)
    assert lab.e.table.ended == [] and "100 s" in lab.e.progress()
    lab.tick(0.6)
    (line,) = lab.e.table.ended
    assert line["why"] == "time" and line["evaluation_scored"] == 1
    assert line["missing"] == {"waits for scores": 1, "is being generated": 1, "waits for a producer": 3}
    assert line["evaluation_prompts"] == 6 == line["evaluation_scored"] + line["evaluation_missing"]
    assert (held.group, held.token) in lab.groups.workers.take_cancelled("p"), "its generation is stopped"
    assert lab.answer(held).refused[0].startswith("gone"), "and refused"
    assert lab.lease() == []


def test_one_at_a_time_the_newest_waits_and_the_others_are_skipped() -> None:
    lab = Lab()
    lab.groups.table.meta.newest = 6
    lab.due(0)
    leases = lab.lease()
    for step in (2, 4, 6):
        lab.due(step)
    assert [event["step"] for event in lab.events if event["e"] == "eval_skip"] == [2, 4]
    assert lab.e.status()["skipped"] == 2
    assert "that of step 6 is next" in lab.e.progress()
    for lease in leases:
        lab.answer(lease)
    lab.score(1.0, 1.0, 1.0, 1.0)
    assert [line["step"] for line in lab.e.table.ended] == [0]
    assert lab.e.table.meta.round is not None and lab.e.table.meta.round.step == 6, "it begins at once"
    lab.due(2), lab.due(4), lab.due(6)
    assert lab.e.table.meta.waiting is None, "a commit that comes again starts nothing"


def test_the_same_weights_are_evaluated_once_and_others_again() -> None:
    lab = Lab()
    lab.due(0, "one")
    stale = lab.lease()[0]
    lab.due(0, "one")
    assert lab.names().count("begin") == 1
    lab.due(0, "")  # replayed without a publish: as before
    assert lab.names().count("begin") == 1
    lab.due(0, "two")  # the learner went back and trained the step again
    assert [line["why"] for line in lab.e.table.ended] == ["the step was trained again with other weights"]
    assert lab.answer(stale).refused[0].startswith("gone")
    fresh = lab.lease("q")
    assert [lease.group for lease in fresh] == [evaluation_group(0, 0), evaluation_group(0, 1)]
    assert lab.answer(stale).refused[0].startswith("token")
    for lease in fresh:
        lab.answer(lease, producer="q")
    lab.score(1.0, 1.0, 1.0, 1.0)
    assert [line["digest"] for line in lab.e.table.ended] == ["one", "two"]
    lab.due(0, "two")
    lab.due(0, "")
    assert lab.e.table.meta.round is None


def test_the_row_that_every_prompt_writes_does_not_grow_with_the_evaluations() -> None:
    lab = Lab("evaluation.timeout_s=1")
    sizes = []
    for step in range(10):
        lab.due(step)
        lab.tick(2.0)
        sizes.append(len(lab.store["vmeta"]))
    assert len(lab.e.table.ended) == 10 and max(sizes) == min(sizes)
    again = Evaluations(lab.config, lab.groups)
    older = msgspec.msgpack.decode(lab.store["vmeta"], strict=False)
    older[1] = {step: f"d{step}" for step in range(9)} | {9: "other"}  # with all of them; that of step 9 was skipped
    again.load([*lab.store.items(), ("vmeta", msgspec.msgpack.encode(older))])
    for one, digests in ((lab.e, {9: "d9"}), (again, {9: "other"})):
        assert [one.table.known_digest(step) for step in (0, 8, 9, 10)] == ["d0", "d8", digests[9], None]
    lab.due(3)
    assert lab.e.table.meta.round is None, "of the same weights"
    lab.due(3, "new")
    lab.tick(2.0)
    assert lab.e.table.known_digest(3) == "new"


def test_the_end_of_the_run_ends_it() -> None:
    lab = Lab()
    lab.due(0)
    lab.due(2)
    lab.e.finish()
    lab.settle()
    (line,) = lab.e.table.ended
    assert line["why"] == "the run ended" and line["evaluation_missing"] == 2
    assert lab.e.progress() == "" and [e["step"] for e in lab.events if e["e"] == "eval_skip"] == [2]


def test_it_begins_when_a_producer_says_how_many_prompts_there_are() -> None:
    lab = Lab(rows=0)
    lab.due(0)
    assert "no producer has reported" in lab.e.progress() and lab.lease() == []
    lab.e.greet("p", 3)
    lab.settle()
    assert lab.e.table.meta.round is not None and lab.e.table.meta.round.rows == 3


def test_producers_that_read_other_files_are_refused() -> None:
    lab = Lab(rows=2)
    lab.due(0)
    lab.due(2)
    lab.groups.hello("producer", "p", pid=1, host="h", now=0.0)
    with pytest.raises(HandshakeError, match="q reads 3 prompts"):
        lab.groups.begin(1.0)
        lab.e.greet("q", 3)
    lab.groups.begin(99.0)
    lab.e.greet("q", 3)  # the other one is silent: the data changed
    assert lab.e.table.meta.rows == 3
    assert lab.e.table.meta.round is not None
    assert (lab.e.table.meta.round.step, lab.e.table.meta.round.rows) == (2, 3), "the next one has the new rows"


def test_a_restarted_producer_loses_what_its_name_held_and_an_unnamed_lease_too() -> None:
    lab = Lab()
    lab.due(0)
    first, second = lab.lease()
    lab.groups.begin(1.0)
    lab.e.heartbeat("producer", "p", pid=0, holds=((first.group, first.token),))
    lab.groups.workers.see("producer", "p", 6.5)
    lab.groups.begin(6.5)
    lab.e.heartbeat("producer", "p", pid=0, holds=((first.group, first.token),))
    lab.settle()
    assert [event["why"] for event in lab.events if event["e"] == "eval_lost"] == ["unnamed"]
    assert lab.e.table.indexes.pending == {second.group}
    lab.groups.begin(7.0)
    lab.e.hello("producer", "p")
    lab.settle()
    assert lab.e.table.indexes.pending == {first.group, second.group}


def test_damaged_payloads_are_made_again() -> None:
    lab = Lab(rows=1)
    lab.due(0)
    (lease,) = lab.lease()
    lab.answer(lease)
    lab.e.lose_payloads([lease.group])
    lab.settle()
    (again,) = lab.lease()
    assert again.missing == (0, 1) and again.attempt == 1 and len(lab.freed) == 1


def test_after_a_restart_of_the_service_it_goes_on_with_its_whole_time() -> None:
    lab = Lab(rows=2)
    lab.due(0)
    done, open_ = lab.lease()
    lab.answer(done)
    lab.score(1.0, 0.5)
    lab.now = 90.0
    later = GroupMachine(settings_of(lab.config), epoch=2)
    lab.groups = later
    lab.e = Evaluations(lab.config, later)
    lab.e.load(lab.store.items())
    lab.groups.workers.see("producer", "p", lab.now)
    lab.tick(0.1)
    lab.tick(1.0)
    assert lab.answer(open_).accepted == (0, 1), "what was leased is taken"
    lab.score(0.0, 0.0)
    (line,) = lab.e.table.ended
    assert line["evaluation_scored"] == 2 and line["val-core/a/reward/mean@2"] == pytest.approx(0.375)
    assert lab.e.table.rows()[-1].key == "w0"


# ---------------------------------------------------------------- the same rules as for training groups


def test_answers_about_held_out_prompts_are_counted_by_judge() -> None:
    lab = Lab()
    lab.due(0)
    for lease in lab.lease():
        lab.answer(lease)
    lab.score(1.0, 0.0)
    lab.fail("s")
    (status,) = describe_judges(lab.groups.scoring, lab.e.table.queue)
    assert (status["scored"], status["failures"], status["waiting"], status["leased"]) == (2, 1, 2, 0)


def test_a_long_reason_is_cut_as_for_a_group() -> None:
    lab = Lab()
    lab.due(0)
    lease, _ = lab.lease()
    lab.e.leases.give_back(LeaseReturn("p", ((lease.group, lease.token),), "x" * 999))
    lab.settle()
    assert lab.events[-1]["e"] == "eval_lost" and lab.events[-1]["why"] == "x" * 200


def test_the_holder_of_a_prompt_that_fails_is_told_to_stop() -> None:
    lab = Lab("reward_workers.retries=0")
    lab.due(0)
    lease, _ = lab.lease()
    assert lab.answer(lease, indices=(0,)).accepted == (0,)
    lab.fail("r")
    assert lab.e.table.prompts[lease.group].failed == "reward_failed"
    assert lab.groups.workers.take_cancelled("p") == ((lease.group, lease.token),)


def test_a_failure_names_its_judge() -> None:
    more = ('reward=[{function="a:b"},{function="a:c",judge="slow"}]', 'judge=[{name="slow",retries=0}]')
    lab = Lab(*more)
    lab.due(0)
    lease, _ = lab.lease()
    lab.answer(lease)
    lab.groups.workers.see("reward", "s", lab.now)
    (item,) = lab.e.scoring.lease("s", max_samples=1, request=1, judge="slow")
    failure = RewardFailure(item.group, item.index, item.token, "raised", "no")
    assert lab.e.scoring.take(Scores("s", (), (failure,), judge="slow")) == (1, {})
    lab.settle()
    assert lab.events[-1]["detail"] == "raised: no (judge slow)"


def test_a_service_with_fewer_judges_does_not_wait_for_the_others() -> None:
    more = ('reward=[{function="a:b"},{function="a:c",judge="slow"}]', 'judge=[{name="slow"}]')
    lab = Lab(*more)
    lab.due(0)
    leases = lab.lease()
    for lease in leases:
        lab.answer(lease)
    assert lab.score(1.0, 0.0, 1.0, 1.0)[0] == 4 and not lab.e.table.ended, "the other judge has not answered"
    later = Lab()
    later.e.load(lab.store.items())
    later.e.scoring.settle_judges()
    later.settle()
    (line,) = later.e.table.ended
    assert (line["evaluation_scored"], line["val-core/a/reward/mean@2"]) == (2, 0.75)


def test_a_digest_is_wrong_whatever_version_of_the_message_it_names() -> None:
    lab = Lab()
    lab.groups.table.digests |= {0: ("good",), 1: ("other",)}
    lab.groups.table.meta.newest = 1
    lab.due(0)
    lease, _ = lab.lease()
    heads = tuple(SampleHead(index, 3, "stop", ((0, 3),)) for index in lease.missing)
    head = Samples("p", lease.group, lease.token, heads, {0: "good", 1: "bad"}, (), "{}", 1)
    reply = lab.e.intake.take(head, checksum=1, invalid=str, keep=lambda: Record(0, 1, 1, 1, 1))
    assert "digest: p holds bad as version 1" in reply.refused[0]


def test_a_bar_that_is_over_is_removed() -> None:
    lab = Lab()
    lab.due(0)
    lab.groups.workers.bar("p", 0, until=lab.now + 1.0)
    assert lab.lease() == []
    lab.tick(2.0)
    assert len(lab.lease()) == 2 and "p" not in lab.groups.workers.barred
