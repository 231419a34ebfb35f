"""Every transition of the weight-sync state machine, with a clock of its own."""

import random
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bare_config import BARE

from asyncrl.config import WeightSyncConfig, parse
from asyncrl.errors import AsyncRLError, Fenced, HandshakeError
from asyncrl.metrics import open_lines
from asyncrl.monitor.status import render
from asyncrl.wire import Instruction, Manifest, MemberPoll, Publish, Published, RoundReply, RoundRequest
from weightsync import main
from weightsync.coordinator import status as reports
from weightsync.coordinator.membership import ERROR_CHARS, MOST_WAYS
from weightsync.coordinator.queries import WANTED, reply_digest
from weightsync.coordinator.records import Publisher, Round
from weightsync.coordinator.rounds import Rounds
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import version_digest
from weightsync.transports.base import UNUSABLE

PLAN = plan_buckets([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (2,))], bucket_bytes=16)


def manifest_of(version: int, salt: str = "") -> Manifest:
    digests = tuple(f"{version}-{number}{salt}" for number in range(len(PLAN.bucket_bytes)))
    return Manifest(version, PLAN.digest, PLAN.bucket_bytes, digests, version_digest(digests))


class Sim:
    """The machine, a clock, and members that answer as a receiver would."""

    def __init__(self, transport: Any = "local", *, host: str = "h", collective: str = "h:1") -> None:
        config = WeightSyncConfig(transport=transport, timeout_s=30.0, member_timeout_s=20.0)
        self.rounds = Rounds(config, generation=100)
        self.now = 0.0
        self.host = host
        self.collective = collective
        self.held: dict[str, tuple[int, str]] = {}  # what a member's model holds
        self.pids: dict[str, int] = {}
        self.finished: list[Round] = []

    def hello(self, name: str = "learner", fingerprint: str = "f") -> None:
        self.rounds.hello(name, Publisher(self.host, fingerprint))

    def publish(self, version: int, *, epoch: int = 1, salt: str = "", name: str = "learner") -> Published:
        self.hello(name)
        offers = {"local": f"/dev/shm/v{version}", "collective": self.collective}
        message = Publish(name, epoch, manifest_of(version, salt), offers, PLAN.tensors)
        return self.rounds.publish(message, now=self.now)

    def poll(self, name: str, **fields: Any) -> Instruction | None:
        version, digest = self.held.get(name, (-1, ""))
        message = MemberPoll(
            name,
            self.pids.get(name, 1),
            fields.pop("host", "h"),
            fields.pop("fingerprint", "f"),
            fields.pop("state", "joining" if version < 0 else "serving"),
            version,
            fields.pop("digest", digest),
            fields.pop("round", 0),
            2.0,
            fields.pop("transports", ("local", "collective")),
            fields.pop("has_plan", ""),
            fields.pop("error", ""),
        )
        assert not fields
        return self.rounds.poll(message, now=self.now)

    def received(self, name: str, instruction: Instruction, *, digest: str = "") -> Instruction | None:
        assert instruction.manifest is not None
        return self.poll(name, state="prepared", round=instruction.round, digest=digest or instruction.manifest.digest)

    def acknowledge(self, name: str, manifest: Manifest, *, digest: str = "") -> Instruction | None:
        self.held[name] = (manifest.version, digest or manifest.digest)
        return self.poll(name)

    def take(self, name: str, instruction: Instruction) -> Instruction | None:
        """Receive, commit, acknowledge."""
        answer = self.received(name, instruction)
        assert answer is not None and answer.action == "commit"
        return self.acknowledge(name, instruction.manifest)

    def ask(self, round_: int = 0, *, epoch: int = 1, seen: str = "", done: str = "") -> RoundReply | None:
        return self.rounds.ask(RoundRequest(epoch, round_, 1.0, seen, done), now=self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.rounds.tick(now=self.now)

    def state(self, name: str) -> str:
        return str(self.rounds.queries.state_for(self.rounds.state.members[name]))

    def ended(self) -> list[tuple[int, str]]:
        self.finished += [round_ for round_, _ in self.rounds.state.finished]
        self.rounds.state.finished.clear()
        return [(round_.number, round_.state) for round_ in self.finished]


def receive(instruction: Instruction | None) -> Instruction:
    assert instruction is not None and instruction.action == "receive"
    return instruction


def test_the_example_of_the_docstring() -> None:
    sim = Sim()
    assert sim.poll("a") is None and sim.poll("b") is None
    assert sim.state("a") == "joining"
    assert sim.publish(1).round == 1
    a = receive(sim.rounds.instruct("a", now=0.0))
    b = receive(sim.rounds.instruct("b", now=0.0))
    assert a.transport == "local" and a.address == "/dev/shm/v1" and a.tensors == PLAN.tensors and a.deadline_s == 30
    assert sim.state("a") == sim.state("b") == "syncing"
    sim.tick(1)
    assert sim.take("a", a) is None
    assert sim.state("a") == "serving" and sim.ended() == [] and sim.rounds.state.committed == 1
    sim.tick(28.9)
    assert sim.state("b") == "syncing", "its round's deadline governs a member that receives"
    sim.tick(0.1)
    assert sim.ended() == [(1, "committed")]
    parts = sim.finished[0].parts
    assert parts["a"].result == manifest_of(1).digest and parts["b"].result == "no answer within 30 s"
    sim.poll("a")
    sim.tick(0.1)
    assert sim.state("b") == "dead" and sim.state("a") == "serving"
    sim.tick(10)
    again = receive(sim.poll("b"))
    assert again.round == 2 and sim.state("b") == "syncing" and b.round == 1
    assert sim.take("b", again) is None and sim.state("b") == "serving"
    assert sim.ended() == [(1, "committed"), (2, "committed")] and set(sim.finished[1].parts) == {"b"}


def test_a_dead_member_is_forgotten_after_an_hour() -> None:
    """Preempted generators come back under new names."""
    sim = Sim()
    sim.publish(1)
    for name in ("a", "b"):
        sim.take(name, receive(sim.poll(name)))
    for _ in range(3599):
        sim.tick(1)
        sim.poll("a")
    assert sim.state("b") == "dead"
    sim.tick(2)
    assert set(sim.rounds.state.members) == {"a"}
    assert sim.poll("b") is None and sim.state("b") == "serving"  # what it holds is still the target


def test_nobody_there_the_round_waits_for_the_first() -> None:
    sim = Sim()
    sim.publish(0)
    sim.tick(500)
    assert sim.ended() == [] and sim.rounds.state.committed == -1
    assert receive(sim.poll("a")).round == 1


def test_wrong_digest_received_is_aborted_and_tried_again_after_a_pause() -> None:
    sim = Sim()
    sim.publish(0)
    answer = sim.received("a", receive(sim.poll("a")), digest="wrong")
    assert answer is not None and answer.action == "abort"
    assert sim.ended() == [(1, "failed")] and sim.state("a") == "stale"
    assert sim.poll("a") is None, "a pause before the next try"
    sim.tick(0.2)
    again = receive(sim.rounds.instruct("a", now=sim.now))
    assert again.round == 2
    sim.take("a", again)
    assert sim.state("a") == "serving" and sim.rounds.state.members["a"].error == ""


def test_wrong_digest_after_commit_is_never_serving() -> None:
    sim = Sim()
    sim.publish(0)
    instruction = receive(sim.poll("a"))
    assert sim.received("a", instruction).action == "commit"  # type: ignore[union-attr]
    sim.acknowledge("a", instruction.manifest, digest="something else")  # type: ignore[arg-type]
    assert sim.state("a") != "serving" and sim.rounds.state.committed == -1
    assert sim.ended() == [(1, "failed")] and "holds digest something" in sim.finished[0].parts["a"].result


def test_errors_pause_longer_each_time_and_are_named() -> None:
    sim = Sim()
    sim.publish(0)
    instruction = receive(sim.poll("a"))
    pauses = []
    for _ in range(7):
        assert sim.poll("a", round=instruction.round, error="disk on fire") is None
        assert reports.explain(sim.rounds, sim.rounds.state.members["a"], now=sim.now) == "disk on fire"
        pauses.append(round(sim.rounds.state.members["a"].retry_at - sim.now, 3))
        sim.now = sim.rounds.state.members["a"].retry_at
        instruction = receive(sim.poll("a"))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [state for _, state in sim.ended()] == ["failed"] * 7


def test_repeated_requests_change_nothing() -> None:
    """Every request may arrive twice (an answer was lost): same answer, same state."""
    sim = Sim()
    assert sim.publish(0) == sim.publish(0) == Published(1)
    first, second = receive(sim.poll("a")), receive(sim.poll("a"))
    assert first == second
    assert sim.received("a", first) == sim.received("a", first)
    assert sim.poll("a") is None, "an old poll while the commit is under way does not start the transfer again"
    sim.acknowledge("a", first.manifest)  # type: ignore[arg-type]
    sim.acknowledge("a", first.manifest)  # type: ignore[arg-type]
    assert sim.ended() == [(1, "committed")]


def test_newer_version_supersedes_but_a_whole_older_one_may_commit() -> None:
    sim = Sim()
    sim.publish(0)
    old = receive(sim.poll("a"))
    assert sim.publish(1).round == 2
    assert sim.received("a", old).action == "commit", "progress for a slow member"  # type: ignore[union-attr]
    new = receive(sim.acknowledge("a", old.manifest))  # type: ignore[arg-type]
    assert new.manifest == manifest_of(1) and sim.rounds.state.committed == 0
    sim.take("a", new)
    assert sim.ended() == [(1, "superseded"), (2, "committed")] and sim.rounds.state.committed == 1


def test_superseded_round_without_members_ends_at_once() -> None:
    sim = Sim()
    sim.publish(0)
    sim.publish(1)
    assert sim.ended() == [(1, "superseded")]


def test_version_of_an_older_learner_is_not_committed() -> None:
    sim = Sim()
    sim.publish(5)
    old = receive(sim.poll("a"))
    sim.publish(3, epoch=2)
    assert sim.received("a", old).action == "abort"  # type: ignore[union-attr]
    sim.tick(1)
    new = receive(sim.poll("a"))
    assert new.manifest == manifest_of(3)
    sim.take("a", new)
    assert sim.state("a") == "serving" and sim.rounds.state.committed == 3


def test_fencing() -> None:
    sim = Sim()
    sim.publish(0, epoch=2)
    with pytest.raises(Fenced):
        sim.publish(9, epoch=1)
    with pytest.raises(Fenced):
        sim.ask(1, epoch=1)
    with pytest.raises(AsyncRLError, match="version 0 published after 4"):
        sim.publish(4, epoch=2)
        sim.publish(0, epoch=2)
    assert sim.ask(1, epoch=3) == RoundReply(0, "unknown")


def test_other_model_is_refused_and_never_instructed() -> None:
    sim = Sim()
    assert sim.poll("a", fingerprint="other") is None, "nothing to compare with yet"
    sim.publish(0)
    assert sim.rounds.instruct("a", now=0.0) is None
    with pytest.raises(HandshakeError, match="other"):
        sim.poll("a", fingerprint="other")
    assert sim.ask(1).ranks == {}  # type: ignore[union-attr]
    assert receive(sim.poll("b", fingerprint="")), "an empty fingerprint is not checked"


def test_forgetful_service_asks_for_everything_again() -> None:
    """After a restart: the publisher is unknown, members tell what they hold, and nobody transfers anything."""
    sim = Sim()
    assert sim.ask(7) == RoundReply(0, "unknown")
    message = Publish("learner", 1, manifest_of(3), {"local": "p"})
    assert sim.rounds.publish(message, now=0.0) == Published(0, needs_tensors=True)
    sim.hello()
    assert sim.rounds.publish(message, now=0.0) == Published(0, needs_tensors=True), "the layout is missing"
    sim.held["a"] = (3, manifest_of(3).digest)
    assert sim.poll("a") is None and sim.state("a") == "stale", "its word alone is not a proof"
    abort = sim.poll("c", state="prepared", round=12, digest=manifest_of(3).digest)
    assert abort is not None and abort.action == "abort"
    sim.publish(3)
    assert sim.state("a") == "serving" and sim.rounds.state.committed == 3 and sim.ended() == [(1, "committed")]
    sim.held["b"] = (3, "another digest")
    receive(sim.poll("b"))


def test_late_teller_closes_the_round_of_a_restarted_service() -> None:
    sim = Sim()
    sim.publish(3)
    sim.held["a"] = (3, manifest_of(3).digest)
    assert sim.poll("a") is None
    assert sim.ended() == [(1, "committed")] and sim.rounds.state.committed == 3


def test_restarted_member_starts_afresh() -> None:
    sim = Sim()
    sim.publish(0)
    receive(sim.poll("a"))
    sim.pids["a"] = 2
    again = receive(sim.poll("a"))
    assert again.round == 2 and sim.ended() == [(1, "failed")] and sim.finished[0].parts["a"].result == "restarted"


def test_layout_is_sent_once() -> None:
    sim = Sim()
    sim.publish(0)
    assert receive(sim.poll("a", has_plan=PLAN.digest)).tensors == ()
    bad = Publish("learner", 1, manifest_of(1), {}, PLAN.tensors[:1])
    with pytest.raises(AsyncRLError, match="plan digest"):
        sim.rounds.publish(bad, now=0.0)


@pytest.mark.parametrize(
    "mode,host,transports,expected",
    [
        ("auto", "h", ("local", "collective"), "local"),
        ("auto", "other", ("local", "collective"), "collective"),
        ("auto", "h", ("collective",), "collective"),
        ("local", "other", ("local", "collective"), ""),
        ("collective", "h", ("local", "collective"), "collective"),
        ("collective", "h", ("local",), ""),
    ],
)
def test_choice_of_transport(mode: str, host: str, transports: tuple[str, ...], expected: str) -> None:
    sim = Sim(mode)
    sim.publish(0)
    sim.poll("a", host=host, transports=transports)
    name, why, *_ = astuple(sim.rounds.router.choose(sim.rounds.state.members["a"], sim.rounds.queries.scene(sim.now)))
    assert name == expected and why
    status = reports.status(sim.rounds, now=sim.now)["members"]["a"]
    assert status["transport"] == expected and status["transport_why"] == why


def test_what_a_member_cannot_reach_is_not_offered_to_it_again() -> None:
    sim = Sim("auto")
    sim.publish(0)
    part = receive(sim.poll("a"))
    assert sim.poll("a", round=part.round, error=UNUSABLE + "not visible") is None
    sim.tick(1)
    assert (
        sim.rounds.router.choose(sim.rounds.state.members["a"], sim.rounds.queries.scene(sim.now)).transport
        == "collective"
    )
    sim.publish(1)
    assert receive(sim.poll("a")).transport == "local", "another file, maybe of another process: worth a try"


def test_collective_forms_when_the_publisher_asks() -> None:
    sim = Sim("collective")
    assert sim.poll("a") is None and sim.poll("b") is None
    sim.publish(0)
    assert sim.rounds.instruct("a", now=0.0) is None, "without the publisher nobody waits in a rendezvous"
    reply = sim.ask(1)
    assert reply is not None and reply.ranks == {"a": 1, "b": 2} and reply.generation == 101
    assert reply.rendezvous == "h:1" and sim.ask(1, seen=reply_digest(reply)) is None
    assert sim.ask(1) == reply, "a lost answer is given again"
    a, b = (receive(sim.rounds.instruct(name, now=0.0)) for name in "ab")
    assert (a.rank, b.rank, a.world_size, a.generation, a.address) == (1, 2, 3, 101, "h:1")
    done = sim.ask(reply.round, done="sent", seen=reply_digest(reply))
    assert done is not None and done.ranks == {}
    sim.take("a", a)
    sim.take("b", b)
    assert sim.ended() == [(1, "committed")]


def test_collective_failure_gets_a_new_generation_without_the_silent_one() -> None:
    sim = Sim("collective")
    for name in "abc":
        sim.poll(name)
    sim.publish(0)
    first = sim.ask(1)
    assert first is not None and len(first.ranks) == 3
    for name in "abc":
        receive(sim.rounds.instruct(name, now=0.0))
    sim.tick(1)
    sim.poll("a", round=1, error="connection closed")
    reply = sim.ask(1, done="failed: connection closed")
    assert reply is not None and reply.ranks == {} and "connection closed" in reply.detail
    sim.tick(0.2)
    second = sim.ask(1)
    assert second is not None and second.ranks == {"a": 1} and second.generation == 102 and second.round == 2
    sim.take("a", receive(sim.poll("a")))
    sim.ask(2, done="sent")
    sim.poll("b", round=1, error="timed out")
    sim.tick(0.2)
    third = sim.ask(2)
    assert third is not None and third.ranks == {"b": 1} and third.generation == 103
    sim.take("b", receive(sim.poll("b")))
    sim.tick(30)
    assert sim.ended() == [(2, "committed"), (3, "committed"), (1, "failed")] and sim.state("c") in ("dead", "stale")


def test_collective_is_opened_when_it_is_wanted() -> None:
    sim = Sim("auto", collective="")
    sim.publish(0)
    receive(sim.poll("near"))
    assert sim.ask(1).rendezvous == ""  # type: ignore[union-attr]
    sim.poll("far", host="other")
    reply = sim.ask(1)
    assert reply is not None and reply.rendezvous == WANTED and reply.ranks == {}
    sim.collective = "h:2"
    assert sim.publish(0).round == 1, "the same version with a new address is not a new round"
    formed = sim.ask(1)
    assert formed is not None and formed.ranks == {"far": 1} and formed.rendezvous == "h:2" and formed.round == 2


@pytest.mark.parametrize("seed", range(30))
def test_random_runs_keep_the_promises(seed: int) -> None:
    """Any order of publishes, polls, faults and time: SERVING is proved, numbers grow, and all end up served."""
    dice = random.Random(seed)
    sim = Sim("local")
    doing: dict[str, Instruction] = {}
    version = 0
    for _ in range(300):
        name = dice.choice("abc")
        what = dice.random()
        if what < 0.05:
            sim.publish(version)
            version += 1
        elif what < 0.10:
            sim.tick(dice.choice([0.1, 5, 40]))
        elif what < 0.14:
            doing.pop(name, None)
            sim.held.pop(name, None)
            sim.pids[name] = sim.pids.get(name, 1) + 1
        elif name in doing and what < 0.5:
            job = doing.pop(name)
            answer = sim.received(name, job, digest=dice.choice(["", "", "", "corrupt"]))
            if answer is not None and answer.action == "commit":
                sim.acknowledge(name, job.manifest, digest=dice.choice(["", "", "", "corrupt"]))  # type: ignore[arg-type]
        else:
            answer = sim.poll(name, error=dice.choice(["", "boom"]) if name in doing else "", round=dice.randint(0, 3))
            doing.pop(name, None)
            if answer is not None and answer.action == "receive":
                doing[name] = answer
        check(sim)
    sim.publish(version)
    for name in "abc":
        sim.tick(31)
        sim.tick(6)  # the longest pause after a failure
        answer = sim.poll(name)
        while answer is not None:  # a transfer of before first, then the newest version
            answer = sim.take(name, answer)
        assert sim.state(name) == "serving"
    sim.tick(0)
    numbers = [number for number, _ in sim.ended()]
    assert len(numbers) == len(set(numbers)), "a round is logged once"
    assert sim.rounds.state.rounds == {}, "nothing is left open"


def check(sim: Sim) -> None:
    target = sim.rounds.state.target
    for name, member in sim.rounds.state.members.items():
        if sim.state(name) == "serving":
            assert target is not None
            proved = (target.manifest.version, target.manifest.digest)
            assert (member.version, member.digest) == proved
            # A process that died without a word is SERVING until its member_timeout_s or the poll of the next one.
            assert sim.pids.get(name, 1) != member.pid or sim.held[name] == proved
        if member.part is not None:
            assert not member.part.result and member.part.round.number in sim.rounds.state.rounds
    if target is not None:
        assert sim.rounds.state.committed <= target.manifest.version


def test_an_error_outside_of_a_round_is_shown_until_the_next_success() -> None:
    sim = Sim()
    sim.publish(0)
    assert sim.take("a", receive(sim.poll("a"))) is None and sim.state("a") == "serving"
    before = sim.rounds.state.members["a"]
    failures, retry_at = before.failures, before.retry_at
    sim.tick(1)
    assert sim.poll("a", error="its weights have changed") is None, "there is nothing to do"
    shown = reports.status(sim.rounds, now=sim.now)["members"]["a"]
    assert shown["said"] == "its weights have changed" and shown["state"] == "serving" and shown["why"] == ""
    assert "a serving version 0 (its weights have changed)" in render({"weightsync": reports.status(sim.rounds, now=1)})
    assert (before.failures, before.retry_at) == (failures, retry_at) and sim.ended() == [(1, "committed")]
    sim.poll("a", error="its weights have changed")
    assert sim.rounds.state.complaints == [("a", "its weights have changed")], "once, however often it is said"
    numbers, words = reports.complaint_line(sim.rounds, *sim.rounds.state.complaints[0])
    assert numbers == {"version": 0} and (words["member"], words["said"]) == ("a", "its weights have changed")
    sim.publish(1)
    sim.take("a", receive(sim.poll("a")))
    assert reports.status(sim.rounds, now=sim.now)["members"]["a"]["said"] == ""


def test_an_error_of_an_older_round_does_not_fail_the_newer_one() -> None:
    sim = Sim()
    sim.publish(0)
    old = receive(sim.poll("a"))
    sim.tick(30)
    sim.tick(0.2)
    new = receive(sim.poll("a"))
    assert new.round > old.round
    sim.poll("a", round=old.round, error="too slow")
    member = sim.rounds.state.members["a"]
    assert member.part is not None and member.part.round.number == new.round and member.complaint == "too slow"
    assert sim.take("a", new) is None and sim.state("a") == "serving" and member.complaint == ""


def test_what_a_member_says_is_cut() -> None:
    sim = Sim()
    sim.publish(0)
    old = receive(sim.poll("a"))
    sim.poll("a", round=old.round, error="x" * 1_000_000, transports=("local",) * 100)
    member = sim.rounds.state.members["a"]
    assert member.error == "x" * ERROR_CHARS and sim.rounds.state.complaints == [], "it is the result of its part"
    assert len(member.transports) == MOST_WAYS
    (round_, ended), *_ = sim.rounds.state.finished
    assert reports.round_line(round_, ended=ended)[1]["members"] == {"a": "x" * ERROR_CHARS}


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(main, "MetricsLog", lambda path, **settings: opened.update({path.name: settings}))
    monkeypatch.setattr(main, "Responder", lambda *_, **__: SimpleNamespace(address=""))
    config = parse(BARE, overrides=[f"run.dir={tmp_path}"])
    main.Service(config, address="", keys=None)
    assert opened == {"weightsync.jsonl": {"most_bytes": main.MOST_LOG_BYTES}}


def test_a_full_disk_costs_lines_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "Responder", lambda *_, **__: SimpleNamespace(address=""))
    service = main.Service(parse(BARE, overrides=[f"run.dir={tmp_path}"]), address="", keys=None)
    service._log._file = open_lines(Path("/dev/full"))
    sim = Sim()
    service._rounds = sim.rounds
    sim.publish(0)
    sim.take("a", receive(sim.poll("a")))
    sim.poll("a", error="its weights have changed")
    service._write_finished()
    assert service._log.lost == 2 and not sim.rounds.state.finished and not sim.rounds.state.complaints


