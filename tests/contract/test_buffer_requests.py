"""What is asked of the buffer service over real ZeroMQ, and how it answers: leases, settings, poison, hostile input."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from buffer_lab import (
    Make,
    Producer,
    claim,
    history,
    ids,
    learner,
    produce,
    sample,
)

from asyncrl import wire
from asyncrl.errors import AsyncRLError, HandshakeError, WireError
from asyncrl.metrics import read_lines
from asyncrl.monitor.control import ServiceClient
from asyncrl.net import async_requester
from buffers.client.producer import ProducerClient
from buffers.client.reward import RewardClient
from buffers.payloads.dead_letters import DeadLetters, read_letter


def test_lost_lease_goes_to_another_and_the_late_answer_is_refused(make: Make) -> None:
    service = make().start()

    async def work() -> None:
        slow, quick = Producer(service.address, "slow"), Producer(service.address, "quick")
        await slow.client.hello("model")
        await quick.client.hello("model")
        lease = (await slow.lease(0, 1)).leases[0]
        await slow.client.submit(
            lease, prompt_ids=np.array([1], np.int32), samples=[sample(0)], digests={0: "d0"}, row={}
        )
        again: wire.Lease | None = None
        deadline = time.monotonic() + 8
        while again is None and time.monotonic() < deadline:  # slow is silent for 2 s
            leases = await quick.lease(0, 8, wait_s=1.0)
            again = next((found for found in leases.leases if found.group == lease.group), None)
            await quick.client.heartbeat({})
        assert again is not None and again.missing == (1,) and again.attempt == 1 and again.token > lease.token
        late = await slow.client.submit(
            lease, prompt_ids=np.array([1], np.int32), samples=[sample(1)], digests={0: "d0"}, row={}
        )
        assert late.refused == {1: "token: the lease was lost"}
        assert (await quick.answer(again)).accepted == (1,)
        slow.client.close()
        quick.client.close()

    asyncio.run(work())
    assert next(line["why"] for line in history(service, "lost")) == "silent"


def test_a_fleet_is_asked_for_fewer_heartbeats(make: Make) -> None:
    """Three processes are a large fleet here: `log.heartbeat_s` is short."""
    service = make(log__heartbeat_s="0.012").start()

    async def work() -> None:
        producers = [Producer(service.address, f"p{number}") for number in range(3)]
        for number, producer in enumerate(producers, 1):
            await producer.client.hello("model")
            await producer.client.heartbeat({})
            assert producer.client.every_s == (number / 200 if number == 3 else 0.0)
            assert producer.client.interval(0.012) == (0.015 if number == 3 else 0.012)
        for producer in producers:
            producer.client.close()

    asyncio.run(work())


def test_poison_digest_and_handshake(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        nan, wrong, early = (await producer.lease(0, 3)).leases
        reply = await producer.answer(nan, logprob=float("nan"))
        assert "logprobs" in reply.refused[0]
        reply = await producer.client.submit(
            wrong, prompt_ids=np.array([1], np.int32), samples=[sample(0)], digests={0: "other weights"}, row={}
        )
        assert "digest" in reply.refused[0]
        reply = await producer.client.submit(
            early, prompt_ids=np.array([1], np.int32), samples=[sample(0, 7)], digests={}, row={}
        )
        assert "never published" in reply.refused[0]
        stranger = ProducerClient(service.address, name="x", timeout_s=60)
        with pytest.raises(HandshakeError) as mismatch:
            await stranger.hello("another model")
        assert "another model" in mismatch.value.message and "model" in mismatch.value.message
        with pytest.raises(HandshakeError):
            await stranger.hello("model", run_id="another run")
        with pytest.raises(WireError, match="catalogue"):
            await producer.client.heartbeat({"no_such_metric": 1.0})
        stranger.close()
        producer.client.close()

    asyncio.run(work())
    assert set(service.status()["dead"]) == {"poison:logprobs"}
    assert [line["why"] for line in read_lines(service.run.history) if line["e"] == "lost"] == [
        "wrong_digest",
        "unknown_version",
    ]
    letters = {path.name: read_letter(path) for path in service.run.dead.glob("*.frames")}
    assert sorted(name.partition("-")[0] for name in letters) == ["g0"]
    poison = next(wire.decode_samples(frames[0]) for name, frames in letters.items() if name.startswith("g0-"))
    kept = wire.unpack_arrays(poison.fields, next(frames[1] for name, frames in letters.items() if name[:3] == "g0-"))
    assert np.isnan(kept["logprobs"]).all()
    client.close()


def test_quarantined_groups_stay_as_dead_letters(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        for lease in (await producer.lease(0, 2)).leases:
            await producer.answer(lease)
        producer.client.close()

    asyncio.run(work())
    batch = client.claim(step=1, version=0, wait_s=10)
    bad = batch.groups[0].group
    client.quarantine(step=1, groups=[bad], reason="packer: too long")
    letter = service.run.dead.glob(f"g{bad}-t*.frames")
    assert wire.decode_samples(read_letter(next(letter))[0]).group == bad
    assert service.status()["dead"] == {"poison:packer": 1}
    client.close()


def test_dead_letters_are_bounded(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path / "dead", keep=2)
    for number in range(4):
        letters.put(group=number, token=7, header=b"head", payload=b"body%d" % number)
    assert sorted(path.name for path in (tmp_path / "dead").iterdir()) == ["g2-t7.frames", "g3-t7.frames"]
    assert read_letter(tmp_path / "dead" / "g3-t7.frames") == (b"head", b"body3")
    again = DeadLetters(tmp_path / "dead", keep=2)  # another process goes on with the same folder
    again.put(group=9, token=1, header=b"", payload=b"")
    assert sorted(path.name for path in (tmp_path / "dead").iterdir()) == ["g3-t7.frames", "g9-t1.frames"]


def test_settings_are_changed_while_it_runs_and_stay_changed(make: Make) -> None:
    service = make().start()
    client = learner(service.address)
    observer = ServiceClient(service.address, timeout_s=60)
    tuned = observer.tune({"max_staleness": 3, "learner.algorithm.tis_cap": 1.5}, author="me@here")
    assert tuned.number == 1 and msgspec.json.decode(tuned.changed)["buffer.max_staleness"] == [1, 3]
    with pytest.raises(AsyncRLError) as refused:
        observer.tune({"on_late": "perhaps"}, author="me@here")
    assert refused.value.code == "tune.refused"
    with pytest.raises(WireError):
        observer._requester.request(wire.Tune("[1]", "me@here"), timeout_s=60)
    service.kill()
    service.start()
    shown = service.status()["tuning"]
    assert (shown["number"], shown["author"], shown["settings"]["buffer.max_staleness"]) == (1, "me@here", 3)
    produce(service.address, 2)
    packet = client._requester.request(wire.Claim(client.epoch, 1, 0, 8.0), timeout_s=60)
    assert msgspec.json.decode(packet.message.tuning) == {"learner.algorithm.tis_cap": 1.5}
    assert packet.message.groups[0].bound == 3
    assert observer.tune({}, author="me@here", undo_to=0).number == 2
    assert service.status()["tuning"]["settings"]["buffer.max_staleness"] == 1
    told = [(event["n"], event["key"], event["old"], event["new"]) for event in history(service, "tune")]
    assert told == [
        (1, "buffer.max_staleness", 1, 3),
        (1, "learner.algorithm.tis_cap", 2.0, 1.5),
        (2, "buffer.max_staleness", 3, 1),
        (2, "learner.algorithm.tis_cap", 1.5, 2.0),
    ]
    observer.close()
    client.close()


def test_filters_and_over_issue_of_the_configuration(make: Make) -> None:
    service = make(buffer='filters = ["zero_variance"]', sampling__over_issue="1").start()
    client = learner(service.address)

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        same, *others = (await producer.lease(0, 3)).leases
        assert same.missing == (0, 1, 2)
        alike = [sample(index) for index in (2, 0)]
        reply = await producer.client.submit(
            same, prompt_ids=np.array([1], np.int32), samples=alike, digests={0: "d0"}, row={}, rewards={2: 1.0, 0: 1.0}
        )
        assert reply.accepted == (2, 0) and reply.cancelled == ((same.group, same.token),)
        assert await producer.client.heartbeat({}) == ((same.group, same.token),)
        for lease in others:
            reply = await producer.answer(lease)
            assert reply.accepted == (0, 1) and list(reply.refused) == [2]
        producer.client.close()

    asyncio.run(work())
    batch = claim(client, 1)
    assert ids(batch) == [1, 2] and all([s.index for s in group.samples] == [0, 1] for group in batch.groups)
    assert service.status()["dropped"] == {"zero_variance": 1}
    assert [event["why"] for event in history(service, "cancel")] == ["complete"] * 3
    client.close()


def test_who_scores_for_a_judge_that_the_run_has_not_is_told_so(make: Make) -> None:
    service = make().start()

    async def ask() -> str:
        worker = RewardClient(service.address, name="r", judge="slow", timeout_s=60)
        await worker.hello()
        with pytest.raises(AsyncRLError) as asked:
            await worker.work(max_samples=2, wait_s=0.2)
        with pytest.raises(AsyncRLError) as sent:
            await worker.submit([wire.Score(0, 0, 1, 1.0)])
        worker.close()
        assert asked.value.code == sent.value.code == "reward.judge"
        return asked.value.message

    assert asyncio.run(ask()) == "r scores for judge 'slow': this run has default"
    assert service.status()["judges"][0]["judge"] == "default"


def test_reward_budget_ends_the_learner_with_the_message(make: Make) -> None:
    service = make(reward_workers__max_failed_groups="0", reward_workers__retries="1").start()
    client = learner(service.address)
    produce(service.address, 1, rewards=False)

    async def fail() -> list[int]:
        attempts = []
        worker = RewardClient(service.address, name="r", timeout_s=60)
        await worker.hello()
        for _ in range(2):
            tasks, _ = await worker.work(max_samples=2, wait_s=2.0)
            item = next(task.item for task in tasks if task.item.index == 0)
            attempts.append(item.attempt)
            failure = wire.RewardFailure(item.group, item.index, item.token, "raised", "ZeroDivisionError in m:f")
            await worker.submit([], [failure])
        worker.close()
        return attempts

    assert asyncio.run(fail()) == [0, 1]
    with pytest.raises(AsyncRLError, match="m:f") as ended:
        client.claim(step=1, version=0, wait_s=5.0)
    assert ended.value.code == "reward.budget"
    client.close()


def test_claim_that_waits_names_who_it_waits_for(make: Make) -> None:
    service = make().start()
    client = learner(service.address)
    started = time.monotonic()
    answer = client.claim(step=1, version=0, wait_s=0.5)
    assert isinstance(answer, wire.NotYet) and "no producer is alive" in answer.diagnosis and answer.wanted == 2
    assert 0.3 < time.monotonic() - started < 30

    async def hold() -> str:
        producer = Producer(service.address, "producer-1")
        await producer.client.hello("model")
        await producer.lease(0, 2)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(None, lambda: client.claim(step=1, version=0, wait_s=0.5))
        producer.client.close()
        assert isinstance(answer, wire.NotYet)
        return answer.diagnosis

    said = asyncio.run(hold())
    who = f"producer-1 (pid {os.getpid()} on {socket.gethostname()}, last seen"
    assert said.startswith("step 1 waits") and f"2 leased to {who}" in said
    client.close()


def test_hostile_frames_do_not_disturb_the_others(make: Make) -> None:
    """Corrupt, oversized, truncated, unexpected: the service refuses, counts, and goes on."""
    service = make().start()
    context: zmq.Context[Any] = zmq.Context()
    hostile = context.socket(zmq.DEALER)
    hostile.connect(service.address)
    frames = wire.encode(wire.Samples("p", 0, 1, (), {}, (), "", 1), (b"x" * 100,), request=7)
    corrupt = [bytes(frames[0]), bytes(frames[1]), b"y" * 100]
    hostile.send_multipart(corrupt)
    assert hostile.poll(5000)
    assert wire.decode(hostile.recv_multipart()).message.code == "wire.checksum"
    generator = np.random.default_rng(0)
    for _ in range(200):
        hostile.send_multipart(
            [generator.bytes(int(n)) for n in generator.integers(0, 60, size=int(generator.integers(1, 4)))]
        )
    hostile.send_multipart(wire.encode(wire.Published(1), request=8))
    assert hostile.poll(5000)
    assert wire.decode(hostile.recv_multipart()).message.code == "wire.unexpected"
    hostile.send_multipart(wire.encode(wire.Samples("p", 0, 1, (), {}, (), "", 1), (bytes(2 << 20),), request=9))
    assert not hostile.poll(500)  # over max_message_bytes: the connection is dropped
    produce(service.address, 2)
    status = service.status()
    assert status["counters"]["bad_frames"] >= 200 and status["ledger"]["ready"] == 2
    hostile.close(0)
    context.term()


class Asker:
    """A producer that numbers its requests itself."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.send_multipart(wire.encode(wire.Hello("producer", "p", 1, "h"), request=1))
        self.answer()

    def ask(self, number: int, wait_s: float, *, groups: int = 1) -> None:
        self.socket.send_multipart(wire.encode(wire.LeaseRequest("p", 0, groups, wait_s), request=number))

    def answer(self) -> wire.Packet:
        assert self.socket.poll(60_000)
        return wire.decode(self.socket.recv_multipart())

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


