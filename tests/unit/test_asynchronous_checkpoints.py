"""Checkpoints that are written beside the training: what they hold, when they count, what they do when they fail.

One rank against the fakes of `test_learner_loop`; two ranks stand in `tests/distributed/checkpoint_cases.py`, kills in
`tests/faults/test_f06_asynchronous_checkpoints.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_learner_loop import FakeBuffer, gang, make_batch, make_config, make_learner, model_dir, weights  # noqa: F401

from asyncrl.config import Config, dump, parse
from asyncrl.errors import AsyncRLError, Fenced
from asyncrl.metrics import read_lines
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.checkpoints import checkpoint, retention, saving
from learners.gang.gang import Gang

ASYNC = "learner.checkpoint_async = true\n"
#: Everything that moves from step to step beside the weights.
MOVING = """
learner.optim.schedule = "cosine"
learner.optim.warmup_steps = 2
learner.algorithm.kl.where = "reward"
learner.algorithm.kl.coeff = 0.1
learner.algorithm.kl.controller = "adaptive"
learner.algorithm.kl.horizon = 100
learner.algorithm.minibatches = 2
"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], SimpleNamespace]:
    """Hold the writer at a fail-point, at its pass number so and so: `reached` is set there, `go` lets it on."""

    def hold(site: str, at: int = 1) -> SimpleNamespace:
        door = SimpleNamespace(reached=threading.Event(), go=threading.Event(), passes=0, error=None)

        def failpoint(name: str) -> None:
            door.passes += name == site
            if name == site and door.passes == at:
                door.reached.set()
                assert door.go.wait(60)
                if door.error is not None:
                    raise door.error

        monkeypatch.setattr(checkpoint, "failpoint", failpoint)
        return door

    return hold


def shard(root: Path, step: int) -> bytes:
    return (checkpoint.step_folder(root, step) / "shard_00000.safetensors").read_bytes()


def steps_said(buffer: FakeBuffer, *names: str) -> list[tuple[Any, ...]]:
    return [call[:2] for call in buffer.calls if call[0] in names]


def test_it_holds_its_own_step_however_long_it_takes(gang: Gang, model_dir: Path, tmp_path: Path, held: Any) -> None:
    whole = MOVING + "learner.checkpoint_keep = 3\n"
    plain, _, reference, services = make_learner(make_config(model_dir, tmp_path / "plain", steps=5, extra=whole), gang)
    plain.run()
    services.close()
    config = make_config(model_dir, tmp_path / "beside", steps=5, extra=ASYNC + whole)
    learner, buffer, backend, services = make_learner(config, gang)
    door = held("learner.checkpoint_state")

    def claim(step: int) -> None:
        root = RunDir(config.run_dir).checkpoints
        if step == 3:
            assert door.reached.wait(60)  # the tensors of step 2 are written, step 3 is about to train
        elif step == 4:
            assert checkpoint.steps_in(root) == []
            door.go.set()

    buffer.on_claim = claim
    assert learner.run() == ""
    services.close()
    assert weights(backend) == weights(reference)
    for step in (2, 4, 5):
        mine, other = (RunDir(tmp_path / name).checkpoints for name in ("beside", "plain"))
        assert shard(mine, step) == shard(other, step)
        (found, wanted) = (checkpoint.read_state(checkpoint.step_folder(root, step)) for root in (mine, other))
        assert (found.ledger, found.digests, found.coefficients) == (wanted.ledger, wanted.digests, wanted.coefficients)
        assert max(found.digests) == step and not checkpoint.find_problem(checkpoint.step_folder(mine, step))
    # The buffer is asked for the ledger within the step, and may forget once it is durable: not before step 4's claim.
    said = steps_said(buffer, "claim", "ledger", "checkpointed")
    assert said[:6] == [("claim", 1), ("claim", 2), ("ledger", 2), ("claim", 3), ("claim", 4), ("checkpointed", 2)]
    assert [call for call in said[6:] if call[0] == "checkpointed"] == [("checkpointed", 4), ("checkpointed", 5)]
    lines = read_lines(RunDir(config.run_dir).metrics / "learner.jsonl")
    # The write of step 2 ends after the claim of step 4: in the line of that step, or of the next.
    noted = ["checkpoint_write_s" in line for line in lines]
    assert noted[:3] == [False, False, False] and any(noted[3:])