def test_an_acknowledgement_with_an_error_is_one() -> None:
    """A generator that took a version and cannot pass it on has it all the same."""
    sim = Sim()
    sim.publish(0)
    instruction = receive(sim.poll("a"))
    sim.received("a", instruction)
    sim.held["a"] = (0, manifest_of(0).digest)
    sim.poll("a", round=instruction.round, error="cannot pass versions on: no port")
    assert sim.ended() == [(1, "committed")] and sim.state("a") == "serving"
    assert sim.rounds.state.members["a"].failures == 0 and sim.rounds.state.members["a"].complaint.startswith(
        "cannot pass"
    )


def test_the_limit_of_a_round_grows_with_the_weights() -> None:
    """A version of 141 GB is not given up after the time of a small one."""
    sim = Sim()
    large = plan_buckets([TensorSpec("a", "BF16", (70 << 30,)), TensorSpec("b", "BF16", (1 << 29,))], bucket_bytes=1)
    digests = ("a", "b")
    manifest = Manifest(1, large.digest, large.bucket_bytes, digests, version_digest(digests))
    sim.hello()
    sim.rounds.publish(Publish("learner", 1, manifest, {"local": "/dev/shm/v1"}, large.tensors), now=sim.now)
    assert sim.poll("a") is not None
    member = sim.rounds.state.members["a"]
    assert member.part is not None and member.part.deadline == sim.now + 30 + 141
    sim.now += 170
    sim.rounds.transfers.expire(sim.now)
    assert member.part is not None
    sim.now += 1
    sim.rounds.transfers.expire(sim.now)
    assert member.part is None and member.error == "no answer within 171 s"
