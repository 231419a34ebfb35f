"""The buffer service over real ZeroMQ, as a process: whole life cycles, kills, restarts, second ones, Redis."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from buffer_lab import (
    ROOT,
    Make,
    Producer,
    Service,
    claim,
    history,
    ids,
    learner,
    produce,
    sample,
)

from asyncrl import wire
from asyncrl.errors import Fenced
from asyncrl.metrics import read_lines
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.run_dir import endpoint
from asyncrl.wire.batch_arrays import GroupData
from buffers.client.learner import LearnerClient
from buffers.client.reward import RewardClient


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_group_goes_all_the_way(make: Make, store: str) -> None:
    service = make(store).start()
    client = learner(service.address)
    assert sorted(produce(service.address, 2, rewards=False)) == [0, 1]

    async def score() -> None:
        worker = RewardClient(service.address, name="r0", timeout_s=60)
        await worker.hello()
        tasks, done = await worker.work(max_samples=16, wait_s=3.0)
        assert not done and len(tasks) == 4
        assert tasks[0].row == {"ground_truth": str(tasks[0].item.group)}
        assert tasks[1].response_ids.tolist() == [tasks[1].item.index + n for n in range(3)]
        scores = [wire.Score(t.item.group, t.item.index, t.item.token, 0.25 * t.item.index, {"f": 1.0}) for t in tasks]
        assert (await worker.submit(scores)).accepted == 4
        assert (await worker.submit(scores[:1])).refused == {f"{scores[0].group}:{scores[0].index}": "already scored"}
        await worker.heartbeat({"scored_samples": 4.0})
        worker.close()

    asyncio.run(score())
    batch = claim(client, 1)
    assert ids(batch) == [0, 1] and not batch.replayed and not batch.invalid
    group: GroupData = batch.groups[1]
    assert group.prompt_ids.tolist() == [1, 7] and group.row == {"ground_truth": "1"} and group.bound == 1
    assert [(s.index, s.reward, s.parts, s.runs) for s in group.samples] == [
        (0, 0.0, {"f": 1.0}, ((0, 3),)),
        (1, 0.25, {"f": 1.0}, ((0, 3),)),
    ]
    assert group.samples[1].logprobs.tolist() == [-0.5] * 3 and group.samples[0].digests == {0: "d0"}
    assert not group.samples[0].response.flags.owndata  # a view into the frame
    client.commit(step=1, version=1, digest="d1")
    client.commit(step=1, version=1, digest="d1")
    text = client.ledger(step=1)
    client.checkpointed(step=1)
    client.heartbeat({"step": 1.0})
    status = service.status()
    assert status["store"] == store and status["version"] == 1 and status["learner"]["name"] == "learner"
    assert status["ledger"] | {"retired": 2, "issued": 2} == status["ledger"]
    assert msgspec.json.decode(text)["trained"] == [[0, 2]]
    client.goodbye(done=True, reason="complete")
    client.close()

    async def told() -> wire.Leases:
        producer = Producer(service.address)
        await producer.client.hello("model")
        leases = await producer.lease(wait_s=5.0)
        producer.client.close()
        return leases

    assert asyncio.run(told()).done
    assert service.stop() == 0
    assert [line["e"] for line in read_lines(service.run.history) if line.get("g") == 1] == [
        "issue",
        "lease",
        "sample",
        "sample",
        "unscored",
        "score",
        "score",
        "ready",
    ]
    assert history(service, "retire")[0]["step"] == 1 and history(service, "end")[0]["done"] is True
    assert read_lines(service.run.metrics / "buffer.jsonl")[-1]["retired"] == 2
    assert read_lines(service.run.metrics / "roles.jsonl")[-1]["role"] == "learner"


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_kill_and_restart_lose_nothing(make: Make, store: str) -> None:
    """kill -9 with groups in every state; the next service has them all, under a new epoch."""
    service = make(store).start()
    client = learner(service.address)
    epoch = service.status()["service_epoch"]
    produce(service.address, 2)
    first = claim(client, 1)
    client.commit(step=1, version=1, digest="d1")
    produce(service.address, 2, version=1)
    second = claim(client, 2)

    async def lease_two() -> tuple[Producer, wire.Leases]:
        producer = Producer(service.address)
        await producer.client.hello("model")
        leases = await producer.lease(1, 2)
        assert len(leases.leases) == 2, leases.reason
        head = leases.leases[0]
        await producer.client.submit(
            head, prompt_ids=np.array([1], np.int32), samples=[sample(0, 1)], digests={1: "d1"}, row={}
        )
        before = service.status()["ledger"]
        service.kill()
        service.start()
        assert service.status()["ledger"] == before | {"leased": 2, "claimed": 2, "trained": 2, "issued": 6}
        # the leases are still its own, and a sample sent again is known
        again = await producer.client.submit(
            head, prompt_ids=np.array([1], np.int32), samples=[sample(0, 1)], digests={1: "d1"}, row={}
        )
        assert again.duplicate == (0,)
        rest = await producer.client.submit(
            head, prompt_ids=np.array([1], np.int32), samples=[sample(1, 1)], digests={1: "d1"}, row={}
        )
        assert rest.accepted == (1,)
        producer.client.close()
        return producer, leases

    asyncio.run(lease_two())
    assert service.status()["service_epoch"] > epoch
    again = claim(client, 2)
    assert ids(again) == ids(second) and not again.replayed
    assert again.groups[0].samples[1].response.tolist() == second.groups[0].samples[1].response.tolist()
    client.commit(step=2, version=2, digest="d2")
    client.close()
    newcomer = learner(service.address, takeover=True)  # a learner from scratch gets both batches back, in order
    for step, batch in ((1, first), (2, second)):
        replay = claim(newcomer, step)
        assert replay.replayed and ids(replay) == ids(batch)
        newcomer.commit(step=step, version=step, digest=f"d{step}")
    newcomer.close()
    assert service.stop() == 0
    assert len(history(service, "service")) == 2
    assert len(history(service, "issue")) == len({line["g"] for line in history(service, "issue")}) == 6


def test_history_is_whole_after_kills_at_any_moment(make: Make) -> None:
    """Kill while a producer works: every ready group of the store has each of its lines exactly once."""
    service = make(
        buffer="pipeline_depth = 'max'",
        buffer__max_staleness="40",
        buffer__batch_groups="8",
        learner__steps="100",
        buffer__lease_timeout_s="30.0",
    ).start()

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        for turn in range(4):
            leases = (await producer.lease(0, 8)).leases
            tasks = [asyncio.ensure_future(producer.answer(lease)) for lease in leases]
            await asyncio.sleep(0.003 * turn)
            service.kill()
            service.start(wait=False)
            replies = await asyncio.gather(*tasks)
            assert all(reply.accepted or reply.duplicate for reply in replies), replies
        producer.client.close()

    asyncio.run(work())
    counts = service.status()["ledger"]
    assert counts["ready"] >= 32 and counts["issued"] == counts["ready"] + counts["leased"]
    service.stop()
    for event in ("issue", "unscored", "ready"):
        lines = [line["g"] for line in history(service, event)]
        assert len(lines) == len(set(lines)) and len(lines) >= counts["ready"], event


def test_learner_killed_between_steps_gets_recorded_batches(make: Make) -> None:
    service = make().start()
    client = learner(service.address)
    produce(service.address, 2)
    claim(client, 1)
    client.commit(step=1, version=1, digest="d1")
    ledger = client.ledger(step=1)
    client.checkpointed(step=1)
    produce(service.address, 2, version=1)
    lost = claim(client, 2)  # and the learner dies here
    client.close()
    second = learner(service.address, step=1, ledger=ledger, takeover=True)
    replay = claim(second, 2)
    assert replay.replayed and ids(replay) == ids(lost)
    second.commit(step=2, version=2, digest="d2")
    with pytest.raises(Fenced) as fenced:
        client = LearnerClient(service.address, name="old", timeout_s=60)
        client.epoch = 1
        client.commit(step=2, version=2, digest="x")
    assert fenced.value.exit_code == 75
    client.close()
    second.close()


def test_second_learner_is_refused_while_the_first_lives(make: Make) -> None:
    service = make().start()
    first = learner(service.address)
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import sys
from asyncrl.errors import AsyncRLError
from buffers.client.learner import LearnerClient
client = LearnerClient({service.address!r}, name="b", timeout_s=60)
try:
    client.register(step=0, ledger="")
except AsyncRLError as error:
    print(error.code, error.message)
""",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while other.poll() is None and time.monotonic() < deadline:
        first.heartbeat({})
        time.sleep(0.2)
    out, _ = other.communicate(timeout=60)
    assert out.startswith("learner.duplicate") and f"pid {os.getpid()}" in out and "s ago" in out
    first.close()