def test_a_restart_goes_on_bitwise_from_one(gang: Gang, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811, RUF100
    """Weights, optimizer, schedule, KL controller, generator states, ledger and versions come back."""
    extra = ASYNC + MOVING
    whole, _, reference, services = make_learner(make_config(model_dir, tmp_path / "whole", steps=5, extra=extra), gang)
    whole.run()
    services.close()
    config = make_config(model_dir, tmp_path / "cut", steps=5, extra=extra)
    first, buffer, _, services = make_learner(config, gang)
    drawn: list[torch.Tensor] = []

    def die(step: int) -> None:
        if step == 3:
            drawn.append(torch.rand(4))  # what the generator gives after step 2
        if step == 4:
            raise Fenced("fenced", "another learner")

    buffer.on_claim = die
    with pytest.raises(Fenced):
        first.run()
    services.close()
    assert checkpoint.steps_in(RunDir(config.run_dir).checkpoints) == [2]  # ended with the process
    versions = {call[1]: call[3] for call in buffer.calls if call[0] == "commit" and call[1] <= 2}
    second, buffer, backend, services = make_learner(config, gang, committed=4, replay_to=4)
    told: dict[str, Any] = {}
    register = buffer.register
    buffer.register = lambda **words: told.update(words | {"digests": dict(words["digests"])}) or register(**words)  # type: ignore[method-assign, func-returns-value]
    torch.manual_seed(99)
    buffer.on_claim = lambda step: drawn.append(torch.rand(4)) if step == 3 else None
    second.run()
    services.close()
    assert weights(backend) == weights(reference)
    assert second._runner.coefficients == whole._runner.coefficients
    assert (told["step"], told["ledger"]) == (2, '{"epoch": 1, "trained_to": 2}')
    assert {step: told["digests"][step] for step in versions} == versions and max(told["digests"]) == 2
    assert torch.equal(*drawn)
    rates = [
        [line[name] for line in read_lines(RunDir(tmp_path / run).metrics / "learner.jsonl")]
        for run in ("whole", "cut")
        for name in ("lr", "kl_coeff")
    ]
    assert rates[2][-3:] == rates[0][-3:] and rates[3][-3:] == rates[1][-3:]
    assert len(set(rates[0])) >= 4 and len(set(rates[1])) >= 4


def test_one_is_under_way_and_the_end_waits_for_it(gang: Gang, model_dir: Path, tmp_path: Path, held: Any) -> None:
    """SIGTERM while one is written: it becomes durable, then that of the step under way; exit without an error."""
    stop = Stop()
    config = make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC)
    learner, buffer, _, services = make_learner(config, gang, stop=stop)
    door = held("learner.checkpoint_rename")

    def claim(step: int) -> None:
        if step == 3:
            assert door.reached.wait(60)
            stop.set("SIGTERM")  # while step 3 is claimed: it is trained to its end
            threading.Timer(0.2, door.go.set).start()

    buffer.on_claim = claim
    assert learner.run() == "asked to stop"
    services.close()
    assert checkpoint.steps_in(RunDir(config.run_dir).checkpoints) == [3, 2]
    assert steps_said(buffer, "commit", "checkpointed") == [
        ("commit", 1),
        ("commit", 2),
        ("commit", 3),
        ("checkpointed", 2),
        ("checkpointed", 3),
    ]
    assert ("goodbye", False) in buffer.calls


def test_an_error_of_the_run_waits_for_the_one_under_way(
    gang: Gang,
    model_dir: Path,
    tmp_path: Path,
    held: Any,  # noqa: F811, RUF100
) -> None:
    config = make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC)
    learner, buffer, _, services = make_learner(config, gang)
    door = held("learner.checkpoint_manifest")

    def claim(step: int) -> None:
        if step == 3:
            assert door.reached.wait(60)
            threading.Timer(0.2, door.go.set).start()
            raise AsyncRLError("hang", "no batch")

    buffer.on_claim = claim
    with pytest.raises(AsyncRLError, match="no batch"):
        learner.run()
    services.close()
    found = checkpoint.newest(RunDir(config.run_dir).checkpoints)
    assert found is not None and found[0].step == 2
    assert "checkpointed" not in buffer.names()  # nobody was left to say it; the next learner does


