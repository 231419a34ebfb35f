"""Models beside the policy through the learner's own loop: checkpoints, restarts, exports and metrics of whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_learner_loop import gang, make_batch, make_config, make_learner, model_dir, weights

from asyncrl.errors import ConfigError
from asyncrl.metrics import read_lines
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir
from learners.checkpoints import checkpoint
from learners.checkpoints.export import export
from learners.gang.gang import Gang

assert gang and model_dir  # fixtures

PRIME = "learner.algorithm.advantage = 'prime'\nlearner.process_reward.lr = 1e-3\nlearner.process_reward.update = '{}'"
WARM = (
    "learner.algorithm.advantage = 'gae'\nlearner.critic.lr = 5e-3\nlearner.critic.critic_warmup = 50\n"
    "learner.critic.critic_warmup_until = 0.2"
)


def ran(gang: Gang, model: Path, place: Path, extra: str, *, steps: int, whole: int) -> tuple[Any, list[Any]]:
    """The first `steps` of a run of `whole`, from its newest checkpoint; the weights, and its lines of metrics."""
    config = make_config(model, place, steps=whole, extra=extra)
    stop = Stop()
    learner, buffer, backend, services = make_learner(config, gang, stop=stop)
    buffer.batches.update(
        {step: msgspec.structs.replace(make_batch(1), step=step, version=step - 1) for step in range(1, whole + 1)}
    )
    if steps < whole:
        buffer.on_claim = lambda step: stop.set("SIGTERM") if step == steps else None
    try:
        learner.run()
    finally:
        services.close()
    return weights(backend), [line for line in read_lines(RunDir(place).metrics / "learner.jsonl") if "step" in line]


@pytest.mark.parametrize("order", ["after", "before"])
def test_prime_resumes_from_a_checkpoint_to_the_same_bits(
    gang: Gang, model_dir: Path, tmp_path: Path, order: str
) -> None:
    wanted, lines = ran(gang, model_dir, tmp_path / "whole", PRIME.format(order), steps=5, whole=5)
    assert all(math.isfinite(line[name]) for line in lines for name in ("process_loss", "process_accuracy", "loss"))
    final = RunDir(tmp_path / "whole").export
    kept = (final / "process_reward" / "model.safetensors").read_bytes()
    assert kept != (final / "model.safetensors").read_bytes()
    # As after a kill: the newest checkpoint (of step 4) is gone, step 2's is the start.
    assert checkpoint.steps_in(RunDir(tmp_path / "whole").checkpoints) == [5, 4]
    ran(gang, model_dir, tmp_path / "cut", PRIME.format(order), steps=2, whole=5)
    assert checkpoint.steps_in(RunDir(tmp_path / "cut").checkpoints) == [2]
    config = make_config(model_dir, tmp_path / "cut", steps=5, extra=PRIME.format(order))
    early = export(config, gang=gang)
    assert early.name == "export-step_000002" and (early / "process_reward" / "config.json").exists()
    found, _ = ran(gang, model_dir, tmp_path / "cut", PRIME.format(order), steps=5, whole=5)
    assert found == wanted
    assert (RunDir(tmp_path / "cut").export / "process_reward" / "model.safetensors").read_bytes() == kept
    again = export(config, gang=gang, step=5, out=tmp_path / "again")
    for name in ("model.safetensors", "process_reward/model.safetensors"):
        mine = (RunDir(tmp_path / "cut").export / name).read_bytes()
        assert (again / name).read_bytes() == mine != (early / name).read_bytes()
    with pytest.raises(ConfigError, match="no checkpoint of step 3"):
        export(config, gang=gang, step=3)
    with pytest.raises(ConfigError, match="not empty"):
        export(config, gang=gang, out=early)


@pytest.mark.long
def test_a_warm_critic_is_warm_after_a_restart(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    _, lines = ran(gang, model_dir, tmp_path / "whole", WARM, steps=30, whole=30)
    alone = [line["critic_alone"] for line in lines]
    ended = alone.index(0.0)  # steps of the warm-up
    assert 0 < ended < 25 and alone == [1.0] * ended + [0.0] * (30 - ended)
    assert (
        lines[ended - 1]["explained_variance"]
        >= 0.2
        > max((line["explained_variance"] for line in lines[: ended - 1]), default=0.0)
    )
    for stop in (ended, ended + 1):  # right after the end, and a step later
        place = tmp_path / f"cut{stop}"
        ran(gang, model_dir, place, WARM, steps=stop, whole=30)
        found = checkpoint.newest(RunDir(place).checkpoints)
        assert found is not None and found[0].step == stop and found[0].critic_warm
        _, again = ran(gang, model_dir, place, WARM, steps=30, whole=30)
        assert [line["critic_alone"] for line in again] == alone
        for name in ("model.safetensors", "critic/model.safetensors"):
            final = RunDir(tmp_path / "whole").export / name
            assert (RunDir(place).export / name).read_bytes() == final.read_bytes()


def test_checkpoints_of_before_the_setting_are_read() -> None:
    old = msgspec.json.encode({"step": 3, "ledger": "", "digests": {}, "ranks": 1, "config": ""})
    assert msgspec.json.decode(old, type=checkpoint.State).critic_warm is False