def test_a_lease_request_sent_twice_is_granted_once(make: Make) -> None:
    service = make().start()
    asker = Asker(service.address)
    ask, answer = asker.ask, asker.answer
    ask(2, 0.0)
    first = answer()
    ask(2, 0.0)
    second = answer()
    assert first.message.leases == second.message.leases and len(first.message.leases) == 1
    service.kill()
    service.start()
    ask(2, 0.0)  # even over a kill of the service
    assert answer().message.leases == first.message.leases
    ask(3, 0.0)
    assert answer().message.leases[0].group == 1
    for number, group in ((4, 2), (5, 3)):  # (F) allows four at version 0: eta 1, B 2
        ask(number, 0.0)
        assert answer().message.leases[0].group == group
    ask(6, 20.0)
    ask(7, 0.0)
    replies = [answer(), answer()]
    assert [reply.request for reply in replies] == [6, 7] and replies[0].message.reason.startswith("superseded")
    assert "the learner must take a batch" in replies[1].message.reason
    asker.close()


def test_a_grant_whose_answer_was_lost_is_repeated_with_a_newer_request_present(make: Make) -> None:
    """A producer with newer weights asks again while its older request waits; both are sent again after a kill."""
    service = make().start()
    asker = Asker(service.address)
    ask, answer = partial(asker.ask, groups=4), asker.answer
    ask(2, 20.0)
    granted = answer().message.leases
    assert len(granted) == 4  # (F) allows no more
    service.kill()
    ask(2, 20.0)  # as if the answer had not arrived; both wait in the socket, and come together
    ask(3, 20.0)
    service.start()
    repeated = answer()
    assert repeated.request == 2 and repeated.message.leases == granted
    ask(2, 20.0)  # while 3 waits
    repeated = answer()
    assert repeated.request == 2 and repeated.message.leases == granted
    ask(4, 0.0)
    assert [(reply.request, reply.message.leases) for reply in (answer(), answer())] == [(3, ()), (4, ())]
    asker.close()


def test_a_burst_is_answered_together_and_each_asker_gets_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one drain travel in `Replies`, where the asker said that it takes those."""
    service = make(buffer="pipeline_depth = 'max'", buffer__max_staleness="20", learner__steps="40").start()
    together: list[int] = []
    decode_header = async_requester.decode_header

    def seen(header: bytes) -> Any:
        together.append(len(header))
        return decode_header(header)

    monkeypatch.setattr(async_requester, "decode_header", seen)

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        leases = (await producer.lease(0, 32)).leases
        assert len(leases) == 32
        await asyncio.sleep(0.1)
        wrong = [producer.answer(lease, logprob=float("nan")) for lease in leases[:4]]
        replies = await asyncio.gather(*wrong, *(producer.answer(lease) for lease in leases[4:]))
        assert all("logprobs" in reply.refused[0] for reply in replies[:4])
        assert all(reply.accepted == (0, 1) and not reply.refused for reply in replies[4:])
        producer.client.close()

    asyncio.run(work())
    assert 2 <= len(together) <= 32
    assert service.status()["ledger"]["ready"] == 28