def test_failures_are_counted_and_several_end_the_run(
    gang: Gang,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC + "learner.checkpoint_failures = 2\n")
    learner, buffer, _, services = make_learner(config, gang)
    full, passed = OSError(28, "No space left on device"), [0]

    def failpoint(name: str) -> None:
        passed[0] += name == "learner.checkpoint_shard"
        if name == "learner.checkpoint_shard" and passed[0] in (1, 3, 4):
            raise full

    monkeypatch.setattr(checkpoint, "failpoint", failpoint)
    buffer.on_claim = lambda step: learner._saver.settle()
    with pytest.raises(AsyncRLError) as caught:
        learner.run()
    services.close()
    assert caught.value.code == "disk.full"
    assert [call[1] for call in buffer.calls if call[0] == "checkpointed"] == [4]
    assert capfd.readouterr().out.count("ERROR: checkpoint of step") == 2  # of 2 and 6; that of 8 ended the run
    root = RunDir(config.run_dir).checkpoints
    assert [path.name for path in root.iterdir()] == ["step_000004"]
    failures = {
        line["step"]: line["checkpoint_failures"]
        for line in read_lines(RunDir(config.run_dir).metrics / "learner.jsonl")
    }
    assert [failures[step] for step in (3, 5, 7, 8)] == [1, 0, 1, 1]


def test_another_learner_fences_the_writer(gang: Gang, model_dir: Path, tmp_path: Path, held: Any) -> None:
    """Taken over while it writes: nothing becomes visible, and the main thread hears of it."""
    config = make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC)
    learner, buffer, _, services = make_learner(config, gang)
    door = held("learner.checkpoint_rename")
    mark = RunDir(config.run_dir).learner

    def claim(step: int) -> None:
        if step == 3:
            assert door.reached.wait(60)
            mark.write_text('{"epoch": 2, "pid": 1, "host": "elsewhere"}')
            door.go.set()

    buffer.on_claim = claim
    with pytest.raises(Fenced):
        learner.run()
    services.close()
    assert checkpoint.steps_in(RunDir(config.run_dir).checkpoints) == []
    assert "checkpointed" not in buffer.names()


def test_a_bug_in_the_writer_ends_the_run(gang: Gang, model_dir: Path, tmp_path: Path, held: Any) -> None:
    learner, _, _, services = make_learner(make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC), gang)
    door = held("learner.checkpoint_state")
    door.error = KeyError("a bug")
    door.go.set()
    with pytest.raises(KeyError, match="a bug"):
        learner.run()
    services.close()


def test_a_writer_that_hangs_is_a_hang(
    gang: Gang,
    model_dir: Path,
    tmp_path: Path,
    held: Any,
    monkeypatch: pytest.MonkeyPatch,  # noqa: F811, RUF100
) -> None:
    monkeypatch.setattr(saving, "CLOSE_S", 0.01)
    config = make_config(model_dir, tmp_path / "run", steps=9, extra=ASYNC + "run.hang_timeout_s = 0.2\n")
    learner, _, _, services = make_learner(config, gang)
    door = held("learner.checkpoint_begin")
    with pytest.raises(AsyncRLError, match=r"the checkpoint of step 2 is not written after 0\.2 s") as caught:
        learner.run()
    door.go.set()
    for writer in [thread for thread in threading.enumerate() if thread.name == "checkpoint"]:
        writer.join(60)  # or it passes the fail-points of the next test
    services.close()
    assert caught.value.code == "hang"


