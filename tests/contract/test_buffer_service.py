"""The buffer service over real ZeroMQ, as a process: whole life cycles, kills, restarts, hostile input."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from asyncrl import sockets, wire
from asyncrl.config import Config, dump, parse
from asyncrl.errors import AsyncRLError, Fenced, HandshakeError, WireError
from asyncrl.metrics import read_lines
from asyncrl.plugins import GenSample
from asyncrl.rundir import RunDir, endpoint
from buffers.client import ClaimedBatch, GroupData, LearnerClient, ObserverClient, ProducerClient, RewardClient
from buffers.dead import DeadLetters, read_letter

ROOT = Path(__file__).resolve().parents[2]
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
TOML = """
[run]
name = "t"
dir = "{dir}"
[model]
path = "none"
[data]
path = "none.jsonl"
max_prompt_tokens = 16
[sampling]
group_size = 2
max_new_tokens = 16
[buffer]
batch_groups = 2
max_staleness = 1
lease_timeout_s = 2.0
store = "{store}"
{buffer}
[network]
max_message_bytes = 1048576
[learner]
steps = 4
[[reward]]
function = "m:f"
"""


def need_redis() -> None:
    if SERVER is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")


class Service:
    """A buffer process of a configuration; started, killed and started again by the tests."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run = RunDir(config.run_dir).create()
        self.run.config.write_text(dump(config))
        self.address = endpoint(config, "buffer")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.run.logs / "buffer.log"

    def start(self, wait: bool = True) -> Service:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "buffers.server", "--config", str(self.run.config)], cwd=ROOT, stdout=log,
                stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        if wait:
            observer = ObserverClient(self.address, timeout_s=20)
            observer.status()
            observer.close()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"no end after SIGTERM:\n{self.log.read_text()}") from None

    def status(self) -> dict[str, Any]:
        observer = ObserverClient(self.address, timeout_s=10)
        try:
            return observer.status()
        finally:
            observer.close()


Make = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Service] = []

    def build(store: str = "sqlite", buffer: str = "", **changes: str) -> Service:
        if store == "redis":
            need_redis()
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        config = parse(TOML.format(dir=tmp_path / "run", store=store, buffer=buffer), overrides=overrides)
        made.append(Service(config))
        return made[-1]

    yield build
    for service in made:
        if service.process is not None and service.process.poll() is None:
            service.stop()


def sample(index: int, version: int = 0, tokens: int = 3, logprob: float = -0.5) -> GenSample:
    return GenSample(
        str(index),
        index,
        np.arange(tokens, dtype=np.int32) + index,
        np.full(tokens, logprob, np.float32),
        ((version, tokens),),
        "stop",
    )


class Producer:
    """A producer that answers every lease at once."""

    def __init__(self, address: str, name: str = "p0") -> None:
        self.client = ProducerClient(address, name=name, timeout_s=15)

    async def lease(self, version: int = 0, count: int = 8, wait_s: float = 2.0) -> wire.Leases:
        return await self.client.lease(engine_version=version, max_groups=count, wait_s=wait_s)

    async def answer(
        self, lease: wire.Lease, version: int = 0, rewards: bool = True, **kwargs: Any
    ) -> wire.SamplesReply:
        samples = [sample(index, version, **kwargs) for index in lease.missing]
        return await self.client.submit(
            lease, prompt_ids=np.array([lease.group, 7], np.int32), samples=samples, digests={version: f"d{version}"},
            row={"ground_truth": str(lease.group)}, rewards={item.index: float(item.index) for item in samples} if
            rewards else {},
        )  # fmt: skip


def produce(address: str, groups: int, version: int = 0, rewards: bool = True, name: str = "p0") -> list[int]:
    """Lease and answer that many groups."""

    async def work() -> list[int]:
        producer = Producer(address, name)
        await producer.client.hello("model")
        done: list[int] = []
        try:
            while len(done) < groups:
                leases = await producer.lease(version, groups - len(done), wait_s=8.0)
                assert leases.leases, leases.reason
                for lease in leases.leases:
                    reply = await producer.answer(lease, version, rewards)
                    assert reply.accepted == lease.missing, reply
                    done.append(lease.group)
        finally:
            producer.client.close()
        return done

    return asyncio.run(work())


def learner(
    address: str, *, step: int = 0, ledger: str = "", takeover: bool = False, name: str = "learner"
) -> LearnerClient:
    client = LearnerClient(address, name=name, timeout_s=15)
    client.hello("model")
    client.register(step=step, ledger=ledger, takeover=takeover, fingerprint="model", digests={step: f"d{step}"})
    return client


def claim(client: LearnerClient, step: int, wait_s: float = 8.0) -> ClaimedBatch:
    batch = client.claim(step=step, version=step - 1, wait_s=wait_s)
    assert isinstance(batch, ClaimedBatch), batch
    return batch


