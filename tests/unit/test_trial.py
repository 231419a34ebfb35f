"""Poison in the packer, the loss and the model: found by itself, quarantined with its trace, the step goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_learner_loop import gang, make_batch, make_config, make_learner, model_dir, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asyncrl.errors import AsyncRLError
from learners.algorithms import registry
from learners.backends.fsdp2.mesh import Split
from learners.backends.fsdp2.sharded_module import Sharded
from learners.backends.optimizers import Optimizers
from learners.batch.bad_groups import find_bad_groups
from learners.gang.gang import Gang
from learners.step import update

assert gang and model_dir  # fixtures

MARK = -7.25  # a log-prob that no other sample has


def spoiled(step: int, bad: dict[int, Any], *, groups: int = 5) -> Any:
    """The batch of a step; `bad`: place -> changes to the first sample of that group."""
    batch = make_batch(step, groups=groups)
    made = list(batch.groups)
    for place, changes in bad.items():
        first, *rest = made[place].samples
        made[place] = msgspec.structs.replace(
            made[place], samples=(msgspec.structs.replace(first, **changes(first)), *rest)
        )
    return msgspec.structs.replace(batch, groups=tuple(made))


def marked(sample: Any) -> dict[str, Any]:
    return {"logprobs": np.full(sample.response.size, MARK, np.float32)}


def without(batch: Any, places: set[int]) -> Any:
    return msgspec.structs.replace(batch, groups=tuple(g for n, g in enumerate(batch.groups) if n not in places))


def run_of(config: Any, gang: Gang, batches: dict[int, Any]) -> tuple[Any, Any, Any]:
    learner, buffer, backend, services = make_learner(config, gang)
    buffer.batches.update(batches)
    try:
        learner.run()
    finally:
        services.close()
    return buffer, weights(backend), learner


def buried(buffer: Any) -> dict[int, str]:
    return {call[2][0]: call[3] for call in buffer.calls if call[0] == "quarantine"}


def breaking_loss(how: str) -> Any:
    """The default loss, broken where a marked sample is in the rows."""

    def of(algorithm: Any) -> Any:
        inner = ORIGINAL(algorithm)

        def loss(inputs: Any) -> Any:
            result = inner(inputs)
            if (inputs.behaviour == MARK).any():
                if how == "raises":
                    raise ValueError("this loss does not like the sample")
                value = float(how)
                return result._replace(loss=result.loss * value)
            return result

        return loss

    return of


ORIGINAL = update.loss_for


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("how", ["raises", "nan", "inf"])
def test_a_loss_that_breaks_on_two_groups(
    *, gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, minibatches: int
) -> None:
    monkeypatch.setattr(update, "loss_for", breaking_loss(how))
    extra = f"learner.algorithm.minibatches = {minibatches}"
    batch = spoiled(2, {1: marked, 4: marked})
    buffer, ended, _ = run_of(make_config(model_dir, tmp_path / "bad", extra=extra), gang, {2: batch})
    reasons = buried(buffer)
    assert list(reasons) == [201, 204]
    if how == "raises":
        said = "loss: ValueError: this loss does not like the sample | test_trial.py:"
        assert all(reason.startswith(said) and reason.endswith("update.py") is False for reason in reasons.values())
    else:
        assert all(reason.startswith("loss: ") for reason in reasons.values())
    assert buffer.names().count("commit") == 3
    rest = without(batch, {1, 4})
    _, wanted, _ = run_of(make_config(model_dir, tmp_path / "rest", extra=extra), gang, {2: rest})
    assert ended == wanted  # as a replay of the recorded batch without them


def test_a_sample_that_the_packer_cannot_take(
    gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = registry.advantage_for

    def of(algorithm: Any) -> Any:
        def advantages(rollouts: Any) -> Any:
            scores = rollouts.rewards.sum(-1, keepdim=True)
            if (scores == 13.0).any():
                raise RuntimeError("no 13")
            found = inner(algorithm)(rollouts)
            return found._replace(advantages=torch.where(scores == 14.0, torch.nan, found.advantages))

        return advantages

    monkeypatch.setattr(registry, "advantage_for", of)
    batch = spoiled(1, {0: lambda _: {"reward": 13.0}, 3: lambda _: {"reward": 14.0}})
    buffer, ended, _ = run_of(make_config(model_dir, tmp_path / "bad"), gang, {1: batch})
    reasons = buried(buffer)
    assert list(reasons) == [100, 103]
    assert reasons[100].startswith("packer: RuntimeError: no 13 | test_trial.py:")
    assert reasons[103] == "packer: advantages are not finite"
    _, wanted, _ = run_of(make_config(model_dir, tmp_path / "rest"), gang, {1: without(batch, {0, 3})})
    assert ended == wanted


def test_a_sample_that_crashes_the_model(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    """One rank: an id outside the embedding raises in the middle of the forward pass."""
    batch = spoiled(2, {2: lambda s: {"response": np.full(s.response.size, 10**6, np.int32)}})
    buffer, ended, _ = run_of(make_config(model_dir, tmp_path / "bad"), gang, {2: batch})
    assert list(buried(buffer)) == [202] and buried(buffer)[202].startswith("model: ")
    _, wanted, _ = run_of(make_config(model_dir, tmp_path / "rest"), gang, {2: without(batch, {2})})
    assert ended == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_pass_that_broke_off_are_in_no_later_one(gang: Gang, dtype: torch.dtype) -> None:
    """FSDP keeps those of earlier micro-batches where no `parameter.grad` shows them."""
    assert gang.size == 1
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    half = dtype != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    for part in (model[0], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = Optimizers([torch.optim.AdamW(model.parameters())])
    sharded = Sharded(model, [model, model[0]], optimizer, ranks=1, split=Split())

    def forward(rows: Any) -> Any:
        if rows is None:
            raise IndexError("an id outside the embedding")
        out = model(rows.to(dtype)).float()
        return out, out, None

    def loss(out: torch.Tensor, *_: Any) -> Any:
        return out.sum(), {}

    rows: Any = torch.ones(1, 4)
    sharded.train([rows, rows], forward, loss)
    norm = sharded.discard()
    with pytest.raises(IndexError):
        sharded.train([100 * rows, None], forward, loss)
    sharded.discard()
    sharded.train([rows, rows], forward, loss)
    assert sharded.discard() == norm


def test_arrays_of_different_lengths(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    batch = spoiled(1, {1: lambda s: {"logprobs": np.zeros(s.response.size + 3, np.float32)}})
    buffer, _, _ = run_of(make_config(model_dir, tmp_path / "bad"), gang, {1: batch})
    assert list(buried(buffer)) == [101] and buffer.names().count("commit") == 3


def test_a_step_of_poison_alone_is_a_skipped_update(
    gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "loss_for", breaking_loss("raises"))
    every = dict.fromkeys(range(5), marked)
    batches = {2: spoiled(2, every), 4: spoiled(4, every), 5: spoiled(5, every), 6: spoiled(6, every)}
    learner, buffer, _, services = make_learner(make_config(model_dir, tmp_path / "run", steps=6), gang)
    buffer.batches.update(batches)
    with pytest.raises(AsyncRLError) as caught:
        learner.run()
    services.close()
    assert caught.value.code == "learner.nonfinite" and "up to step 6" in caught.value.message
    assert buried(buffer) == {}  # where each of them breaks, the loss may be at fault: nobody is blamed
    assert [call[1] for call in buffer.calls if call[0] == "commit"] == [1, 2, 3, 4, 5]


def test_too_little_memory_is_nobodys_fault(
    gang: Gang, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(algorithm: Any) -> Any:
        def loss(inputs: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

        return loss

    monkeypatch.setattr(update, "loss_for", of)
    learner, buffer, _, services = make_learner(make_config(model_dir, tmp_path / "run"), gang)
    with pytest.raises(torch.OutOfMemoryError):
        learner.run()
    services.close()
    assert buried(buffer) == {}


def test_the_search_asks_little() -> None:
    groups: Any = [msgspec.convert({"group": n}, Named) for n in range(64)]
    asked = 0

    def ask(part: Any) -> str:
        nonlocal asked
        asked += 1
        return "bad" if any(one.group in (5, 40) for one in part) else ""

    assert find_bad_groups(groups, ask) == {5: "bad", 40: "bad"} and asked <= 2 * 2 * 6
    assert find_bad_groups(groups, lambda part: "too many" if len(part) > 20 else "") == {}


class Named(msgspec.Struct):
    group: int
