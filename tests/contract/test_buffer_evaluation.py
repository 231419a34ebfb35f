"""Evaluations over the real service: leases beside training, scores, kills in the middle, both stores."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from buffer_lab import Make, Producer, Service, claim, history, ids, learner, sample

from asyncrl import wire
from asyncrl.audit.prove import audit_run
from asyncrl.errors import HandshakeError
from asyncrl.evaluation.ids import is_evaluation, split_group
from asyncrl.metrics import read_lines
from buffers.client.learner import LearnerClient
from buffers.client.reward import RewardClient

ON = {"evaluation__path": "h.jsonl", "evaluation__every": "1", "evaluation__samples": "2"}


async def greet(address: str, rows: int = 3, name: str = "p0") -> Producer:
    producer = Producer(address, name)
    await producer.client.hello("model", evaluation_rows=rows)
    return producer


async def answer(producer: Producer, leases: wire.Leases, version: int = 0) -> None:
    """Answer them all; those of training are scored at once."""
    for lease in leases.leases:
        if is_evaluation(lease.group):
            reply = await held_out(producer, lease, lease.missing, version)
        else:
            reply = await producer.answer(lease, version)
        assert reply.accepted == lease.missing, reply


async def held_out(
    producer: Producer, lease: wire.Lease, indices: tuple[int, ...], version: int = 0
) -> wire.SamplesReply:
    """Some samples of a held-out prompt."""
    return await producer.client.submit(
        lease,
        prompt_ids=np.array([1, 7], np.int32),
        samples=[sample(index, version) for index in indices],
        digests={version: f"d{version}"},
        row={"ground_truth": "x"},
    )


async def score(address: str, name: str = "r0", *, count: int) -> list[wire.RewardItem]:
    """Score that many samples: index 0 is right."""
    worker = RewardClient(address, name=name, timeout_s=60)
    await worker.hello()
    items: list[wire.RewardItem] = []
    while len(items) < count:
        tasks, _ = await worker.work(max_samples=2, wait_s=3.0)
        assert tasks, f"{len(items)} of {count}"
        scores = [
            wire.Score(item.group, item.index, item.token, float(item.index == 0), {}, "", f"text {item.index}")
            for item in (task.item for task in tasks)
        ]
        assert (await worker.submit(scores)).accepted == len(tasks)
        items += [task.item for task in tasks]
    worker.close()
    return items


def train(client: LearnerClient, step: int) -> list[int]:
    batch = claim(client, step)
    client.commit(step=step, version=step, digest=f"d{step}")
    return ids(batch)


def lines(service: Service) -> list[dict[str, Any]]:
    return read_lines(service.run.metrics / "evaluation.jsonl")


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_an_evaluation_beside_training(make: Make, store: str) -> None:
    service = make(store, **ON, evaluation__at_start="true", learner__steps="2").start()
    client = learner(service.address)

    async def first() -> None:
        producer = await greet(service.address)
        leases = await producer.lease(count=2)
        training = [lease.group for lease in leases.leases if not is_evaluation(lease.group)]
        beside = [split_group(lease.group) for lease in leases.leases if is_evaluation(lease.group)]
        assert training == [0, 1] and beside == [(0, 0), (0, 1), (0, 2)], "all that was asked for, and those beside"
        await answer(producer, leases)
        items = await score(service.address, count=6)
        assert all(is_evaluation(item.group) for item in items) and items[0].row, "scored with the row of the prompt"
        producer.client.close()

    asyncio.run(first())
    assert train(client, 1) == [0, 1], "only groups of training"
    (line,) = client.evaluations(seen=0)[0]
    assert (line["step"], line["evaluation_scored"], line["val-core/default/reward/mean@2"]) == (0, 3, 0.5)
    assert line["val-core/default/reward/maj@2/mean"] == 0.0, "two different texts: a tie"
    ended, running = client.evaluations(seen=line["round"])
    assert ended == [] and re.fullmatch(r"of step 1: 0 of 3 prompts are over, \d+ s of 600 s", running)
    status = service.status()
    assert status["evaluation"]["left"] == {"waits for a producer": 3}
    assert status["ledger"]["issued"] == 2 == status["ledger"]["trained"], "nothing of it is in the ledger"

    async def second() -> None:
        producer = await greet(service.address)
        old = await producer.lease(version=0)
        assert [one.group for one in old.leases] == [2, 3], "version 0 is too old for the evaluation of step 1"
        await answer(producer, old)
        leases = await producer.lease(version=1)
        assert [split_group(one.group) for one in leases.leases] == [(1, 0), (1, 1), (1, 2)]
        await answer(producer, leases, version=1)
        await score(service.address, count=6)
        producer.client.close()

    asyncio.run(second())
    train(client, 2)
    client.ledger(step=2)
    client.checkpointed(step=2)
    client.goodbye(done=True)
    client.close()
    service.stop()
    assert [(one["step"], one["why"], one["evaluation_missing"]) for one in lines(service)] == [
        (0, "", 0),
        (1, "", 0),
        (2, "the run ended", 3),
    ]
    samples = read_lines(service.run.evaluations / "step-1.jsonl")
    assert sorted((one["row"], one["index"], one["text"]) for one in samples) == [
        (row, index, f"text {index}") for row in range(3) for index in range(2)
    ]
    assert all(one["versions"] == [1, 1] for one in samples)
    audit = audit_run(service.run.root)
    assert audit.violations == [] and audit.evaluations == [0, 1, 2] and audit.evaluation_samples == 12


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_killed_service_goes_on_with_what_was_answered(make: Make, store: str) -> None:
    service = make(store, **ON, evaluation__at_start="true").start()
    client = learner(service.address)

    async def begin() -> tuple[Producer, list[wire.Lease]]:
        producer = await greet(service.address)
        leases = [one for one in (await producer.lease(count=1)).leases if is_evaluation(one.group)]
        await answer(producer, wire.Leases(tuple(leases[:2]), 0))
        await score(service.address, count=2)
        return producer, leases

    async def go_on(producer: Producer, leases: list[wire.Lease]) -> None:
        await answer(producer, wire.Leases(tuple(leases[2:]), 0))  # under the token of before the kill
        items = await score(service.address, "r1", count=4)
        assert len({(item.group, item.index) for item in items}) == 4, "what was scored is not scored again"

    async def whole() -> None:
        producer, leases = await begin()
        service.kill()
        service.start()
        await go_on(producer, leases)
        producer.client.close()

    asyncio.run(whole())
    (line,) = client.evaluations(seen=0)[0]
    assert line["evaluation_scored"] == 3 and line["val-core/default/reward/mean@2"] == 0.5
    service.kill()  # right after its end
    service.start()
    assert client.evaluations(seen=0)[0] == [line]
    client.close()
    service.stop()
    assert [one["round"] for one in lines(service)] == [line["round"]], "told once"
    assert len(history(service, "eval_begin")) == len(history(service, "eval_end")) == 1
    assert len(history(service, "eval_score")) == 6
    assert audit_run(service.run.root).violations == []


def test_a_metrics_line_that_a_kill_kept_back_is_written_at_the_next_start(make: Make) -> None:
    service = make(**ON, evaluation__at_start="true").start()
    client = learner(service.address)

    async def whole() -> None:
        producer = await greet(service.address, rows=1)
        leases = await producer.lease(count=1)
        await answer(producer, leases)
        await score(service.address, count=2)
        producer.client.close()

    asyncio.run(whole())
    client.close()
    service.kill()
    told = lines(service)
    (service.run.metrics / "evaluation.jsonl").unlink()
    service.start()
    service.stop()
    (line,) = lines(service)
    assert {**line, "t": 0} == {**told[0], "t": 0}


def test_a_killed_producer_and_a_killed_reward_worker(make: Make) -> None:
    """Silent for `lease_timeout_s` (2 s here): others make and score what is missing."""
    service = make(**ON, evaluation__at_start="true").start()
    client = learner(service.address)

    async def whole() -> None:
        gone = await greet(service.address, rows=2)
        lost = [one for one in (await gone.lease(count=1)).leases if is_evaluation(one.group)]
        assert (await held_out(gone, lost[0], (0,))).accepted == (0,)
        dead = RewardClient(service.address, name="gone", timeout_s=60)
        await dead.hello()
        assert len((await dead.work(max_samples=8, wait_s=2.0))[0]) == 1
        gone.client.close()
        dead.close()
        other = await greet(service.address, rows=2, name="p1")
        found: dict[int, wire.Lease] = {}
        while len(found) < 2:
            leases = await other.lease(count=1, wait_s=1.0)
            found |= {one.group: one for one in leases.leases if is_evaluation(one.group)}
        assert found[lost[0].group].missing == (1,) and found[lost[0].group].attempt == 1
        await answer(other, wire.Leases(tuple(found.values()), 0))
        await score(service.address, "r1", count=4)
        assert (await held_out(other, lost[1], (0,))).accepted == ()
        other.client.close()

    asyncio.run(whole())
    (line,) = client.evaluations(seen=0)[0]
    assert (line["evaluation_scored"], line["evaluation_failed"]) == (2, 0)
    client.close()
    service.stop()
    assert audit_run(service.run.root).violations == []


def test_a_kept_version_gets_the_prompts_while_its_engine_trains_with_the_next(make: Make) -> None:
    lane = {"evaluation__lane": "second_weights", "evaluation__share": "0.001", "evaluation__at_start": "true"}
    service = make(**ON, **lane, learner__steps="2").start()
    client = learner(service.address)

    async def whole() -> None:
        producer = await greet(service.address)
        leases = await producer.lease(count=2)
        assert [split_group(one.group) for one in leases.leases if is_evaluation(one.group)] == [(0, 0)]
        assert leases.hold == 0
        await answer(producer, leases)
        await asyncio.to_thread(train, client, 1)
        trained: list[int] = []
        for row in (1, 2):
            leases = await producer.client.lease(engine_version=1, max_groups=1, wait_s=5.0, kept=0)
            held = [one for one in leases.leases if is_evaluation(one.group)]
            assert [(split_group(one.group), one.deadline_version) for one in held] == [((0, row), 0)]
            assert leases.hold == 0
            for lease in leases.leases:
                if lease in held:
                    assert (await held_out(producer, lease, lease.missing)).accepted == lease.missing
                else:
                    trained.append(lease.group)
                    assert (await producer.answer(lease, 1)).accepted == lease.missing
        after = await producer.client.lease(engine_version=1, max_groups=0, wait_s=0.0, kept=0)
        assert after.hold == -1, "all prompts are generated"
        assert trained, "groups of the newer version come with the prompts of the kept one"
        await score(service.address, count=6)
        producer.client.close()

    asyncio.run(whole())
    (line,) = client.evaluations(seen=0)[0]
    versions = [line[f"evaluation_version{end}"] for end in ("", "_min", "_max")]
    assert versions == [0, 0, 0] and (line["evaluation_scored"], line["evaluation_restarts"]) == (3, 0)
    client.close()
    service.stop()


def test_a_producer_with_another_file_is_refused(make: Make) -> None:
    service = make(**ON).start()

    async def whole() -> None:
        first = await greet(service.address, rows=3)
        with pytest.raises(HandshakeError, match="they read different files"):
            await greet(service.address, rows=4, name="p1")
        first.client.close()

    asyncio.run(whole())


def test_off_means_off(make: Make) -> None:
    service = make().start()
    client = learner(service.address)
    assert client.evaluations(seen=0) == ([], "")
    assert service.status()["evaluation"] == {}
    client.close()
    service.stop()
    assert not (service.run.metrics / "evaluation.jsonl").exists() and not service.run.evaluations.exists()
