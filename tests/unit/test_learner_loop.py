"""The learner's loop, checkpoints and services on one rank, against fakes of the buffer and of weight sync."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from made_batches import a_batch, a_group, a_sample

from asyncrl import config as configuration
from asyncrl.errors import AsyncRLError, Fenced, StateLost
from asyncrl.runs.exported import exported_step
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import NotYet
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.checkpoints import checkpoint
from learners.gang.gang import Gang
from learners.gang.watchdog import Watchdog
from learners.heartbeat import Heart
from learners.loop import Learner
from learners.rank_zero import Services
from learners.step.lr_schedule import learning_rate
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors, version_digest
from weightsync.staging import Staging


def make_batch(step: int, *, groups: int = 3, replayed: bool = False, invalid: dict[int, str] | None = None) -> Any:
    rng = np.random.default_rng(step)
    made = []
    for number in range(groups):
        prompt = rng.integers(3, 20, rng.integers(2, 6)).astype(np.int32)
        samples = []
        for index in range(4):
            length = int(rng.integers(1, 12))
            samples.append(
                a_sample(
                    index,
                    rng.integers(3, 20, length),
                    -rng.random(length),
                    index % 2,
                    runs=((max(step - 2, 0), length),),
                    parts={"exact": float(index % 2)},
                )
            )
        made.append(a_group(step * 100 + number, prompt, samples, bound=2))
    return a_batch(step, step - 1, made, replayed=replayed, invalid=invalid)


class FakeBuffer:
    """Remembers what it is told, in order; gives batches made from the step's number."""

    def __init__(self, *, replay_to: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.replay_to = replay_to
        self.batches: dict[int, Any] = {}
        self.on_claim = lambda step: None

    def register(self, *, step: int, ledger: str, takeover: bool, fingerprint: str, digests: dict[int, str]) -> Any:
        self.calls.append(("register", step, ledger))
        return SimpleNamespace(epoch=1, replay_to=self.replay_to)

    def claim(self, *, step: int, version: int, wait_s: float) -> Any:
        self.calls.append(("claim", step, version))
        answer = self.on_claim(step)
        return answer or self.batches.get(step) or make_batch(step, replayed=step <= self.replay_to)

    def commit(self, *, step: int, version: int, digest: str) -> None:
        self.calls.append(("commit", step, version, digest))

    def quarantine(self, *, step: int, groups: Any, reason: str) -> None:
        self.calls.append(("quarantine", step, tuple(groups), reason))

    def ledger(self, *, step: int) -> str:
        self.calls.append(("ledger", step))
        return json.dumps({"epoch": 1, "trained_to": step})

    def checkpointed(self, *, step: int) -> None:
        self.calls.append(("checkpointed", step))

    def goodbye(self, *, done: bool, reason: str) -> None:
        self.calls.append(("goodbye", done))

    def close(self, *, hurry: bool = False) -> None:
        self.calls.append(("close",))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class FakePublisher:
    stage_wanted = -1

    def __init__(self, buffer: FakeBuffer, *, committed: int = -1) -> None:
        self.digests: dict[int, str] = {}
        self.stats: dict[str, float] = {}
        self.settled = 0
        self._buffer = buffer
        self._committed = committed

    def start(self, *, epoch: int) -> None:
        self._buffer.calls.append(("start", epoch))

    def committed_version(self) -> int:
        return self._committed

    def publish(self, version: int, plan: Any, chunks: Any) -> Any:
        if callable(chunks):
            staging = Staging(Path(tempfile.gettempdir()))
            try:
                digest = version_digest(chunks(staging)[1])
            finally:
                staging.close()
        else:
            held = {name: bytes(data) for name, data in chunks}  # at once: nothing is left to settle
            assert list(held) == [tensor.name for tensor in plan.tensors]
            digest = digest_tensors(plan.tensors, held.__getitem__)[1]
        self.digests[version] = digest
        self._buffer.calls.append(("publish", version))
        return SimpleNamespace(digest=digest, version=version)

    def settle(self) -> None:
        self.settled += 1

    def close(self, *, hurry: bool = False) -> None:
        self._buffer.calls.append(("unpublish",))


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        made = Gang.join(configuration.parse('model.path="m"\ndata.source="a:b"\n[[reward]]\nfunction="a:b"'))
        yield made
        made.leave()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=2, head_dim=8, mlp_size=48))
    return folder


