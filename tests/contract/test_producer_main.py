"""The producer's main loop with the hf engine, against a buffer that this test plays on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from bare_config import BARE
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl import wire
from asyncrl.config import Config, parse
from asyncrl.config.sections.evaluation import EvaluationConfig
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import AsyncRLError
from asyncrl.evaluation.ids import evaluation_group
from asyncrl.metrics import CATALOGUE
from asyncrl.net.addresses import ipc_address
from asyncrl.net.responder import Call, Responder
from asyncrl.runtime import role
from asyncrl.wire import Manifest
from producers import main, worker
from producers.rollout.capacity import Capacity
from producers.support.retry import Patience
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors

IDS = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789+="])}
GROUP = 4


class Buffer:
    """Leases `total` groups, checks and keeps what comes back; `lose` refuses these groups as a lost lease."""

    def __init__(self, total: int, *, lose: tuple[int, ...] = (), down_for: int = 0) -> None:
        self.total, self.lose, self.down_for = total, lose, down_for
        self.cancel_by_beat: set[int] = set()
        self.cancel_by_reply: set[int] = set()
        self.next = 0
        self.messages: dict[int, list[tuple[wire.Samples, bytes]]] = {}
        self.returned: dict[int, tuple[str, bool]] = {}
        self.asked: list[tuple[int, int]] = []  # version, groups
        self.beats: list[wire.Heartbeat] = []
        self.counts: Counter[str] = Counter()
        self.fingerprint = ""

    def handle(self, calls: list[Call]) -> None:
        for call in calls:
            message = call.message
            self.counts[type(message).__name__] += 1
            match message:
                case wire.Hello():
                    self.fingerprint = message.fingerprint
                    call.reply(wire.Welcome("run", 1, 1, 0, {"weightsync": "ipc:///none"}))
                case wire.LeaseRequest():
                    self._lease(call, message)
                case wire.Samples():
                    self._samples(call, message)
                case wire.LeaseReturn():
                    self.returned |= {group: (message.reason, message.dead) for group, _ in message.groups}
                    call.reply(wire.Ok())
                case wire.Heartbeat():
                    self.beats.append(message)
                    leased = sorted(group for group in self.cancel_by_beat if group < self.next)
                    call.reply(wire.Ok(cancelled=tuple((group, 70 + group) for group in leased)))

    def _lease(self, call: Call, message: wire.LeaseRequest) -> None:
        if self.down_for:
            self.down_for -= 1
            call.reply(wire.Refused("store.unreachable", "Redis is away"))
            return
        self.asked.append((message.engine_version, message.max_groups))
        count = min(message.max_groups, self.total - self.next, 3)
        leases = tuple(
            wire.Lease(group, 70 + group, 1, tuple(range(GROUP)), 1000 + group, 4)
            for group in range(self.next, self.next + count)
        )
        self.next += count
        call.reply(wire.Leases(leases, 0, done=self.next == self.total and not count))

    def _samples(self, call: Call, message: wire.Samples) -> None:
        payload = bytes(call.payloads[0])
        assert wire.validate_samples(message, payload, group_size=GROUP, vocab_size=len(IDS)) == ""
        assert message.token == 70 + message.group
        self.messages.setdefault(message.group, []).append((message, payload))
        indices = tuple(item.index for item in message.samples)
        if message.group in self.lose:
            call.reply(wire.SamplesReply((), (), dict.fromkeys(indices, "token: the lease was lost")))
        else:
            wanted = message.group not in self.cancel_by_reply
            call.reply(wire.SamplesReply(indices, cancelled=() if wanted else ((message.group, message.token),)))

    def samples_of(self, group: int) -> dict[int, wire.SampleHead]:
        return {item.index: item for message, _ in self.messages.get(group, []) for item in message.samples}


class FakeReceiver:
    """Commits version 0 at once and then a new one every 30 ms, like a service would."""

    versions = 3

    def __init__(self, address: str, *, engine: Any, name: str, keys: Any, config: Any, insecure: bool) -> None:
        self.engine, self.version, self.digests = engine, -1, {}
        self.waiting_for = "the first weights"

    async def run(self, stop: asyncio.Event) -> None:
        for version in range(self.versions):
            model = make_model(version)
            raw = {n: p.detach().contiguous().flatten().view(torch.uint8).numpy() for n, p in model.named_parameters()}
            plan = plan_buckets(
                [TensorSpec(n, "F32", tuple(p.shape)) for n, p in model.named_parameters()], bucket_bytes=1 << 20
            )
            data = bytearray(plan.bucket_bytes[0])
            for tensor in plan.tensors:
                data[tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
            digests, whole = digest_tensors(plan.tensors, lambda name, raw=raw: raw[name])
            manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, whole)
            await self.engine.begin_update(manifest, plan.tensors)
            await self.engine.apply_bucket(0, data)
            assert await self.engine.commit_update() == whole
            await asyncio.sleep(0.02)  # the acknowledgement is on its way while samples end under the new version
            self.version, self.digests[version] = version, whole
            await self.between(version)
        await stop.wait()

    async def between(self, version: int) -> None:
        """Before the next version."""
        await asyncio.sleep(0.03)

    async def wait_version(self, at_least: int, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while self.version < at_least:
                await asyncio.sleep(0.005)

    async def wait_newer(self, version: int, timeout_s: float) -> bool:
        try:
            await self.wait_version(version + 1, timeout_s)
        except TimeoutError:
            return False
        return True


def make_model(seed: int) -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(IDS),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=128,
                tie_word_embeddings=True,
                eos_token_id=2,
            )
        )


def prepare(tmp_path: Path, rows: list[dict[str, Any]], **limits: Any) -> Config:
    model = tmp_path / "model"
    make_model(9).save_pretrained(model)
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.save(str(model / "tokenizer.json"))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse(f"""
[run]
dir = "{tmp_path}/run"
[model]
path = "{model}"
dtype = "float32"
[data]
path = "{tmp_path}/data.jsonl"
max_prompt_tokens = 8
shuffle = false
[sampling]
group_size = {GROUP}
max_new_tokens = {limits.pop("max_new_tokens", 40)}
[producers]
slots = 8
device = "cpu"
[log]
heartbeat_s = 0.05
[[reward]]
function = "none:none"
""")


async def no_probe(*_: Any) -> None:
    """The versions here change faster than a probe ends, and its tokens would be counted."""


def produce(
    tmp_path: Path,
    config: Config,
    buffer: Buffer,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stop_when: Any = None,
    receiver: Any = FakeReceiver,
) -> None:
    monkeypatch.setattr(main, "Receiver", receiver)
    monkeypatch.setattr(worker, "check_logprobs", no_probe)

    async def whole() -> None:
        responder = Responder(ipc_address(tmp_path / "s", "buffer"), buffer.handle)
        stop = role.Stop()
        args = role.arguments("producer", ["--config", "x", "--name", "p0", "--connect", responder.address])

        async def watch() -> None:
            while not stop_when():
                await asyncio.sleep(0.005)
            stop.set("SIGTERM")

        watching = asyncio.create_task(watch()) if stop_when is not None else None
        try:
            await asyncio.wait_for(main.produce(args, config, stop), 120)
        finally:
            if watching is not None:
                watching.cancel()
            await asyncio.sleep(0.05)
            responder.close()

    asyncio.run(whole())


ROWS = [{"prompt": f"{number}+1=", "ground_truth": str(number + 1), "data_source": "add"} for number in range(9)]


def test_a_whole_run_with_weights_changing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS[:4], {"prompt": "1" * 9}, *ROWS[5:]]  # row 4 is too long
    buffer = Buffer(30)

    class AfterSamples(FakeReceiver):
        async def between(self, version: int) -> None:
            while not buffer.messages:  # some have tokens of version 0
                await asyncio.sleep(0.005)
            await super().between(version)

    produce(tmp_path, prepare(tmp_path, rows), buffer, monkeypatch, receiver=AfterSamples)
    dead = {group for group in range(30) if group % 9 == 4}
    assert {group: dead for group, (_, dead) in buffer.returned.items()} == dict.fromkeys(dead, True)
    assert all("too_long" in reason for reason, _ in buffer.returned.values())
    for group in set(range(30)) - dead:
        assert sorted(buffer.samples_of(group)) == list(range(GROUP))
        for message, payload in buffer.messages[group]:
            assert json.loads(message.row) == rows[group % 9]
            arrays = wire.unpack_arrays(message.fields, payload)
            assert arrays["prompt"].tolist() == [IDS[character] for character in rows[group % 9]["prompt"]]
            versions = {version for item in message.samples for version, _ in item.runs}
            assert set(message.digests) == versions and all(message.digests.values())
    runs = [run for group in buffer.messages for item in buffer.samples_of(group).values() for run in item.runs]
    seen = {version for version, _ in runs}
    assert 0 in seen and len(seen) > 1
    assert all(version >= 0 and 1 <= groups <= 4 for version, groups in buffer.asked)  # 2 x 8 slots / 4
    versions = [version for version, _ in buffer.asked]
    assert versions == sorted(versions)
    assert buffer.fingerprint
    assert buffer.beats and all(set(beat.stats) <= set(CATALOGUE) for beat in buffer.beats)
    assert buffer.beats[0].waiting_for == "the first weights" and buffer.beats[0].stats["engine_version"] == -1


def test_samples_leave_as_they_finish_and_those_of_a_step_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = Buffer(6)
    produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch)
    assert all(sorted(buffer.samples_of(group)) == list(range(GROUP)) for group in range(6))
    assert any(len(messages) > 1 for messages in buffer.messages.values())  # not held back for the group
    together = Buffer(6)
    (tmp_path / "b").mkdir()
    produce(tmp_path / "b", prepare(tmp_path / "b", ROWS, max_new_tokens=1), together, monkeypatch)
    assert all(len(messages) == 1 for messages in together.messages.values())  # one token: all end in one step


def test_a_lost_lease_ends_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer(8, lose=(1, 2))
    produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch)
    assert all(len(buffer.messages[group]) == 1 for group in (1, 2))
    assert sum(len(buffer.samples_of(group)) for group in (1, 2)) < 2 * GROUP
    assert buffer.beats[-1].stats["refused_samples"] >= 0
    assert all(sorted(buffer.samples_of(group)) == list(range(GROUP)) for group in (0, 3, 4, 5, 6, 7))


def test_cancelled_leases_are_given_up_at_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines.hf.engine import HFEngine

    aborted: list[str] = []
    real = HFEngine.abort

    async def abort(self: HFEngine, ids: Any) -> int:
        aborted.extend(ids or ())
        return await real(self, ids)

    monkeypatch.setattr(HFEngine, "abort", abort)
    buffer = Buffer(60)
    buffer.cancel_by_beat, buffer.cancel_by_reply = set(range(1, 60, 4)), set(range(3, 60, 4))
    produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch)
    given_up = {int(name.partition(":")[0]) for name in aborted}
    assert given_up & buffer.cancel_by_beat and given_up & buffer.cancel_by_reply
    assert all(len(buffer.messages[group]) == 1 for group in buffer.cancel_by_reply)
    short = [group for group in buffer.cancel_by_beat if len(buffer.samples_of(group)) < GROUP]
    assert short  # nobody waits for the samples that are missing
    assert all(sorted(buffer.samples_of(group)) == list(range(GROUP)) for group in range(0, 60, 2))
    assert not buffer.returned


def test_a_buffer_that_is_away_for_a_while_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer(4, down_for=3)
    produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch)
    assert all(sorted(buffer.samples_of(group)) == list(range(GROUP)) for group in range(4))


def test_a_stop_gives_the_leases_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer(10**6)
    produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch, stop_when=lambda: len(buffer.messages) > 10)
    complete = {group for group in buffer.messages if len(buffer.samples_of(group)) == GROUP}
    # Every lease is answered or returned; one whose last answer was under way may be both, which a buffer ignores.
    assert set(range(buffer.next)) - complete <= set(buffer.returned) <= set(range(buffer.next))
    assert set(buffer.returned.values()) == {("stopping", False)}


def test_a_broken_engine_ends_the_process_and_returns_the_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(FakeReceiver):
        versions = 1

        async def run(self, stop: asyncio.Event) -> None:
            inner = asyncio.create_task(super().run(stop))
            await asyncio.sleep(0.3)

            def explode(*_: Any, **__: Any) -> Any:
                raise RuntimeError("CUDA error, say")

            self.engine._model.forward = explode
            await inner

    buffer = Buffer(10**6)
    with pytest.raises(AsyncRLError) as caught:
        produce(tmp_path, prepare(tmp_path, ROWS), buffer, monkeypatch, receiver=Breaks)
    assert (caught.value.code, caught.value.exit_code) == ("engine.broken", 70) and "CUDA" in caught.value.message
    assert buffer.returned and {reason for reason, _ in buffer.returned.values()} == {"engine.broken"}


def test_bad_data_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AsyncRLError) as caught:
        produce(tmp_path, prepare(tmp_path, [{"question": "x"}]), Buffer(1), monkeypatch)
    assert caught.value.code == "config.data"


def test_nothing_is_leased_while_the_engine_is_of_no_version() -> None:
    """An update in place: a lease now would only wait, and lapse."""
    producer: Any = object.__new__(worker.Producer)
    producer.engine = SimpleNamespace(health=lambda: SimpleNamespace(version=-1))
    waits: list[int] = []

    async def wait_newer(version: int, timeout_s: float) -> bool:
        waits.append(version)
        return True

    producer.receiver = SimpleNamespace(waiting_for="version 4 by stream", version=3, wait_newer=wait_newer)
    producer.client = None  # asking would fail
    assert asyncio.run(producer._ask(3)) is False
    assert producer.waiting_for == "version 4 by stream"
    assert waits == [3]  # for the commit, not for a fixed time


@pytest.mark.parametrize("crossed", [False, True], ids=["it waited", "it was granted meanwhile"])
def test_a_request_that_waits_is_made_anew_when_the_version_changes(crossed: bool) -> None:
    """Else a synchronous run would lose the rest of the long poll in every step."""
    asked: list[int] = []
    started: list[int] = []

    async def whole() -> bool:
        superseded, committed = asyncio.Event(), asyncio.Event()

        async def lease(*, engine_version: int, max_groups: int, wait_s: float, kept: int, rows: int) -> wire.Leases:
            asked.append(engine_version)
            if len(asked) == 1:
                committed.set()
                await asyncio.wait_for(superseded.wait(), 60)  # the service holds it until a newer one comes
            else:
                superseded.set()
            number = asked.index(engine_version)
            got = (wire.Lease(number, 70, 1, (0, 1), 5, 4),) if number or crossed else ()
            return wire.Leases(got, 0)

        async def wait_newer(version: int, timeout_s: float) -> bool:
            await asyncio.wait_for(committed.wait(), 60)
            health.version = producer.receiver.version = version + 1
            return True

        async def group(lease: wire.Lease) -> None:
            started.append(lease.group)

        health = SimpleNamespace(version=3)
        producer: Any = object.__new__(worker.Producer)
        producer.poll_s, producer.work, producer.waiting_for = 20.0, {}, ""
        producer.engine = SimpleNamespace(health=lambda: health)
        producer.receiver = SimpleNamespace(version=3, wait_newer=wait_newer, waiting_for="")
        producer.client = SimpleNamespace(lease=lease, interval=float)
        producer.prompts = SimpleNamespace(chosen_among=0)
        producer.patience = Patience("it", limit_s=10)
        producer.capacity = Capacity(EngineCapabilities("none", 8, 0), group_samples=2, prior_tokens=8)
        producer._group = group
        done: bool = await producer._ask(3)
        await asyncio.gather(*producer.work)
        return done

    assert asyncio.run(whole()) is False
    assert asked == [3, 4]
    assert started == ([0, 1] if crossed else [1])


def test_held_out_leases_of_a_version_that_was_left_go_back_and_the_others_start() -> None:
    started: list[int] = []
    returned: list[tuple[list[int], str]] = []
    kept: list[int] = []

    async def group(lease: wire.Lease) -> None:
        started.append(lease.group)

    async def give_back(leases: list[wire.Lease], *, reason: str) -> None:
        returned.append(([lease.group for lease in leases], reason))

    producer: Any = object.__new__(worker.Producer)
    producer.work, producer.waiting_for, producer._group = {}, "", group
    producer.client = SimpleNamespace(give_back=give_back)
    producer.patience = Patience("it", limit_s=10)
    producer.capacity = Capacity(EngineCapabilities("none", 8, 0), group_samples=2, prior_tokens=8)
    producer.config = parse(BARE)
    hold = SimpleNamespace(keep=lambda version, limit_s: version == 4, release=lambda: kept.append(-1))
    producer.receiver = SimpleNamespace(hold=hold)
    held_out = evaluation_group(4, 0)

    async def whole() -> None:
        for version in (5, 4, -1):
            grant = (7,) if version < 0 else (version, held_out)
            leases = tuple(wire.Lease(number, 70, 0, (0,), 5, version) for number in grant)
            await producer._take(wire.Leases(leases, 0, hold=version))
            kept.append(producer.holds)
        await asyncio.gather(*producer.work)

    asyncio.run(whole())
    assert returned == [([held_out], "swapped")]
    assert started == [5, 4, held_out, 7]
    assert kept == [False, True, -1, False], "released once, by the answer that names no version"


class EvaluatingBuffer(Buffer):
    """Has two held-out prompts for the first version: the second one, and groups of training, only when the engine has
    a newer version. The run is done when the version is let go."""

    def __init__(self) -> None:
        super().__init__(2)
        self.held_out = [evaluation_group(0, row) for row in (0, 1)]
        self.granted: list[int] = []
        self.versions: list[tuple[int, int]] = []  # the engine's, the kept one

    def _lease(self, call: Call, message: wire.LeaseRequest) -> None:
        self.versions.append((message.engine_version, message.kept))
        newer = message.engine_version == 1
        grant = self.held_out[: 1 + newer] + [0, 1] * newer
        grant = [group for group in grant if group not in self.granted]
        self.granted += grant
        leases = [wire.Lease(group, 70 + group, 1, (0, 1), group % 1000, 0) for group in grant]
        over = all(len(self.samples_of(group)) == 2 for group in (*self.held_out, 0, 1))
        done = over and message.kept < 0
        call.reply(wire.Leases(tuple(leases), 0, done=done, hold=-1 if over else 0))


def test_held_out_prompts_get_the_kept_version_while_training_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = EvaluatingBuffer()

    class Receiver(FakeReceiver):
        versions = 2

        async def between(self, version: int) -> None:
            """Not before the first version is kept: without it the held-out prompts would be given back."""
            while all(kept < 0 for _, kept in buffer.versions):  # bounded: the test has a deadline
                await asyncio.sleep(0.005)

    config = prepare(tmp_path, ROWS)
    path = str(tmp_path / "data.jsonl")
    evaluation = EvaluationConfig(path=path, samples=2, temperature=1.0, lane="second_weights")
    produce(tmp_path, msgspec.structs.replace(config, evaluation=evaluation), buffer, monkeypatch, receiver=Receiver)
    for group, version in ((buffer.held_out[0], 0), (buffer.held_out[1], 0), (0, 1), (1, 1)):
        samples = buffer.samples_of(group)
        assert sorted(samples) == [0, 1]
        assert all({made for made, _ in item.runs} == {version} for item in samples.values()), (group, samples)
        assert {*buffer.messages[group][0][0].digests} == {version}
    assert not buffer.returned
    assert {(0, 0), (1, 0)} >= {pair for pair in buffer.versions if pair[1] == 0} >= {(1, 0)}
    assert buffer.versions[-1] == (1, -1), "let go when the buffer needs it no more"
