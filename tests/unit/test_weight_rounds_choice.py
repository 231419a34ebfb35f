"""How a version comes to a member: transports, sources, relays, hops, and that every choice says why."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError
from asyncrl.monitor.status import render
from asyncrl.wire import BaseOffer, Hop, Instruction, Manifest, MemberPoll, Publish, RoundReply, RoundRequest, Tensor
from weightsync.coordinator import status as reports
from weightsync.coordinator.queries import FORM_S, FORMING, WANTED, reply_digest
from weightsync.coordinator.records import Publisher, Route
from weightsync.coordinator.rounds import Rounds
from weightsync.coordinator.routing import UNUSABLE_S
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import version_digest
from weightsync.transports.base import UNUSABLE

PLAN = plan_buckets([TensorSpec("a", "F32", (100,)), TensorSpec("b", "F32", (50,))], bucket_bytes=400)
ALL = ("local", "collective", "stream", "disk")
DIRECT = ("direct", "local", "stream")


def manifest_of(version: int, *, encoding: str = "full") -> Manifest:
    digests = tuple(f"{version}-{number}" for number in range(len(PLAN.bucket_bytes)))
    return Manifest(version, PLAN.digest, PLAN.bucket_bytes, digests, version_digest(digests), encoding)


def hop(base: int, *nbytes: int) -> Hop:
    return Hop(base, manifest_of(base).digest, nbytes)


class Sim:
    """The machine, a clock, and members on hosts of their own with what they hold."""

    def __init__(self, transport: Any = "stream", **settings: Any) -> None:
        config = WeightSyncConfig(transport=transport, **{"timeout_s": 30.0, "member_timeout_s": 20.0, **settings})
        self.rounds = Rounds(config, generation=100)
        self.now = 100.0
        self.held: dict[str, int] = {}
        self.hosts: dict[str, str] = {}
        self.encodings: tuple[str, ...] = ("full", "delta", "adapter")
        self.base: Manifest | None = None  # what an adapter is published with
        self.bases: dict[str, str] = {}  # what members say that they hold under it
        self.offers = {"local": "/dev/shm/x", "collective": "h:1", "stream": "tcp://h:2", "disk": "/d"}

    def publish(self, version: int, *hops: Hop, encoding: str = "full") -> None:
        self.rounds.hello("learner", Publisher("h", "f"))
        manifest, offered = manifest_of(version, encoding=encoding), None
        if self.base is not None:
            manifest = msgspec.structs.replace(manifest, base=self.base.digest)
            offered = BaseOffer(self.base, {**self.offers, "local": "/dev/shm/base"}, PLAN.tensors)
        message = Publish("learner", 1, manifest, self.offers, PLAN.tensors, hops, offered)
        self.rounds.publish(message, now=self.now)

    def poll(self, name: str, *, transports: Sequence[str] = ALL, **more: Any) -> Instruction | None:
        version = self.held.get(name, -1)
        digest = manifest_of(version).digest if version >= 0 else ""
        message = MemberPoll(
            name,
            1,
            self.hosts.get(name, name),
            "f",
            more.get("state", "serving" if version >= 0 else "joining"),
            version,
            more.get("digest", digest),
            more.get("round", 0),
            2.0,
            tuple(transports),
            PLAN.digest,
            more.get("error", ""),
            self.encodings,
            f"at-{name}" if version >= 0 else "",
            more.get("order", 0),
            self.bases.get(name, ""),
        )
        return self.rounds.poll(message, now=self.now)

    def ask(self, done: str = "") -> RoundReply:
        number = self.rounds.state.current.number if self.rounds.state.current is not None else 0
        reply = self.rounds.ask(RoundRequest(1, number, 1.0, "", done), now=self.now)
        assert reply is not None
        return reply

    def arrive(self, name: str, job: Instruction) -> Instruction | None:
        """The transfer is whole; commit; acknowledge."""
        assert job.manifest is not None
        takes = DIRECT if job.transport == "direct" else ALL
        answer = self.poll(name, transports=takes, state="prepared", round=job.round, digest=job.manifest.digest)
        assert answer is not None and answer.action == "commit"
        self.held[name] = job.manifest.version
        return self.poll(name, transports=takes)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.rounds.tick(now=self.now)

    def way(self, name: str) -> Route:
        return self.rounds.router.choose(self.rounds.state.members[name], self.rounds.queries.scene(self.now))

    def told(self, name: str) -> dict[str, Any]:
        member: dict[str, Any] = reports.status(self.rounds, now=self.now)["members"][name]
        return member


def job(answer: Instruction | None) -> Instruction:
    assert answer is not None and answer.action == "receive"
    return answer


def test_members_relay_what_they_serve_and_sources_are_not_crowded() -> None:
    """Fan-out 1: the publisher serves one; the next two come from the publisher and from the first."""
    sim = Sim(relay_fanout=1)
    sim.publish(3)
    first = job(sim.poll("a"))
    assert (first.transport, first.address, first.source) == ("stream", "tcp://h:2", "learner")
    assert sim.poll("b") is None and sim.poll("c") is None
    assert "waits for a free source: 1 with 1 pulls" in reports.explain(
        sim.rounds, sim.rounds.state.members["b"], now=sim.now
    )
    sim.arrive("a", first)
    second, third = job(sim.poll("b")), job(sim.poll("c"))
    assert {second.source, third.source} == {"a", "learner"} and second.address == "at-a"
    assert sim.poll("d") is None, "both are busy"
    answer = sim.poll("b", state="prepared", round=second.round, digest=manifest_of(3).digest)
    assert answer is not None and answer.action == "commit"
    assert job(sim.poll("d")).source == "a", "who has it whole has freed its source"
    assert sim.told("b")["transport_why"] == "set by weightsync.transport; from a, which relays"


def test_without_relays_the_publisher_serves_all() -> None:
    sim = Sim(relay_fanout=0)
    sim.held["a"] = 3
    sim.poll("a")
    sim.publish(3)
    assert {job(sim.poll(name)).source for name in "bcde"} == {"learner"}


def test_a_relay_that_failed_a_reader_is_not_asked_by_it_again() -> None:
    sim = Sim(relay_fanout=2)
    sim.held["a"] = 3
    sim.poll("a")
    sim.publish(3)
    bad = job(sim.poll("b"))
    assert bad.source == "a"
    sim.poll("b", round=bad.round, error="bucket 0 has another digest")
    sim.tick(1)
    good = job(sim.poll("b"))
    assert good.source == "learner"
    assert job(sim.poll("c")).source == "a", "another reader may"
    sim.poll("b", round=good.round, error="connection lost")
    sim.tick(1)
    assert job(sim.poll("b")).source == "learner", "there is nobody else"
    sim.held["a"] = 4
    sim.publish(4)
    sim.poll("a")
    sim.tick(31)
    sim.poll("a")
    assert job(sim.poll("b")).source == "a", "a new version: a new chance"


def test_a_relay_that_says_nothing_is_left_out_and_a_silent_publisher_too() -> None:
    sim = Sim()
    sim.held["a"] = 3
    sim.poll("a")
    sim.publish(3)
    sim.ask()
    sim.tick(11)
    sim.ask()
    assert job(sim.poll("b")).source == "learner", "nothing was heard of the relay for half of member_timeout_s"
    sim.poll("a")
    sim.tick(21)
    sim.poll("a")
    assert job(sim.poll("c")).source == "a"
    sim.poll("c", round=2, error="x")
    silent = sim.rounds.queries.scene(sim.now)
    assert silent.publisher_silent


def test_who_moved_on_relays_no_more() -> None:
    sim = Sim()
    sim.held["a"] = 3
    sim.poll("a")
    sim.publish(3)
    sim.publish(4)
    assert job(sim.poll("b")).source == "learner"


@pytest.mark.parametrize(
    "held,hops,expected",
    [
        (2, (hop(2, 10, 10),), 1),
        (1, (hop(1, 10, 10), hop(2, 10, 10)), 2),
        (2, (hop(1, 10, 10), hop(2, 10, 10)), 1),
        (0, (hop(1, 10, 10), hop(2, 10, 10)), 0),
        (1, (hop(1, 300, 200), hop(2, 50, 50)), 0),
        (2, (), 0),
    ],
    ids=["one", "two", "the last", "too old", "not smaller", "none"],
)
def test_hops_from_what_the_member_holds(held: int, hops: tuple[Hop, ...], expected: int) -> None:
    sim = Sim()
    sim.held["a"] = held
    sim.poll("a")
    sim.publish(3, *hops)
    assert len(job(sim.poll("a")).hops) == expected
    assert sim.told("a")["encoding"] == ("delta" if expected else "full")


def test_hops_need_digest_layout_and_will() -> None:
    for change in ("digest", "encodings", "local"):
        sim = Sim("local" if change == "local" else "stream")
        sim.held["a"], sim.hosts["a"] = 2, "h"
        sim.encodings = ("full",) if change == "encodings" else ("full", "delta")
        sim.poll("a", digest="another" if change == "digest" else manifest_of(2).digest)
        sim.publish(3, hop(2, 10, 10))
        answer = job(sim.poll("a", digest="another" if change == "digest" else manifest_of(2).digest))
        assert answer.hops == (), change
    sim = Sim()
    sim.held["a"] = 2
    sim.poll("a")
    sim.publish(3, hop(2, 10, 10))
    first = job(sim.poll("a"))
    sim.poll("a", round=first.round, error="the delta is damaged")
    sim.tick(1)
    assert job(sim.poll("a")).hops == (), "hops failed it: whole weights"


def test_hops_come_from_the_publisher_whole_weights_from_a_relay() -> None:
    sim = Sim(relay_fanout=2)
    sim.held.update(a=3, b=2, c=1)
    for name in "abc":
        sim.poll(name)
    sim.publish(3, hop(2, 10, 10))
    assert job(sim.poll("b")).source == "learner" and job(sim.poll("c")).source == "a"


@pytest.mark.parametrize("hops", [(hop(2, 10),), (hop(3, 1, 1),), (hop(2, 1, 1), hop(1, 1, 1)), (hop(2, -1, 1),)])
def test_hops_that_lead_nowhere_are_refused(hops: tuple[Hop, ...]) -> None:
    sim = Sim()
    with pytest.raises(AsyncRLError, match="hop"):
        sim.publish(3, *hops)


def test_a_group_of_members_that_lack_the_version_together() -> None:
    sim = Sim("auto")
    sim.hosts["near"] = "h"
    for name in ("a", "b", "near"):
        sim.poll(name)
    sim.publish(3)
    assert job(sim.poll("near")).transport == "local"
    assert sim.poll("a") is None and sim.way("a").transport == "collective"
    assert "2 members lack the version together" in sim.told("a")["transport_why"]
    reply = sim.ask()
    assert set(reply.ranks) == {"a", "b"}
    late = job(sim.poll("late"))
    assert late.transport == "stream", "who joins while others receive is no reason for a new group"
    failed = job(sim.poll("a"))
    sim.poll("a", round=failed.round, error="connection closed")
    sim.tick(1)
    assert job(sim.poll("a")).transport == "stream", "who failed goes alone"


def test_one_alone_pulls_and_nobody_waits_for_a_group_that_does_not_come() -> None:
    sim = Sim("auto")
    sim.poll("a")
    sim.publish(3)
    assert job(sim.poll("a")).transport == "stream"
    sim = Sim("auto")
    sim.poll("a"), sim.poll("b")
    sim.publish(3)
    assert sim.poll("a") is None
    sim.tick(FORM_S)
    assert job(sim.poll("a")).transport == "stream"


def direct() -> Sim:
    """A service whose publisher sends `direct` and has staged nothing."""
    sim = Sim("direct", relay_fanout=0)
    sim.offers = {"direct": "gloo://h:1", "local": "", "stream": ""}
    sim.hosts.update(dict.fromkeys("abc", "h"))
    return sim


def test_direct_forms_one_group_of_all_that_are_free() -> None:
    sim = direct()
    for name in "abc":
        sim.poll(name, transports=DIRECT)
    sim.publish(3)
    assert sim.poll("a", transports=DIRECT) is None, "until the publisher leads the group"
    reply = sim.ask()
    assert set(reply.ranks) == set("abc") and reply.digest == manifest_of(3).digest
    for name in "abc":
        first = job(sim.poll(name, transports=DIRECT))
        assert (first.transport, first.address, first.world_size) == ("direct", "gloo://h:1", 4)
        sim.arrive(name, first)
    assert sim.rounds.state.committed == 3 and sim.ask(done="sent").rendezvous == ""


def test_direct_waits_for_members_that_commit_an_older_version_but_not_for_long() -> None:
    for seconds, ranks in ((1, {"a", "b"}), (FORM_S, set())):
        sim = direct()
        sim.poll("a", transports=DIRECT), sim.poll("b", transports=DIRECT)
        sim.publish(3)
        sim.ask()
        old = {name: job(sim.poll(name, transports=DIRECT)) for name in "ab"}
        sim.arrive("a", old["a"])
        sim.publish(4)
        assert sim.ask().rendezvous == FORMING and not sim.ask().ranks, "b has not committed version 3"
        sim.tick(seconds)
        if seconds < FORM_S:
            sim.arrive("b", old["b"])
        found = sim.ask()
        assert set(found.ranks) == ranks and (found.rendezvous == FORMING) is False


def test_who_missed_a_direct_version_gets_it_staged() -> None:
    """It failed, joined late, or cannot reach the group: the publisher is asked to stage, then `local` or `stream`."""
    sim = direct()
    sim.hosts["far"] = "elsewhere"
    for name in "ab":
        sim.poll(name, transports=DIRECT)
    sim.publish(3)
    sim.ask()
    first = {name: job(sim.poll(name, transports=DIRECT)) for name in "ab"}
    sim.arrive("a", first["a"])
    sim.poll("b", transports=DIRECT, round=first["b"].round, error="connection closed")
    sim.tick(1)
    for name in ("b", "far"):
        assert sim.poll(name, transports=DIRECT) is None, "nothing is staged"
    assert sim.ask(done="failed: connection closed").rendezvous == WANTED
    sim.offers = {"direct": "gloo://h:1", "local": "/dev/shm/x", "stream": "tcp://h:2"}
    sim.publish(3)
    assert job(sim.poll("b", transports=DIRECT)).transport == "local"
    assert job(sim.poll("far", transports=DIRECT)).transport == "stream"
    sim.publish(4)
    assert sim.ask().rendezvous in (FORMING, ""), "the next version goes to a group again"


def test_an_engine_without_direct_never_joins_its_group() -> None:
    sim = direct()
    sim.poll("a", transports=DIRECT), sim.poll("b", transports=("local", "stream"))
    sim.publish(3)
    assert set(sim.ask().ranks) == {"a"}
    assert sim.poll("b", transports=("local", "stream")) is None and sim.way("b").transport == "stream"


def test_group_gets_hops_only_where_all_need_the_same() -> None:
    for second, expected in ((2, 1), (1, 0)):
        sim = Sim("collective")
        sim.held.update(a=2, b=second)
        sim.poll("a"), sim.poll("b")
        sim.publish(3, hop(1, 10, 10), hop(2, 10, 10))
        reply = sim.ask()
        assert len(reply.ranks) == 2 and len(reply.hops) == expected
        assert job(sim.poll("a")).hops == reply.hops == job(sim.poll("b")).hops


def test_what_is_not_open_is_asked_for() -> None:
    sim = Sim("auto")
    sim.offers.update(stream="", collective="")
    sim.publish(3)
    assert sim.poll("a", transports=("stream",)) is None
    assert sim.ask().rendezvous == WANTED
    sim.offers.update(stream="tcp://h:2", collective="h:1")
    sim.publish(3)
    assert job(sim.poll("a", transports=("stream",))).address == "tcp://h:2"
    assert sim.ask().rendezvous == ""


def test_what_cannot_be_reached_is_tried_again_after_a_while() -> None:
    sim = Sim("auto")
    sim.hosts["a"] = "h"
    sim.poll("a")
    sim.publish(3)
    answer = job(sim.poll("a"))
    sim.poll("a", round=answer.round, error=UNUSABLE + "not visible")
    assert sim.way("a").transport == "stream"
    sim.tick(UNUSABLE_S)
    assert sim.way("a").transport == "local"


def test_disk_where_it_is_set_alone() -> None:
    for mode, transport in (("disk", "disk"), ("auto", "")):
        sim = Sim(mode)
        sim.publish(3)
        sim.poll("a", transports=("disk",))
        assert sim.way("a").transport == transport and sim.way("a").why


def test_encodings_that_a_member_cannot_take() -> None:
    sim = Sim()
    sim.encodings = ("full",)
    sim.publish(3, encoding="adapter")
    assert sim.poll("a") is None
    assert sim.told("a")["why"] == "it cannot take adapter weights"


def test_a_round_takes_members_for_its_time_and_ends_within_twice() -> None:
    """A member joins every second and none answers: no round is open for more than 2 * timeout_s."""
    sim = Sim("stream", timeout_s=5.0, relay_fanout=0)
    sim.publish(3)
    for second in range(40):
        assert job(sim.poll(f"m{second}")).round >= 1
        sim.tick(1)
        for round_ in sim.rounds.state.rounds.values():
            assert sim.now < round_.started + 10
    ended = sim.rounds.state.finished
    assert len(ended) >= 6 and all(at - round_.started <= 10 for round_, at in ended)
    assert all(len(round_.parts) <= 5 for round_, _ in ended)


def test_a_late_word_is_not_the_last() -> None:
    sim = Sim()
    sim.publish(3)
    sim.held["a"] = 3
    sim.poll("a", order=5)
    assert sim.told("a")["state"] == "serving"
    sim.held["a"] = -1
    sim.poll("a", order=6)
    sim.held["a"] = 3
    assert sim.poll("a", order=5) is None
    assert sim.told("a")["state"] != "serving"
    sim.tick(31)
    sim.tick(1)
    assert sim.told("a")["state"] == "dead"
    sim.poll("a", order=1)
    assert sim.told("a")["state"] == "serving", "a host that was started again counts from the beginning"


def test_the_same_question_again_gets_the_same_answer() -> None:
    sim = Sim()
    sim.publish(3)
    first = sim.poll("a", order=7)
    assert sim.poll("a", order=7) == first
    assert sim.poll("a", order=8, round=job(first).round) is None, "it says that it is at it"


def test_status_tells_transport_encoding_source_and_why() -> None:
    sim = Sim("auto")
    sim.hosts["near"] = "h"
    sim.publish(3)
    near = job(sim.poll("near"))
    sim.poll("far")
    text = render({"weightsync": reports.status(sim.rounds, now=sim.now)})
    assert "near syncing version -1 (30 s left), local full from learner: same host as the publisher (h)" in text
    assert "far syncing version -1 (30 s left), stream full from learner: on far, publisher on h; from the" in text
    sim.arrive("near", near)
    assert "near serving version 3, local full from learner" in render(
        {"weightsync": reports.status(sim.rounds, now=sim.now)}
    )


def test_the_log_says_what_was_carried() -> None:
    sim = Sim(relay_fanout=1)
    sim.held["a"] = 2
    sim.poll("a")
    sim.publish(3, hop(2, 30, 10))
    sim.arrive("a", job(sim.poll("a")))
    b = job(sim.poll("b"))
    sim.arrive("b", b)
    c = job(sim.poll("c"))
    sim.poll("c", round=c.round, error="boom")
    numbers: list[dict[str, float]] = []
    words: list[dict[str, Any]] = []
    for round_, ended in sim.rounds.state.finished:
        one, more = reports.round_line(round_, ended=ended)
        numbers.append(one)
        words.append(more)
    assert [one["carried_bytes"] for one in numbers] == [40, 600, 0]
    assert [one["round_bytes"] for one in numbers] == [600] * 3
    assert words[0]["ways"]["a"] | {"why": ""} == {
        "transport": "stream",
        "encoding": "delta",
        "source": "learner",
        "bytes": 40,
        "why": "",
    }
    assert words[1]["ways"]["b"]["source"] in ("a", "learner") and words[1]["encoding"] == "full"
    assert words[2]["members"]["c"] == "boom" and words[2]["ways"]["c"]["bytes"] == 0


def test_the_publisher_is_told_whether_hops_are_of_use() -> None:
    sim = Sim(transport="auto")
    sim.publish(1)
    assert not sim.ask().hops_wanted, "nobody is there"
    sim.hosts["near"] = "h"
    sim.arrive("near", job(sim.poll("near")))
    assert not sim.ask().hops_wanted, "who maps the slot takes no hops"
    sim.arrive("far", job(sim.poll("far", transports=("stream",))))
    assert sim.ask().hops_wanted
    sim.tick(15)
    sim.poll("near")
    sim.tick(10)
    assert sim.rounds.state.members["far"].dead and not sim.ask().hops_wanted, "it is gone"
    sim.encodings = ("full",)
    sim.poll("far", transports=("stream",))
    assert not sim.ask().hops_wanted, "it cannot take them"
    sim.encodings = ("full", "delta")
    sim.poll("far", transports=("stream",))
    assert sim.ask().hops_wanted, "it comes again"
    assert reply_digest(sim.ask()) != reply_digest(msgspec.structs.replace(sim.ask(), hops_wanted=False)), (
        "a change is told at once"
    )


def test_who_cannot_map_the_slot_wants_hops() -> None:
    sim = Sim(transport="auto")
    sim.hosts["near"] = "h"
    sim.publish(1)
    first = job(sim.poll("near"))
    assert first.transport == "local" and not sim.ask().hops_wanted
    sim.poll("near", round=first.round, error=f"{UNUSABLE}local: not here")
    assert sim.ask().hops_wanted


def test_who_lacks_the_base_of_an_adapter_gets_it_first_in_a_round_of_its_own() -> None:
    sim = Sim(transport="auto")
    sim.hosts["near"] = "h"
    sim.base = manifest_of(0)
    sim.bases["has"] = sim.base.digest
    sim.publish(4, encoding="adapter")
    assert job(sim.poll("has")).manifest == msgspec.structs.replace(
        manifest_of(4, encoding="adapter"), base=sim.base.digest
    )
    first = job(sim.poll("near"))
    assert (first.manifest, first.transport, first.address) == (sim.base, "local", "/dev/shm/base")
    far = job(sim.poll("far"))
    assert (far.manifest, far.transport, far.source) == (sim.base, "stream", "learner")
    assert len({first.round, far.round}) == 2
    assert sim.told("far")["transport_why"].startswith("the base of the adapter first; on far")
    assert sim.told("far")["encoding"] == "full"
    sim.publish(5, encoding="adapter")
    sim.bases["far"] = sim.base.digest
    second = job(sim.arrive("far", far))
    assert second.manifest is not None and second.manifest.version == 5, "the base is needed whatever version is newest"
    ended = [(round_.target.manifest.version, round_.state) for round_, _ in sim.rounds.state.finished]
    assert (0, "committed") in ended and sim.rounds.state.committed == -1, "the base alone is no version that is held"
    answer = sim.poll("far", state="prepared", round=second.round, digest=second.manifest.digest)
    assert answer is not None and answer.action == "commit"
    sim.held["far"] = 5
    sim.poll("far", digest=second.manifest.digest)
    assert sim.told("far")["state"] == "serving" and sim.rounds.state.committed == 5


def test_a_base_that_fails_is_tried_again_and_by_nobody_that_relays() -> None:
    sim = Sim(relay_fanout=2)
    sim.base = manifest_of(0)
    sim.publish(4, encoding="adapter")
    sim.bases["has"] = sim.base.digest
    sim.held["has"] = 0  # it serves the base itself to others, as it is
    sim.poll("has", round=7)
    first = job(sim.poll("a"))
    assert first.source == "learner"
    sim.poll("a", round=first.round, error="wrong bytes")
    sim.tick(0.3)
    again = job(sim.poll("a"))
    assert (again.manifest, again.source) == (sim.base, "learner") and again.round > first.round


def test_a_base_is_whole_and_that_of_the_adapter_or_refused() -> None:
    sim = Sim()
    sim.base = manifest_of(0, encoding="adapter")
    with pytest.raises(AsyncRLError, match="is not the base"):
        sim.publish(4, encoding="adapter")
    sim.base = None
    sim.publish(4, encoding="adapter")
    sim.poll("a")
    assert "the base is not offered" not in sim.told("a")["why"], "an adapter that names no base is for all"


def test_the_layout_of_a_base_is_told_once() -> None:
    sim = Sim()
    sim.base = manifest_of(0)
    sim.rounds.hello("learner", Publisher("h", "f"))

    def told(version: int, tensors: tuple[Tensor, ...]) -> bool:
        assert sim.base is not None
        manifest = msgspec.structs.replace(manifest_of(version, encoding="adapter"), base=sim.base.digest)
        offer = BaseOffer(sim.base, sim.offers, tensors)
        message = Publish("learner", 1, manifest, sim.offers, PLAN.tensors, (), offer)
        return not sim.rounds.publish(message, now=sim.now).needs_tensors

    assert not told(1, ()) and told(1, PLAN.tensors) and told(2, ())