def make_config(
    model_dir: Path, run: Path, *, steps: int = 3, lr: float = 1e-3, extra: str = ""
) -> configuration.Config:
    return configuration.parse(f"""
model.path = "{model_dir}"
model.dtype = "float32"
run.dir = "{run}"
data.source = "a:b"
data.max_prompt_tokens = 16
sampling.max_new_tokens = 16
sampling.group_size = 4
buffer.batch_groups = 3
learner.steps = {steps}
learner.micro_batch_tokens = 64
learner.checkpoint_every = 2
learner.optim.lr = {lr}
learner.engine_gap = "warn"
log.tensorboard = false
{extra}
[[reward]]
function = "a:b"
""")


def make_learner(
    config: configuration.Config, gang: Gang, *, committed: int = -1, replay_to: int = 0, stop: Stop | None = None
) -> tuple[Learner, FakeBuffer, FSDP2Backend, Services]:
    torch.manual_seed(0)
    backend = FSDP2Backend(config, gang)
    backend.self_check()
    buffer = FakeBuffer(replay_to=replay_to)
    specs = [TensorSpec(*spec) for spec in backend.weight_specs()]
    services = Services(
        config,
        buffer=buffer,
        publisher=FakePublisher(buffer, committed=committed),
        plan=plan_buckets(specs, bucket_bytes=1 << 16),
        stop=stop or Stop(),
    )
    return Learner(config, gang=gang, backend=backend, services=services), buffer, backend, services


def weights(backend: FSDP2Backend) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in backend.iter_hf_weights()}