def test_learner_that_was_killed_is_replaced_at_once(make: Make) -> None:
    service = make().start()
    script = f"""
import os, signal
from buffers.client.learner import LearnerClient
client = LearnerClient({service.address!r}, name="a", timeout_s=60)
client.register(step=0, ledger="")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30, check=False).returncode == -signal.SIGKILL
    )
    started = time.monotonic()
    learner(service.address).close()  # within its 10 s, but its process is gone
    assert time.monotonic() - started < 9


def test_two_services_on_one_run(make: Make) -> None:
    service = make().start()
    second = Service(service.config)
    second.start(wait=False)
    assert second.process is not None and second.process.wait(60) == 75
    assert f"buffer already runs (pid {service.process.pid}" in service.log.read_text()  # type: ignore[union-attr]
    assert service.status()["version"] == 0


def test_stop_message_answers_the_polls_and_ends(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def wait_for_work() -> None:
        worker = RewardClient(service.address, name="r", timeout_s=60)
        await worker.hello()
        work = asyncio.ensure_future(worker.work(max_samples=1, wait_s=20.0))
        await asyncio.sleep(0.3)
        observer = ServiceClient(service.address)
        await asyncio.get_running_loop().run_in_executor(None, observer.stop, "test")
        tasks, _ = await asyncio.wait_for(work, 60)
        assert tasks == []
        observer.close()
        worker.close()

    asyncio.run(wait_for_work())
    client.close()
    assert service.process is not None and service.process.wait(60) == 0


def test_redis_that_is_killed_or_emptied_costs_a_pause(make: Make) -> None:
    import redis

    service = make("redis").start()
    client = learner(service.address)
    produce(service.address, 1)
    pid = int((service.run.store / "redis.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    produce(service.address, 1)
    assert int((service.run.store / "redis.pid").read_text()) != pid
    path = endpoint(service.config, "buffer").replace("sockets/buffer.sock", "store/redis.sock").removeprefix("ipc://")
    password = (service.run.store / "redis.admin").read_text()
    redis.Redis(unix_socket_path=path, username="admin", password=password).flushall()
    produce(service.address, 1)
    service.kill()
    service.start()
    assert service.status()["ledger"] | {"issued": 3, "ready": 3} == service.status()["ledger"]
    assert ids(claim(client, 1)) == [0, 1]
    client.close()
    assert "it is written again" in service.log.read_text()


def test_redis_that_does_not_answer_is_named_without_its_password(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_REDIS_PASSWORD", "topsecret")  # the file that the service reads has none
    service = make("redis", buffer="redis_url = 'redis://u:topsecret@127.0.0.1:9/0'\nredis_max_outage_s = 0.5")
    started = time.monotonic()
    service.start(wait=False)
    assert service.process is not None and service.process.wait(60) == 69
    assert time.monotonic() - started < 20
    text = service.log.read_text()
    assert "store.unreachable" in text and "127.0.0.1:9" in text and "topsecret" not in text


def test_a_complete_run_that_goes_on_sends_no_early_worker_home(make: Make) -> None:
    """Started again with more steps: a worker that asks before the learner has registered is not told that all is
    done. With the same steps it is."""

    async def told(address: str) -> tuple[bool, bool]:
        worker, producer = RewardClient(address, name="r0", timeout_s=60), Producer(address)
        await worker.hello()
        await producer.client.hello("model")
        _, done = await worker.work(max_samples=4, wait_s=0.2)
        leases = await producer.lease(wait_s=0.2)
        worker.close()
        producer.client.close()
        return done, leases.done

    service = make("sqlite", learner__steps="1").start()
    produce(service.address, 2)
    client = learner(service.address)
    claim(client, 1)
    client.commit(step=1, version=1, digest="d1")
    client.goodbye(done=True, reason="complete")
    client.close()
    assert asyncio.run(told(service.address)) == (True, True)
    assert service.stop() == 0
    service.start()
    assert asyncio.run(told(service.address)) == (True, True)
    assert service.stop() == 0
    service = make("sqlite", learner__steps="2").start()
    assert asyncio.run(told(service.address)) == (False, False)


@pytest.mark.parametrize("what", ["emptied", "restored"])
def test_a_store_that_lost_state_waits_for_the_ledger_of_a_learner(make: Make, tmp_path: Path, what: str) -> None:
    """Store and service are lost together: what is in the weights is not issued again to an engine that starts anew."""

    async def asked(address: str, wait_s: float) -> wire.Leases:
        producer = Producer(address)
        await producer.client.hello("model")
        leases = await producer.lease(wait_s=wait_s)
        producer.client.close()
        return leases

    service = make("sqlite", learner__steps="5").start()
    service.kill()
    store = next(service.run.root.glob("**/index.sqlite")).parent
    earlier = shutil.copytree(store, tmp_path / "earlier")
    service.start()
    client = learner(service.address)
    produce(service.address, 2)
    trained = claim(client, 1)
    client.commit(step=1, version=1, digest="d1")
    ledger = client.ledger(step=1)
    client.close()
    for _ in range(2):  # killed again before anybody registers: it still knows
        service.kill()
        for path in store.glob("index.sqlite*"):
            path.unlink()
        if what == "restored":
            shutil.copytree(earlier, store, dirs_exist_ok=True)
        service.start()
        leases = asyncio.run(asked(service.address, 0.2))
        assert not leases.leases and "emptied or restored" in leases.reason
        assert f"store was {what}" in service.log.read_text()
    service.kill()
    service.start()
    assert "emptied" in asyncio.run(asked(service.address, 0.2)).reason
    learner(service.address, step=1, ledger=ledger, takeover=True).close()
    again = asyncio.run(asked(service.address, 8.0))
    assert again.leases and not {lease.group for lease in again.leases} & {group.group for group in trained.groups}
