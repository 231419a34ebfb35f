"""Wrong weights on purpose, from the publisher to the buffer: every sample of them is refused, and it is said whose.

Real buffer, service, publisher, receivers and a toy engine. Three places: on the way (the receiver refuses, the old
version goes on), in the engine after the receiver's check (its own digest ends it before a sample leaves), and the same
with a receiver that looks away: then the samples leave, and the buffer refuses each by the digest that they carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_lab import Make, Service, claim
from receiver_lab import GROUPS, Engine, Member
from test_weightsync_service import PLAN, World, until, weights

from asyncrl.engine import GenRequest
from asyncrl.errors import WorkError
from asyncrl.metrics import read_lines
from asyncrl.wire import Instruction, Manifest, SamplesReply
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient
from weightsync.plan.digest import bucket_digest
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver, built_in_transports

FAULTS = ["flipped bit", "skipped bucket", "old bucket", "stale adapter"]
ADAPTER = '{"r":1,"lora_alpha":1}'


class Spoiler(Engine):
    """Holds, once armed, something else than what it was given and checked."""

    fault = ""

    async def commit_update(self) -> str:
        if self.fault == "flipped bit":
            self._staged[1][20] ^= 1
        elif self.fault == "skipped bucket":
            self._staged[2] = bytearray(len(self._staged[2]))
        elif self.fault == "old bucket":
            self._staged[2] = bytearray(self.held[2])
        elif self.fault == "stale adapter":
            self._staged = {number: bytearray(data) for number, data in self.held.items()}
        return await super().commit_update()


class LooksAway(Receiver):
    """A receiver that takes whatever the engine holds after a commit for the version."""

    def _check_digest(self, manifest: Manifest, digest: str) -> None:
        return


class Way:
    """The local transport, which delivers something else once it is armed."""

    def __init__(self, plan_sizes: tuple[int, ...]) -> None:
        self.fault = ""
        self.before: list[bytes] = [bytes(size) for size in plan_sizes]  # buckets of the last good version

    def __call__(self, instruction: Instruction) -> Any:
        inbox = built_in_transports()["local"](instruction)
        right = inbox.read

        def read(number: int, into: memoryview | None = None) -> memoryview:
            view = right(number, into)
            if not self.fault:
                self.before[number] = bytes(view)
            elif self.fault == "stale adapter":
                return memoryview(self.before[number])
            elif self.fault == "flipped bit" and number == 1:
                return memoryview(bytes([view[0] ^ 1]) + bytes(view[1:]))
            elif self.fault == "skipped bucket" and number == 2:
                return memoryview(bytes(len(view)))
            elif self.fault == "old bucket" and number == 2:
                return memoryview(self.before[2])
            return view

        inbox.read = read  # type: ignore[method-assign]
        return inbox


class Run:
    """One buffer, one weight sync, a learner, and generators by name."""

    def __init__(self, world: World, buffer: Service) -> None:
        self.world = world
        self.buffer = buffer
        self.publisher: Publisher = world.publisher()
        self.learner: LearnerClient
        self.version = -1

    def publish(self, *, adapter: bool = False) -> None:
        self.version += 1
        base = self.publisher.digests[0] if adapter else ""
        self.publisher.publish(self.version, PLAN, weights(self.version), base=base, adapter=ADAPTER if adapter else "")


def generate(run: Run, member: Member, name: str, groups: int) -> list[SamplesReply]:
    """As a producer does: lease, generate, wait until the weights are attested, submit with their digests."""

    async def work() -> list[SamplesReply]:
        client = ProducerClient(run.buffer.address, name=name, timeout_s=60)
        await client.hello("model")
        replies: list[SamplesReply] = []
        try:
            while len(replies) < groups:
                version = member.engine.health().version
                answer = await client.lease(engine_version=version, max_groups=groups - len(replies), wait_s=8.0)
                assert answer.leases, answer.reason
                for lease in answer.leases:
                    prompt = np.array([lease.group, 7], np.int32)
                    request = GenRequest(str(lease.group), prompt, tuple(lease.missing), lease.seed, 8, stop_ids=(2,))
                    samples = [item async for item in member.engine.generate(request)]
                    versions = {version for item in samples for version, _ in item.runs}
                    await member.receiver.wait_version(max(versions), 10.0)
                    digests = {version: member.receiver.digests[version] for version in versions}
                    replies.append(
                        await client.submit(
                            lease,
                            prompt_ids=prompt,
                            samples=samples,
                            digests=digests,
                            row={},
                            rewards={item.index: float(item.index) for item in samples},
                        )
                    )
        finally:
            client.close()
        return replies

    return asyncio.run(work())


@pytest.fixture
def start(tmp_path: Path, make: Make) -> Iterator[Callable[[], Run]]:
    world = World(tmp_path / "sync", transport="local")
    started: list[Run] = []

    def begin() -> Run:
        started.append(Run(world, make().start()))
        return started[-1]

    yield begin
    for run in started:
        run.learner.close()
    world.close()


def to_the_fault(run: Run, fault: str, **bad: Any) -> tuple[Member, Member]:
    """Bring two generators to the version before the one that will be wrong; the learner has made that one."""
    good, spoilt = Member(run.world, "good", Engine()), Member(run.world, "bad", Spoiler(), **bad)
    run.publish()
    run.publisher.wait_committed(0, members=2, timeout_s=90)
    run.learner = LearnerClient(run.buffer.address, name="learner", timeout_s=60)
    run.learner.hello("model")
    digests = {0: run.publisher.digests[0]}
    run.learner.register(step=0, ledger="", takeover=False, fingerprint="model", digests=digests)
    steps = 2 if fault == "stale adapter" else 1
    for step in range(1, steps + 1):
        for member, name in ((good, "good"), (spoilt, "bad")):
            assert all(reply.accepted for reply in generate(run, member, name, 1))
        claim(run.learner, step)
        if step < steps:
            run.publish(adapter=True)
            run.learner.commit(step=step, version=step, digest=run.publisher.digests[step])
            run.publisher.wait_committed(step, members=2, timeout_s=90)
    return good, spoilt


def deliver(run: Run, fault: str) -> None:
    run.publish(adapter=fault == "stale adapter")
    run.learner.commit(step=run.version, version=run.version, digest=run.publisher.digests[run.version])


@pytest.mark.long_cases("flipped bit")
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_on_the_way_the_old_version_goes_on(start: Callable[[], Run], fault: str) -> None:
    run, way = start(), Way(PLAN.bucket_bytes)
    good, bad = to_the_fault(run, fault, transports={"local": way})
    way.fault = fault
    deliver(run, fault)
    run.publisher.wait_committed(run.version, members=1, timeout_s=90)
    until(lambda: bad.engine.done.count("abort") >= 2, "it is refused, and again")
    assert bad.receiver.version == run.version - 1
    old = [bucket_digest(group, bad.engine.held[number]) for number, group in enumerate(GROUPS)]
    assert old == [bucket_digest(group, way.before[number]) for number, group in enumerate(GROUPS)]
    why = run.world.status()["members"]["bad"]["why"]
    assert "has another digest than published" in why, why
    with pytest.raises(WorkError, match="bad"):
        run.publisher.wait_committed(run.version, members=2, timeout_s=0.2)
    replies = generate(run, bad, "bad", 1)
    assert all(reply.accepted and not reply.refused for reply in replies), "what it still makes is of whole weights"
    way.fault = ""
    run.publisher.wait_committed(run.version, members=2, timeout_s=90)
    assert good.receiver.digests[run.version] == bad.receiver.digests[run.version]


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_in_the_engine_ends_it_before_a_sample_leaves(start: Callable[[], Run], fault: str) -> None:
    run = start()
    _, bad = to_the_fault(run, fault)
    bad.engine.fault = fault
    deliver(run, fault)
    until(lambda: bad.error is not None, "the receiver ends")
    assert bad.error is not None and (bad.error.code, bad.error.where) == ("engine.broken", "bad")
    assert run.version not in bad.receiver.digests

    async def leaves() -> None:
        await bad.receiver.wait_version(run.version, 0.1)

    with pytest.raises(WorkError):
        asyncio.run(leaves())
    status = run.world.status()["members"]
    assert status["bad"]["state"] != "serving" and "engine.broken" in status["bad"]["why"], status
    until(lambda: run.world.status()["members"]["good"]["state"] == "serving", "the other one is served")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_receiver_that_looks_away_is_found_out_by_the_buffer(start: Callable[[], Run], fault: str) -> None:
    run = start()
    good, bad = to_the_fault(run, fault, kind=LooksAway)
    bad.engine.fault = fault
    deliver(run, fault)
    until(lambda: bad.receiver.version == run.version, "it believes to serve")
    run.publisher.wait_committed(run.version, members=1, timeout_s=90)
    replies = generate(run, bad, "bad", 3)
    assert [reply.accepted for reply in replies] == [()] * 3, "not one sample of wrong weights"
    published = run.publisher.digests[run.version]
    for reply in replies:
        assert len(reply.refused) == 2
        for reason in reply.refused.values():
            assert reason.startswith("not published: digest: bad holds ") and published in reason
    assert all(reply.accepted for reply in generate(run, good, "good", 3)), "the prompts are not at fault"
    lost = [line for line in read_lines(run.buffer.run.history) if line["e"] == "lost"]
    assert [(line["producer"], line["why"]) for line in lost] == [("bad", "wrong_digest")] * 3
    assert run.buffer.status()["dead"] == {}
    status = run.world.status()["members"]
    assert status["bad"]["state"] != "serving" and "holds digest" in status["bad"]["why"], status