def test_a_whole_run_in_order(gang: Gang, model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_config(model_dir, tmp_path / "run", extra="log.samples_per_step = 2")
    learner, buffer, backend, services = make_learner(config, gang)
    before = weights(backend)
    assert learner.run() == ""
    services.close()
    # The log-probs of the batches are invented: at lag 0 (version 0 in step 1) they cannot be those of the model.
    assert capfd.readouterr().out.count("WARNING: engine and learner differ by") == 1
    assert buffer.names() == [
        "register",
        "start",
        "publish",
        "claim",
        "publish",
        "commit",
        "claim",
        "publish",
        "commit",
        "ledger",
        "checkpointed",
        "claim",
        "publish",
        "commit",
        "ledger",
        "checkpointed",
        "ledger",
        "goodbye",
        "unpublish",
        "close",
    ]
    assert [call[1:3] for call in buffer.calls if call[0] == "claim"] == [(1, 0), (2, 1), (3, 2)]
    assert [call[1:] for call in buffer.calls if call[0] == "publish"] == [(0,), (1,), (2,), (3,)]
    assert all(len(call[3]) == 32 for call in buffer.calls if call[0] == "commit")
    assert weights(backend) != before
    run = RunDir(config.run_dir)
    lines = [json.loads(line) for line in (run.metrics / "learner.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["lag_max"] <= 2 and "reward/exact" in line for line in lines)
    assert "skipped" not in lines[0]
    logged = [json.loads(line) for line in (run.metrics / "groups.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [1, 2, 3]
    for group, trained in zip(logged[1]["groups"], make_batch(2).groups, strict=True):
        assert group["g"] == trained.group and group["indexes"] == [sample.index for sample in trained.samples]
        assert group["tokens"] == [sample.response.size for sample in trained.samples]
        assert abs(sum(group["advantages"])) < 1e-4 and all(0 < weight <= 2 for weight in group["weights"])
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert len(samples) == 6 and {"step", "group", "lag", "prompt", "response", "reward"} <= samples[0].keys()
    result = json.loads(run.result.read_text())
    assert result["steps"] == 3 and result["reward_last5"] == 0.5 and result["ledger"] == {"epoch": 1, "trained_to": 3}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {p.name for p in run.export.iterdir()}
    assert exported_step(run) == 3


def test_tuned_settings_are_in_force_for_exactly_their_step(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    def final(name: str, tuning: dict[int, str]) -> tuple[dict[str, bytes], Any]:
        learner, buffer, backend, services = make_learner(make_config(model_dir, tmp_path / name), gang)
        for step, text in tuning.items():
            buffer.batches[step] = msgspec.structs.replace(make_batch(step), tuning=text)
        learner.run()
        services.close()
        return weights(backend), learner._runner

    plain, _ = final("plain", {})
    entropy = '{"learner.algorithm.entropy_coeff": 0.5}'
    one, trial = final("one", {2: entropy})
    assert trial._config.algorithm.entropy_coeff == 0.0  # of step 3: back to the configuration
    assert one != plain and final("again", {2: entropy})[0] == one
    assert final("all", {1: entropy, 2: entropy, 3: entropy})[0] not in (one, plain)
    with pytest.raises(AsyncRLError) as refused:
        final("wrong", {1: '{"learner.optim.lr": 1.0}'})
    assert refused.value.code == "tune.refused" and "learner.optim.lr" in refused.value.message
    with pytest.raises(AsyncRLError) as refused:
        final("worse", {1: '{"learner.algorithm.clip_low": -1}'})
    assert refused.value.code == "tune.refused"


def test_a_restart_is_bitwise_and_replays_without_publishing(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    whole, _, reference, services = make_learner(make_config(model_dir, tmp_path / "whole", steps=5), gang)
    whole.run()
    services.close()
    config = make_config(model_dir, tmp_path / "cut", steps=5)
    first, buffer, _, services = make_learner(config, gang)

    def die(step: int) -> None:
        if step == 4:  # after the commit of step 3; the newest checkpoint is of step 2
            raise Fenced("fenced", "another learner")

    buffer.on_claim = die
    with pytest.raises(Fenced) as caught:
        first.run()
    assert caught.value.exit_code == 75
    services.close()
    second, buffer, backend, services = make_learner(config, gang, committed=4, replay_to=4)
    assert second.run() == ""
    services.close()
    assert buffer.calls[0] == ("register", 2, '{"epoch": 1, "trained_to": 2}')
    assert [call[1] for call in buffer.calls if call[0] == "claim"] == [3, 4, 5]
    # Generators hold version 4: 3 was left behind, 4 is published again, 5 is new.
    assert [call[1] for call in buffer.calls if call[0] == "publish"] == [4, 5]
    assert weights(backend) == weights(reference)


def test_a_stop_between_steps_leaves_a_checkpoint(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    stop = Stop()
    learner, buffer, _, services = make_learner(make_config(model_dir, tmp_path / "run"), gang, stop=stop)
    buffer.on_claim = lambda step: stop.set("SIGTERM") if step == 1 else None
    assert learner.run() == "asked to stop"
    services.close()
    assert buffer.calls[buffer.names().index("commit")][:2] == ("commit", 1)
    assert buffer.names()[-5:] == ["ledger", "checkpointed", "goodbye", "unpublish", "close"]
    assert ("goodbye", False) in buffer.calls
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None and found[0].step == 1
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_batch_that_never_comes_is_a_hang_with_its_diagnosis(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    config = make_config(model_dir, tmp_path / "run", extra="learner.batch_timeout_s = 0.05")
    learner, buffer, _, services = make_learner(config, gang)
    buffer.on_claim = lambda step: NotYet("group 317: leased to producer-3, silent for 231 s", 1, 3)
    with pytest.raises(AsyncRLError, match="producer-3") as caught:
        learner.run()
    services.close()
    assert caught.value.code == "hang"


def test_bad_groups_are_quarantined_and_an_empty_batch_changes_nothing(
    gang: Gang, model_dir: Path, tmp_path: Path
) -> None:
    learner, buffer, backend, services = make_learner(make_config(model_dir, tmp_path / "run", steps=1), gang)
    batch = make_batch(1, groups=2, invalid={7: "logprobs: not finite"})
    bad = msgspec.structs.replace(batch.groups[0].samples[0], reward=float("nan"))
    long = msgspec.structs.replace(batch.groups[1].samples[0], response=np.ones(80, np.int32))
    buffer.batches[1] = msgspec.structs.replace(
        batch,
        groups=(
            msgspec.structs.replace(batch.groups[0], samples=(bad,)),
            msgspec.structs.replace(batch.groups[1], samples=(long,)),
        ),
    )
    before = weights(backend)
    learner.run()
    services.close()
    reasons = {call[2][0]: call[3].split(":")[0] for call in buffer.calls if call[0] == "quarantine"}
    assert reasons == {7: "logprobs", 100: "reward", 101: "length"}
    assert weights(backend) == before
    assert "commit" in buffer.names()


def test_batches_without_a_token_to_train_do_not_end_the_run(
    gang: Gang, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every answer was cut, or no pair has different rewards: as many steps as there are."""
    config = make_config(model_dir, tmp_path / "run", steps=5, extra="learner.algorithm.shaping.overlong_filter = true")
    learner, buffer, backend, services = make_learner(config, gang)
    for step in range(1, 6):
        batch = make_batch(step)
        groups = [
            msgspec.structs.replace(
                group, samples=tuple(msgspec.structs.replace(one, finish="length") for one in group.samples)
            )
            for group in batch.groups
        ]
        buffer.batches[step] = msgspec.structs.replace(batch, groups=tuple(groups))
    before = weights(backend)
    learner.run()
    services.close()
    assert buffer.names().count("commit") == 5 and weights(backend) == before
    assert capsys.readouterr().out.count("nothing in the batch can be trained on; the update was skipped (") == 5


def test_gradients_that_are_not_finite_are_skipped_then_end_the_run(
    gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, buffer, backend, services = make_learner(make_config(model_dir, tmp_path / "run", steps=5), gang)
    train = FSDP2Backend.train

    def broken(self: FSDP2Backend, micro: Any, loss: Any) -> Any:
        return train(self, micro, lambda *args: (loss(*args)[0] * float("nan"), loss(*args)[1]))

    monkeypatch.setattr(FSDP2Backend, "train", broken)
    before = weights(backend)
    with pytest.raises(AsyncRLError) as caught:
        learner.run()
    services.close()
    assert caught.value.code == "learner.nonfinite"
    assert weights(backend) == before
    assert buffer.names().count("commit") == 2  # the third step in a row is not committed


def test_damaged_checkpoints_are_skipped_and_cleaned(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    config = make_config(model_dir, tmp_path / "run", steps=6)
    learner, _, backend, services = make_learner(config, gang)
    learner.run()
    services.close()
    root = RunDir(config.run_dir).checkpoints
    assert checkpoint.steps_in(root) == [6, 4]  # keep = 2
    said: list[str] = []
    for name in ("shard_00000.safetensors", "state.json", "manifest.json"):
        file = root / "step_000006" / name
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(damaged)
            found = checkpoint.newest(root, say=said.append)
            assert found is not None and found[0].step == 4, name
        file.write_bytes(whole)
    assert len(said) == 9
    (root / ".step_000008.tmp").mkdir()
    (root / "step_000006" / "manifest.json").write_text("{}x")
    state = checkpoint.State(step=5, ledger="")
    checkpoint.save(root, state, step=5, backend=backend, gang=gang, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["step_000005"]
    (root / "step_000005" / "state.json").unlink()
    with pytest.raises(AsyncRLError) as caught:
        checkpoint.newest(root, say=said.append)
    assert caught.value.code == "learner.checkpoint"
    assert checkpoint.newest(tmp_path / "nothing") is None


@pytest.mark.parametrize("stage", ["shard", "state", "manifest", "rename"])
def test_a_crash_at_any_stage_of_writing_leaves_the_earlier_checkpoint(
    gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    config = make_config(model_dir, tmp_path / "run", steps=1)
    backend = FSDP2Backend(config, gang)
    root = tmp_path / "checkpoints"
    checkpoint.save(root, checkpoint.State(step=1, ledger="one"), step=1, backend=backend, gang=gang, keep=2)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write = checkpoint.write_atomic
    with monkeypatch.context() as patch:
        if stage == "shard":
            patch.setattr(backend, "save", fail)
        elif stage == "rename":
            patch.setattr(checkpoint.os, "replace", fail)
        else:
            patch.setattr(
                checkpoint, "write_atomic", lambda path, data: fail() if path.stem == stage else write(path, data)
            )
        with pytest.raises(AsyncRLError) as caught:
            checkpoint.save(root, checkpoint.State(step=2, ledger="two"), step=2, backend=backend, gang=gang, keep=2)
    assert caught.value.code == "disk.full"
    found = checkpoint.newest(root)
    assert found is not None and found[0].ledger == "one"
    checkpoint.save(root, checkpoint.State(step=2, ledger="two"), step=2, backend=backend, gang=gang, keep=1)
    assert [path.name for path in root.iterdir()] == ["step_000002"]


def test_a_learner_that_was_replaced_while_it_wrote_removes_nothing(
    gang: Gang, model_dir: Path, tmp_path: Path
) -> None:
    backend = FSDP2Backend(make_config(model_dir, tmp_path / "run", steps=1), gang)
    root = tmp_path / "checkpoints"

    def fence() -> None:
        if checkpoint.step_folder(root, 1).exists():  # hung in the sync of the folder; the other learner went on
            checkpoint.step_folder(root, 9).mkdir()
            raise Fenced("fenced", "another learner")

    with pytest.raises(Fenced):
        state = checkpoint.State(step=1, ledger="one")
        checkpoint.save(root, state, step=1, backend=backend, gang=gang, keep=1, fence=fence)
    assert checkpoint.steps_in(root) == [9, 1]


def test_a_rank_without_progress_ends_with_its_diagnosis(capfd: pytest.CaptureFixture[str]) -> None:
    import threading

    codes: list[int] = []
    ended = threading.Event()
    now = 0.0
    dog = Watchdog(
        10.0,
        diagnosis=lambda: "rank 1 waits for rank 0",
        end=lambda code: (codes.append(code), ended.set()),
        clock=lambda: now,
    )
    now = 9.0
    dog.progress()
    now = 18.0
    assert not ended.wait(1.2)
    now = 20.0
    assert ended.wait(60)
    dog.stop()
    assert codes == [70]
    said = capfd.readouterr().err
    assert "no step for 11 s. rank 1 waits for rank 0" in said and "most recent call first" in said


def test_a_rank_has_longer_until_its_first_step() -> None:
    import threading

    ended = threading.Event()
    now = 0.0
    dog = Watchdog(10.0, first_s=100.0, diagnosis=str, end=lambda _: ended.set(), clock=lambda: now)
    now = 99.0
    assert not ended.wait(1.2)
    dog.progress()
    now = 110.0
    assert ended.wait(60)
    dog.stop()


def test_the_learner_asks_for_that_time(monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path) -> None:
    from learners import main as learner_main
    from learners.gang.gang import waiting_s

    config = make_config(model_dir, tmp_path / "run", extra="run.hang_timeout_s = 20\nrun.start_timeout_s = 3600")
    made: dict[str, Any] = {}

    class Enough(Exception):
        """The watchdog was made."""

    def watch(limit_s: float, **settings: Any) -> None:
        made.update(settings, limit_s=limit_s)
        raise Enough

    monkeypatch.setattr("learners.gang.watchdog.Watchdog", watch)
    for name in ("learners.gang.gang.Gang.join", "learners.device_turns.DeviceTurns", "asyncrl.plugins.find"):
        monkeypatch.setattr(name, MagicMock())
    for name in ("_connect", "refuse_cuts"):
        monkeypatch.setattr(learner_main, name, MagicMock())
    with pytest.raises(Enough):
        learner_main._train(SimpleNamespace(), config, SimpleNamespace(), SimpleNamespace())
    assert (made["limit_s"], made["first_s"]) == (20, 3600) and waiting_s(config) == 3720


def test_heart_beats_while_the_main_thread_waits() -> None:
    beats: list[tuple[dict[str, float], str]] = []
    heart = Heart(lambda stats, waiting_for: beats.append((stats, waiting_for)), every_s=0.01)
    heart.waiting_for = "group 3"
    heart.stats = {"step": 1.0, "busy_share": float("nan")}
    import time

    deadline = time.monotonic() + 90
    while len(beats) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    heart.stop()
    assert beats[-1] == ({"step": 1.0}, "group 3")


def test_learning_rate_schedules() -> None:
    def rates(**how: Any) -> list[float]:
        optim = configuration.OptimConfig(lr=1.0, **how)
        return [round(learning_rate(optim, step=step, steps=6), 6) for step in range(1, 7)]

    assert rates() == [1, 1, 1, 1, 1, 1]
    assert rates(warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1 and cosine[3] == 0.5 and cosine == sorted(cosine, reverse=True) and cosine[-1] > 0


def test_tracker_groups_name_metrics_of_the_catalogue() -> None:
    from asyncrl.metrics import CATALOGUE
    from asyncrl.metrics.pages import FAULTS, HEALTH, SPEED, metric_tag

    known = CATALOGUE.keys() | {name.rpartition("/")[2] for name in CATALOGUE}
    assert known >= HEALTH | SPEED | FAULTS
    assert (metric_tag("lag_max"), metric_tag("step_s"), metric_tag("reward/exact")) == (
        "health/lag_max",
        "speed/step_s",
        "learning/reward/exact",
    )


def test_generators_go_back_if_the_batches_that_led_to_their_version_are_lost(
    gang: Gang, model_dir: Path, tmp_path: Path
) -> None:
    """Else the buffer gives them no work: they hold a version that nobody has trained."""
    config = make_config(model_dir, tmp_path / "run")
    learner, buffer, _, services = make_learner(config, gang, committed=2, replay_to=2)
    lost = iter([True])

    def on_claim(step: int) -> Any:
        if next(lost, False):
            buffer.replay_to = 0
            raise StateLost("buffer.lost_state", "the store was emptied")

    buffer.on_claim = on_claim
    learner.run()
    services.close()
    assert buffer.names()[:5] == ["register", "start", "claim", "register", "publish"], "it catches up at first"
    published = [call[1] for call in buffer.calls if call[0] == "publish"]
    assert published == [0, 1, 2, 3], "the weights of step 0 first"
