"""What the holder of each key can do to a real buffer and a real weight-sync service: at most lose its own work."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # buffer_lab

import fuzzing
import warm
from buffer_lab import TOML, sample

from asyncrl import wire
from asyncrl.config import Config, dump, parse
from asyncrl.engine import GenDelta
from asyncrl.errors import AsyncRLError, HandshakeError, WorkError
from asyncrl.images.digests import image_digest
from asyncrl.net.auth import ALLOWED, is_allowed
from asyncrl.net.keys import GUESTS, Keys, add_key, key_path, read_keys, revoke_key, write_keys
from asyncrl.net.peers import MOST_NAMES
from asyncrl.net.requester import Requester
from asyncrl.runtime.run_dir import RunDir, endpoint
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient
from buffers.client.reward import RewardClient

ROOT = Path(__file__).parents[2]
MODULES = {"buffer": "buffers.main", "weightsync": "weightsync.main"}


class Host:
    """The services of a run with keys, each a real process; nothing scores but reward workers."""

    def __init__(self, folder: Path) -> None:
        self.server = folder / "server.key"
        write_keys(self.server)
        lines = f'key_file = "{self.server}"\n'
        text = TOML.format(store="sqlite", buffer="max_reissue = 3", dir=folder / "run") + lines
        self.config: Config = parse(text, overrides=["environment.name=single_turn"])
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.processes: dict[str, Any] = {}
        self.askers: dict[tuple[str, str], Requester] = {}

    def start(self, *roles: str) -> None:
        for role in roles:
            with (self.run.logs / f"{role}.log").open("ab") as log:
                words = [sys.executable, "-m", MODULES[role], "--config", str(self.run.config)]
                self.processes[role] = warm.popen(words, cwd=ROOT, stdout=log, stderr=log)
        for role in roles:
            self.ask(role, wire.StatusRequest(), "observer", timeout_s=60)

    def key(self, name: str) -> Keys:
        return read_keys(self.server if name == "owner" else key_path(self.server, name))

    def ask(self, role: str, message: wire.Message, key: str, *, timeout_s: float = 20) -> Any:
        if (role, key) not in self.askers:
            self.askers[role, key] = Requester(endpoint(self.config, role), keys=self.key(key), resend_s=5.0)
        return self.askers[role, key].request(message, timeout_s=timeout_s).message

    def producer(self, name: str, *, key: str = "producer") -> ProducerClient:
        return ProducerClient(endpoint(self.config, "buffer"), name=name, keys=self.key(key), timeout_s=60)

    def learner(self) -> LearnerClient:
        client = LearnerClient(endpoint(self.config, "buffer"), name="learner", keys=self.key("owner"), timeout_s=60)
        client.hello("model")
        client.register(step=0, ledger="", takeover=False, fingerprint="model", digests={0: "d0"})
        return client

    def log(self, role: str) -> str:
        return (self.run.logs / f"{role}.log").read_text()

    def hang_up(self) -> None:
        for asker in self.askers.values():
            asker.close()
        self.askers.clear()

    def stop(self) -> None:
        for role, process in self.processes.items():
            assert process.poll() is None, f"{role} ended: {self.log(role)}"
            process.terminate()
        self.hang_up()
        assert [process.wait(30) for process in self.processes.values()] == [0] * len(self.processes)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.hang_up()
    for process in made.processes.values():
        process.kill()
        process.wait(60)


@pytest.mark.long
def test_every_message_with_every_key(host: Host) -> None:
    """What the table forbids is refused before anything else; what it allows is not."""
    host.start("buffer", "weightsync")
    tried = 0
    for message in fuzzing.examples():
        if type(message) not in ALLOWED:
            continue
        short = {"wait_s": 0.0} if hasattr(message, "wait_s") else {}
        for role in GUESTS:
            spoken = [msgspec.structs.replace(message, **short)]
            if isinstance(message, (wire.Hello, wire.Heartbeat)):
                names = (*GUESTS, "learner", "owner")
                spoken = [msgspec.structs.replace(message, role=one, name=f"{role}-{one}") for one in names]
            for one in spoken:
                for service in MODULES:
                    code = ""
                    try:
                        host.ask(service, one, role)
                    except AsyncRLError as error:
                        code = error.code
                    tried += 1
                    assert (code == "config.forbidden") is not is_allowed(one, role), (role, one, code)
    assert tried > 150
    host.stop()


def outside(what: str, lease: wire.Lease) -> dict[str, Any]:
    """The arguments of samples that the configuration does not allow."""
    arguments: dict[str, Any] = {"samples": [sample(index) for index in lease.missing]}
    if what == "rewards of its own":
        arguments["rewards"] = dict.fromkeys(lease.missing, 1000.0)
    elif what == "rewards of turns":
        arguments["turns"] = dict.fromkeys(lease.missing, ((0, 1.0),))
    elif what == "60,000 tokens":
        arguments["samples"] = [sample(index, tokens=60_000) for index in lease.missing]
    elif what == "impossible log-probs":
        arguments["samples"] = [sample(index, logprob=-1e38) for index in lease.missing]
    elif what == "an image that it never sent":
        arguments["row"] = {"images": ["a" * 64]}
    elif what == "an image of a turn that it never sent":
        arguments["masks"] = {index: np.array([1, 0, 1], np.uint8) for index in lease.missing}
        arguments["images"] = dict.fromkeys(lease.missing, ((1, "a" * 64),))
    elif what == "an image named by a path":
        arguments["masks"] = {index: np.array([1, 0, 1], np.uint8) for index in lease.missing}
        arguments["images"] = dict.fromkeys(lease.missing, ((1, "/" * 64),))
    elif what == "a long digest":
        arguments["digests"] = {0: "d" * 65}
    elif what == "a long prompt":
        arguments["prompt_ids"] = np.zeros(5000, np.int32)
    elif what == "many sequences":
        tokens = np.zeros(12, np.int32)
        made = [GenDelta(str(i), i, tokens, np.zeros(12, np.float32), ((0, 12),), "stop") for i in lease.missing]
        masks = {index: np.array([0, 1] * 6, np.uint8) for index in lease.missing}
        arguments |= {"samples": made, "masks": masks, "rows": dict.fromkeys(lease.missing, ((0, 1), (2, 1), (4, 1)))}
    return arguments


OUTSIDE = (
    "rewards of its own", "rewards of turns", "60,000 tokens", "impossible log-probs", "a long prompt",
    "many sequences", "an image that it never sent", "an image of a turn that it never sent",
    "an image named by a path", "a long digest",
)  # fmt: skip


async def lease_one(client: ProducerClient) -> wire.Lease:
    found = await client.lease(engine_version=0, max_groups=1, wait_s=20.0)
    assert found.leases, found.reason
    return found.leases[0]


async def submit(client: ProducerClient, lease: wire.Lease, **changes: Any) -> wire.SamplesReply:
    arguments = {"prompt_ids": np.array([1, 7], np.int32), "digests": {0: "d0"}, "row": {}, **changes}
    return await client.submit(lease, **arguments)


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_producer_loses_its_own_work_alone(host: Host, what: str) -> None:
    add_key(host.server, "producer", "hostile")
    host.start("buffer")
    learner = host.learner()

    async def play() -> None:
        guest, honest = host.producer("guest", key="hostile"), host.producer("honest")
        await guest.hello()
        await honest.hello()
        lease = await lease_one(guest)
        reply = await submit(guest, lease, **outside(what, lease))
        assert not reply.accepted and all(why.startswith("poison: ") for why in reply.refused.values()), reply
        waits = await guest.lease(engine_version=0, max_groups=8, wait_s=0.0)
        assert not waits.leases and "no work for" in waits.reason, waits
        again = await lease_one(honest)
        assert again.group == lease.group, "the prompt is not lost"
        samples = [sample(index) for index in again.missing]
        assert (await submit(honest, again, samples=samples)).accepted == again.missing
        guest.close()
        honest.close()

    asyncio.run(play())
    learner.close()
    host.stop()


def test_bytes_that_are_no_image_are_not_stored(host: Host) -> None:
    """Neither what came with them; the sender gets no work for a while."""
    add_key(host.server, "producer", "hostile")
    host.start("buffer")
    learner = host.learner()
    buffer = BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    good, bad = buffer.getvalue(), b"<svg onload='alert(1)'/>"

    async def play() -> None:
        guest = host.producer("guest", key="hostile")
        await guest.hello()
        for named in ([good, bad], [good, good]):  # the second one is sent under another name
            digests = tuple(map(image_digest, named)) if bad in named else (image_digest(good), "0" * 64)
            with pytest.raises(WorkError) as refused:
                await guest._ask(wire.StoreImages("guest", digests), named)
            assert refused.value.code == "image.invalid"
        waits = await guest.lease(engine_version=0, max_groups=8, wait_s=0.0)
        assert not waits.leases and "no work for" in waits.reason, waits
        guest.close()

    asyncio.run(play())
    assert not host.run.images.exists()
    learner.close()
    host.stop()


@pytest.mark.parametrize("reward", [1e308, -2e6, float("nan"), float("inf")])
def test_a_reward_beyond_the_limit_is_a_failure_and_never_a_score(host: Host, reward: float) -> None:
    host.start("buffer")
    learner = host.learner()

    async def play() -> None:
        producer = host.producer("p")
        await producer.hello()
        lease = await lease_one(producer)
        await submit(producer, lease, samples=[sample(index) for index in lease.missing])
        worker = RewardClient(endpoint(host.config, "buffer"), name="r", keys=host.key("reward"), timeout_s=60)
        await worker.hello()
        tasks, _ = await worker.work(max_samples=8, wait_s=10.0)
        await worker.submit([wire.Score(one.item.group, one.item.index, one.item.token, reward) for one in tasks])
        worker.close()
        producer.close()

    asyncio.run(play())
    status = msgspec.json.decode(host.ask("buffer", wire.StatusRequest(), "observer").json)
    [judge] = status["judges"]
    assert (judge["failures"], judge["scored"]) == (2, 0), status
    learner.close()
    host.stop()


def test_the_model_of_the_run_is_named_by_its_owner(host: Host) -> None:
    """The first to introduce itself after a restart says nothing about the model."""
    host.start("buffer")

    async def join(name: str, model: str) -> ProducerClient:
        client = host.producer(name)
        await client.hello(model)
        return client

    async def early() -> list[ProducerClient]:
        return [await join("evil", "evil-model"), await join("honest", "model")]

    async def later(evil: ProducerClient, honest: ProducerClient) -> None:
        assert (await honest.lease(engine_version=0, max_groups=1, wait_s=10.0)).leases
        for _ in range(2):  # asking again does not help
            with pytest.raises(HandshakeError, match="evil-model"):
                await evil.lease(engine_version=0, max_groups=1, wait_s=0.0)
        with pytest.raises(HandshakeError, match="the run has model"):
            await join("late", "evil-model")
        for client in (evil, honest):
            client.close()

    async def play() -> None:
        clients = await early()
        learner = await asyncio.to_thread(host.learner)
        await later(*clients)
        learner.close()

    asyncio.run(play())
    host.stop()


def test_invented_names_fill_neither_memory_nor_disk(host: Host) -> None:
    host.start("buffer")
    asker = Requester(endpoint(host.config, "buffer"), keys=host.key("producer"), resend_s=5.0)
    refused = 0
    for number in range(MOST_NAMES + 200):
        beat = wire.Heartbeat("producer", f"made-up-{number}", 1, "h", "x" * 20_000)
        try:
            asker.request(beat, timeout_s=60)
        except HandshakeError:
            refused += 1
    assert refused == 200
    for _ in range(200):
        asker.request(wire.Heartbeat("producer", "made-up-0", 1, "h", "x" * 20_000), timeout_s=60)
    asker.close()
    lines = (host.run.metrics / "roles.jsonl").read_bytes()
    assert len(lines) < 2_000 * MOST_NAMES and lines.count(b'"made-up-0"') < 100
    host.stop()


def test_a_name_cannot_be_taken_from_its_process(host: Host) -> None:
    add_key(host.server, "producer", "other")
    host.start("buffer")
    learner = host.learner()

    async def play() -> None:
        first, namesake, thief = host.producer("p"), host.producer("p"), host.producer("p", key="other")
        namesake._pid += 1
        await first.hello()
        lease = await lease_one(first)
        for second in (namesake, thief):
            with pytest.raises(HandshakeError, match=f"belongs to pid {first._pid} on "):
                await second.hello()
        with pytest.raises(HandshakeError):
            await thief.lease(engine_version=0, max_groups=1, wait_s=0.0)
        namesake.may_rename = thief.may_rename = True
        for second in (namesake, thief):
            await second.hello()
            assert second.name.startswith("p-")
        assert (await submit(first, lease, samples=[sample(i) for i in lease.missing])).accepted == lease.missing
        for client in (first, namesake, thief):
            client.close()

    asyncio.run(play())
    learner.close()
    host.stop()


def test_a_key_that_is_revoked_is_refused_on_the_connection_that_it_has(host: Host) -> None:
    path = add_key(host.server, "observer", "guest")
    host.start("buffer")
    asker = Requester(endpoint(host.config, "buffer"), keys=read_keys(path), resend_s=0.5)
    assert isinstance(asker.request(wire.StatusRequest(), timeout_s=60).message, wire.StatusReply)
    revoke_key(host.server, "guest")
    deadline = time.monotonic() + 60
    with pytest.raises(AsyncRLError, match="a key that was revoked") as caught:
        while time.monotonic() < deadline:
            asker.request(wire.StatusRequest(), timeout_s=60)
            time.sleep(0.1)
    assert caught.value.code == "config.forbidden"
    asker.close()
    assert isinstance(host.ask("buffer", wire.StatusRequest(), "observer"), wire.StatusReply)
    host.stop()