def ids(batch: ClaimedBatch) -> list[int]:
    return [group.group for group in batch.groups]


def history(service: Service, event: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(service.run.history) if line["e"] == event]


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_group_goes_all_the_way(make: Make, store: str) -> None:
    service = make(store).start()
    client = learner(service.address)
    assert sorted(produce(service.address, 2, rewards=False)) == [0, 1]

    async def score() -> None:
        worker = RewardClient(service.address, name="r0", timeout_s=15)
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
            head, prompt_ids=np.array([1], np.int32), samples=[sample(0, 1)], digests={}, row={}
        )
        before = service.status()["ledger"]
        service.kill()
        service.start()
        assert service.status()["ledger"] == before | {"leased": 2, "claimed": 2, "trained": 2, "issued": 6}
        # the leases are still its own, and a sample sent again is known
        again = await producer.client.submit(
            head, prompt_ids=np.array([1], np.int32), samples=[sample(0, 1)], digests={}, row={}
        )
        assert again.duplicate == (0,)
        rest = await producer.client.submit(
            head, prompt_ids=np.array([1], np.int32), samples=[sample(1, 1)], digests={}, row={}
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
        client = LearnerClient(service.address, name="old", timeout_s=5)
        client.epoch = 1
        client.commit(step=2, version=2, digest="x")
    assert fenced.value.exit_code == 75
    client.close()
    second.close()


def test_second_learner_is_refused_while_the_first_lives(make: Make) -> None:
    service = make().start()
    first = learner(service.address)
    other = subprocess.Popen([sys.executable, "-c", f"""
import sys
from asyncrl.errors import AsyncRLError
from buffers.client import LearnerClient
client = LearnerClient({service.address!r}, name="b", timeout_s=15)
try:
    client.register(step=0, ledger="")
except AsyncRLError as error:
    print(error.code, error.message)
"""], cwd=ROOT, stdout=subprocess.PIPE, text=True)  # fmt: skip
    deadline = time.monotonic() + 20
    while other.poll() is None and time.monotonic() < deadline:
        first.heartbeat({})
        time.sleep(0.2)
    out, _ = other.communicate(timeout=5)
    assert out.startswith("learner.duplicate") and f"pid {os.getpid()}" in out and "s ago" in out
    first.close()


def test_learner_that_was_killed_is_replaced_at_once(make: Make) -> None:
    service = make().start()
    script = f"""
import os, signal
from buffers.client import LearnerClient
client = LearnerClient({service.address!r}, name="a", timeout_s=15)
client.register(step=0, ledger="")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30, check=False).returncode == -signal.SIGKILL
    )
    started = time.monotonic()
    learner(service.address).close()  # within its 10 s, but its process is gone
    assert time.monotonic() - started < 3


def test_two_services_on_one_run(make: Make) -> None:
    service = make().start()
    second = Service(service.config)
    second.start(wait=False)
    assert second.process is not None and second.process.wait(20) == 75
    assert f"buffer already runs (pid {service.process.pid}" in service.log.read_text()  # type: ignore[union-attr]
    assert service.status()["version"] == 0


def test_lost_lease_goes_to_another_and_the_late_answer_is_refused(make: Make) -> None:
    service = make().start()

    async def work() -> None:
        slow, quick = Producer(service.address, "slow"), Producer(service.address, "quick")
        await slow.client.hello("model")
        await quick.client.hello("model")
        lease = (await slow.lease(0, 1)).leases[0]
        await slow.client.submit(lease, prompt_ids=np.array([1], np.int32), samples=[sample(0)], digests={}, row={})
        again: wire.Lease | None = None
        deadline = time.monotonic() + 8
        while again is None and time.monotonic() < deadline:  # slow is silent for 2 s
            leases = await quick.lease(0, 8, wait_s=1.0)
            again = next((found for found in leases.leases if found.group == lease.group), None)
            await quick.client.heartbeat({})
        assert again is not None and again.missing == (1,) and again.attempt == 1 and again.token > lease.token
        late = await slow.client.submit(
            lease, prompt_ids=np.array([1], np.int32), samples=[sample(1)], digests={}, row={}
        )
        assert late.refused == {1: "token: the lease was lost"}
        assert (await quick.answer(again)).accepted == (1,)
        slow.client.close()
        quick.client.close()

    asyncio.run(work())
    assert next(line["why"] for line in history(service, "lost")) == "silent"


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
        stranger = ProducerClient(service.address, name="x", timeout_s=5)
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
    assert set(service.status()["dead"]) == {"poison:logprobs", "poison:digest"}
    assert [line["why"] for line in read_lines(service.run.history) if line["e"] == "lost"] == ["unknown_version"]
    letters = {path.name: read_letter(path) for path in service.run.dead.glob("*.frames")}
    assert sorted(name.partition("-")[0] for name in letters) == ["g0", "g1"]
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
    observer = ObserverClient(service.address, timeout_s=10)
    tuned = observer.tune({"max_staleness": 3, "learner.algorithm.tis_cap": 1.5}, author="me@here")
    assert tuned.number == 1 and msgspec.json.decode(tuned.changed)["buffer.max_staleness"] == [1, 3]
    with pytest.raises(AsyncRLError) as refused:
        observer.tune({"on_late": "perhaps"}, author="me@here")
    assert refused.value.code == "tune.refused"
    with pytest.raises(WireError):
        observer._requester.request(wire.Tune("[1]", "me@here"), timeout_s=10)
    service.kill()
    service.start()
    shown = service.status()["tuning"]
    assert (shown["number"], shown["author"], shown["settings"]["buffer.max_staleness"]) == (1, "me@here", 3)
    produce(service.address, 2)
    packet = client._requester.request(wire.Claim(client.epoch, 1, 0, 8.0), timeout_s=15)
    assert msgspec.json.decode(packet.message.tuning) == {"learner.algorithm.tis_cap": 1.5}
    assert packet.message.groups[0].bound == 3
    assert observer.undo_tune(0, author="me@here").number == 2
    assert service.status()["tuning"]["settings"]["buffer.max_staleness"] == 1
    told = [(event["n"], event["key"], event["old"], event["new"]) for event in history(service, "tune")]
    assert told == [
        (1, "buffer.max_staleness", 1, 3), (1, "learner.algorithm.tis_cap", 2.0, 1.5),
        (2, "buffer.max_staleness", 3, 1), (2, "learner.algorithm.tis_cap", 1.5, 2.0),
    ]  # fmt: skip
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


def test_reward_budget_ends_the_learner_with_the_message(make: Make) -> None:
    service = make(reward_workers__max_failed_groups="0", reward_workers__retries="1").start()
    client = learner(service.address)
    produce(service.address, 1, rewards=False)

    async def fail() -> list[int]:
        attempts = []
        worker = RewardClient(service.address, name="r", timeout_s=10)
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
    assert 0.3 < time.monotonic() - started < 3

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


def test_a_lease_request_sent_twice_is_granted_once(make: Make) -> None:
    service = make().start()
    context: zmq.Context[Any] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.connect(service.address)

    def ask(number: int, wait_s: float) -> None:
        asker.send_multipart(wire.encode(wire.LeaseRequest("p", 0, 1, wait_s), request=number))

    def answer() -> wire.Packet:
        assert asker.poll(5000)
        return wire.decode(asker.recv_multipart())

    asker.send_multipart(wire.encode(wire.Hello("producer", "p", 1, "h"), request=1))
    answer()
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
    asker.close(0)
    context.term()


def test_a_burst_is_answered_together_and_each_asker_gets_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one drain travel in `Replies`, where the asker said that it takes those."""
    service = make(buffer="pipeline_depth = 'max'", buffer__max_staleness="20", learner__steps="40").start()
    together: list[int] = []
    decode_header = sockets.decode_header

    def seen(header: bytes) -> Any:
        together.append(len(header))
        return decode_header(header)

    monkeypatch.setattr(sockets, "decode_header", seen)

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


def test_stop_message_answers_the_polls_and_ends(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def wait_for_work() -> None:
        worker = RewardClient(service.address, name="r", timeout_s=20)
        await worker.hello()
        work = asyncio.ensure_future(worker.work(max_samples=1, wait_s=20.0))
        await asyncio.sleep(0.3)
        observer = ObserverClient(service.address)
        await asyncio.get_running_loop().run_in_executor(None, observer.stop, "test")
        tasks, _ = await asyncio.wait_for(work, 5)
        assert tasks == []
        observer.close()
        worker.close()

    asyncio.run(wait_for_work())
    client.close()
    assert service.process is not None and service.process.wait(10) == 0


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
    redis.Redis(unix_socket_path=path).flushall()
    produce(service.address, 1)
    service.kill()
    service.start()
    assert service.status()["ledger"] | {"issued": 3, "ready": 3} == service.status()["ledger"]
    assert ids(claim(client, 1)) == [0, 1]
    client.close()
    assert "it is written again" in service.log.read_text()


def test_redis_that_does_not_answer_is_named_without_its_password(make: Make) -> None:
    service = make("redis", buffer="redis_url = 'redis://u:topsecret@127.0.0.1:9/0'\nredis_max_outage_s = 0.5")
    started = time.monotonic()
    service.start(wait=False)
    assert service.process is not None and service.process.wait(25) == 69
    assert time.monotonic() - started < 20
    text = service.log.read_text()
    assert "store.unreachable" in text and "127.0.0.1:9" in text and "topsecret" not in text
