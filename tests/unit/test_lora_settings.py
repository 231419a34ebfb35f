"""`[learner.lora]`: what it does not go with, what versions are published as, and a head without a gradient."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from asyncrl import config
from asyncrl.config.mode import DATASET, sends_adapters
from asyncrl.config.sections.lora import TAKE_ADAPTERS, TAKE_WHOLE
from asyncrl.errors import AsyncRLError, ConfigErrors
from asyncrl.plugins import BUILT_IN
from asyncrl.preflight import code
from learners.backends.sharded_checkpoint import host_shard, load_shards, read_about
from learners.models.logprobs import chunked_logprobs

TOML = 'model.path="m"\ndata.source="a:b"\n'
REWARD = '[[reward]]\nfunction="a:b"'


def made(*settings: str, reward: str = REWARD) -> config.Config:
    return config.parse(TOML + reward, overrides=["learner.lora.rank=8", *settings])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["learner.ranks=2", "learner.parallel.tensor=2"], "with learner.parallel.tensor is not supported"),
        (["learner.ranks=2", "learner.parallel.expert=2"], "with learner.parallel.expert is not supported"),
        (["learner.backend=megatron"], "backend 'megatron' trains all weights"),
        (["learner.optim.name=muon"], "learner.optim.name = 'muon', which is for whole matrices"),
        (["learner.compile=true"], "with learner.compile is not supported"),
        (["learner.lora.publish=adapter", "producers.engine=vllm"], "engine 'vllm' takes whole weights alone"),
        (["learner.lora.publish=adapter", "weightsync.in_place=true"], "an adapter needs a second copy"),
        (["learner.lora.alpha=0"], "learner.lora.alpha"),
        (["learner.lora.dropout=1.0"], "learner.lora.dropout"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        made(*settings)
    assert why in str(caught.value)
    without = [one for one in settings if "lora" not in one]
    if len(without) == len(settings):
        config.parse(TOML + REWARD, overrides=without)  # fine where all weights are trained


def test_a_reward_model_trains_its_head_too() -> None:
    rows = ["learner.mode=reward_model", "producers.engine=dataset", "sampling.group_size=2"]
    with pytest.raises(ConfigErrors, match="a reward model trains its head too"):
        made(*rows, reward="")
    assert not sends_adapters(made("learner.mode=dpo", *rows[1:], reward="")), "nobody takes weights"


def test_adapters_go_to_engines_that_take_them() -> None:
    assert sends_adapters(made())
    assert not sends_adapters(config.parse(TOML + REWARD))
    assert not sends_adapters(made("weightsync.in_place=true"))
    assert not sends_adapters(made("weightsync.dtype=int8"))
    assert not sends_adapters(made("learner.lora.publish=merged"))
    assert not sends_adapters(made("producers.engine=somebodys"))
    assert sends_adapters(made("producers.engine=somebodys", "learner.lora.publish=adapter"))
    for engine in TAKE_WHOLE:
        assert not sends_adapters(made(f"producers.engine={engine}"))
    assert {*TAKE_ADAPTERS, *TAKE_WHOLE, DATASET} == set(BUILT_IN["asyncrl.engines"])


def test_peft_is_asked_for_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    (found,) = code.check_plugins(made())
    assert found.code == "config.extra" and "asyncrl[lora]" in found.remedy
    assert not list(code.check_plugins(config.parse(TOML + REWARD)))


def test_a_frozen_head_spares_its_gradient_and_changes_no_other() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (7,))
    found = []
    for trained in (True, False):
        hidden = torch.linspace(-1, 1, 42).view(7, 6).requires_grad_()
        weight = torch.linspace(-2, 3, 66).view(11, 6).requires_grad_(trained)
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, chunk_tokens=3)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
        found.append(hidden.grad)
        assert (weight.grad is not None) is trained
    assert torch.equal(found[0], found[1])


def test_shards_say_what_they_are_for(tmp_path: Path) -> None:
    state = {"model/a": torch.arange(4.0)}
    for name, about in (("plain", ""), ("told", '{"base":"1"}')):
        (tmp_path / name).mkdir()
        host_shard(state, rank=0, extra={}, copy=False, about=about).save(tmp_path / name)
        assert read_about(tmp_path / name) == about
        filled = {"model/a": torch.zeros(4)}
        load_shards(tmp_path / name, filled, rank=0, ranks=1)
        assert torch.equal(filled["model/a"], state["model/a"])
    for other, why in (
        ({"model/a": torch.zeros(3)}, "a larger model/a than the model, where it is [3]"),
        ({"model/a": torch.zeros(2, 2)}, "a larger model/a"),
        ({"model/b": torch.zeros(4)}, "has model/a, which is not trained"),
        ({"model/a": torch.zeros(5)}, "model/a and 0 others are not in"),
    ):
        with pytest.raises(AsyncRLError, match=re.escape(why)) as error:
            load_shards(tmp_path / "plain", other, rank=0, ranks=1)
        assert error.value.code == "learner.checkpoint"
    critic = {"critic/model/a": torch.zeros(4)}
    with pytest.raises(AsyncRLError, match="critic/model/a and 0 others"):  # the policy's is not the critic's
        load_shards(tmp_path / "plain", critic, rank=0, ranks=1)
    assert read_about(tmp_path) == ""