def test_the_copy_is_given_back(gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one copy at a time, none between two checkpoints, also after one that failed."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, failed = [0], list[str]()
    snapshot = FSDP2Backend.snapshot

    def watched(self: FSDP2Backend) -> Any:
        assert not alive
        made: Any = snapshot(self)
        own = {parameter.data_ptr() for parameter in self._policy.parameters()}
        assert all(tensor.data_ptr() not in own for tensor in made.tensors.values())
        alive.update(made.tensors.values())
        most[0] = max(most[0], len(alive))
        return made

    def failpoint(name: str) -> None:
        if name == "learner.checkpoint_state" and not failed:
            failed.append(name)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(FSDP2Backend, "snapshot", watched)
    monkeypatch.setattr(checkpoint, "failpoint", failpoint)
    learner, buffer, _, services = make_learner(make_config(model_dir, tmp_path / "run", steps=7, extra=ASYNC), gang)

    def claim(step: int) -> None:
        if step % 2 == 0:
            learner._saver.settle()
            assert not alive

    buffer.on_claim = claim
    gc.disable()  # it must not be needed
    try:
        learner.run()
    finally:
        gc.enable()
    services.close()
    assert most[0] > 10
    assert [call[1] for call in buffer.calls if call[0] == "checkpointed"] == [4, 6, 7]


# ---------------------------------------------------------------- the best ones


def every_step(config: Config, *settings: str) -> Config:
    """A checkpoint after each step, of which the last one stays."""
    return parse(dump(config), overrides=["learner.checkpoint_every=1", "learner.checkpoint_keep=1", *settings])


@pytest.mark.parametrize("extra", ["", ASYNC])
def test_the_best_by_reward_stay_beside_the_last(gang: Gang, model_dir: Path, tmp_path: Path, extra: str) -> None:
    config = every_step(make_config(model_dir, tmp_path / "run", steps=6, extra=extra), "learner.checkpoint_best=2")
    rewards = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.8, 5: 0.3, 6: 0.0}

    def rewarded(buffer: FakeBuffer, step: int) -> Any:
        import msgspec

        batch = make_batch(step)
        groups = tuple(
            msgspec.structs.replace(group, samples=tuple(
                msgspec.structs.replace(sample, reward=rewards[step] + 0.01 * (sample.index % 2))
                for sample in group.samples
            )) for group in batch.groups
        )  # fmt: skip
        return msgspec.structs.replace(batch, groups=groups)

    def go(until: int) -> None:
        learner, buffer, _, services = make_learner(config, gang)

        def claim(step: int) -> Any:
            if step > until:
                raise Fenced("fenced", "another learner")
            return rewarded(buffer, step)

        buffer.on_claim = claim
        if until < 6:
            with pytest.raises(Fenced):
                learner.run()
        else:
            learner.run()
        services.close()

    root = RunDir(config.run_dir).checkpoints
    go(3)  # a restart in between: scores come from best.json
    assert checkpoint.steps_in(root) == [3, 2]
    go(6)
    assert checkpoint.steps_in(root) == [6, 4, 2]
    found = retention.read(root)
    assert found is not None and found.best == (2, 4) and set(found.scores) == {2, 4, 6}
    assert found.scores[2] == pytest.approx(0.905)
    newest = checkpoint.newest(root)
    assert newest is not None and newest[0].step == 6  # the best are not what a run goes on from


def test_the_best_by_an_evaluation_wait_for_it(gang: Gang, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811, RUF100
    name = "val-core/add/reward/mean@1"
    config = every_step(
        make_config(model_dir, tmp_path / "run", steps=5),
        "learner.checkpoint_best=1",
        "evaluation.every=1",
        f"learner.checkpoint_metric={name}",
        "evaluation.path=held_out.jsonl",
    )
    learner, buffer, _, services = make_learner(config, gang)
    root = RunDir(config.run_dir).checkpoints
    seen: dict[int, list[int]] = {}
    ends = {3: {1: 0.5}, 4: {2: 0.75}, 5: {3: 0.25}}  # at the claim of a step: evaluations of earlier ones end

    def claim(step: int) -> None:
        seen[step] = checkpoint.steps_in(root)
        services.evaluated.update({ended: {name: value} for ended, value in ends.get(step, {}).items()})

    buffer.on_claim = claim
    buffer.evaluations = lambda seen: ([], "")  # type: ignore[attr-defined]
    learner.run()
    services.close()
    # 1 stays while its evaluation runs; with the next one it is beaten; 3 and 4 wait for theirs one after the other.
    assert seen[3] == [2, 1] and seen[4] == [3, 2, 1] and seen[5] == [4, 3, 2]
    assert checkpoint.steps_in(root) == [5, 4, 2]
    found = retention.read(root)
    assert found is not None and found.best == (2,)
